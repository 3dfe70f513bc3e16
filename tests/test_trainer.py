"""The Trainer of transformers with pruning: it trains what a plain loop trains."""

import gc
import math
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import trainer_arguments
from digits_loop import weights
from gloo_group import free_port, launched, leave_group
from torch.utils.data import DataLoader, DistributedSampler

import fineprune as fp
from fineprune.errors import InputError

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    ViTForImageClassification,
)

from fineprune.integrations.transformers import (  # noqa: E402
    PruningMixin,
    PruningTrainer,
    WatchingTrainer,
    checks,
)

EXAMPLES = Path(__file__).parents[1] / "examples"
N, BATCH, EPOCHS, WORDS, LENGTH = 80, 8, 5, 24, 6
SCHEDULE = fp.Schedule(EPOCHS, window=3, start=1, block=2, count=1)
POLICY = fp.FinePruning(SCHEDULE, prune=32)
# Epochs 1 and 4 keep 48 samples: 6 batches instead of 10.
BATCHES = [10, 6, 10, 6, 10]


pytestmark = pytest.mark.usefixtures("one_thread_everywhere")


@pytest.fixture(autouse=True, scope="module")
def frozen_garbage():
    gc.freeze()  # Each training collects garbage, and would go through all that pytest holds.
    yield
    gc.unfreeze()


# -- data and models ------------------------------------------------------------------------------


def images():
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn(N, 1, 8, 8, generator=random)
    labels = (pixels.mean((1, 2, 3)) + 0.05 * torch.randn(N, generator=random) > 0).long()
    # The Trainer removes columns that the model does not take.
    return [
        {"pixel_values": image, "labels": label, "source": 0}
        for image, label in zip(pixels, labels, strict=True)
    ]


def texts(seed=0):
    """Texts of 2 to ``LENGTH`` words, padded, whose words follow each other in order."""
    random = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(N):
        number = int(torch.randint(2, LENGTH + 1, (), generator=random))
        first = int(torch.randint(1, WORDS - LENGTH, (), generator=random))
        words = torch.arange(first, first + number)
        if torch.rand((), generator=random) < 0.2:
            words = torch.randint(1, WORDS, (number,), generator=random)
        padding = torch.zeros(LENGTH - number, dtype=torch.long)
        items.append(
            {
                "input_ids": torch.cat((words, padding)),
                "attention_mask": torch.cat((torch.ones_like(words), padding)),
                "labels": torch.cat((words, padding - 100)),
            }
        )
    return items


def labelled_texts():
    return [{**item, "labels": item["input_ids"][0] % 3} for item in texts()]


def measured_texts():
    return [{**item, "labels": item["input_ids"][0] / WORDS} for item in texts()]


def tagged_texts():
    tags = [torch.stack((item["input_ids"][0] % 3, item["input_ids"][1] % 2)) for item in texts()]
    return [
        {**item, "labels": tag.clamp(max=1).float()}
        for item, tag in zip(texts(), tags, strict=True)
    ]


MULTI_LABEL = {"problem_type": "multi_label_classification"}


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=2,
    )
    return transformers.ViTForImageClassification(config)


def llama(dropout=0.0):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attention_dropout=dropout,
    )
    return transformers.LlamaForCausalLM(config)


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


CASES = {
    "image": (vit, images),
    "text": (bert, labelled_texts),
    "language": (llama, texts),
    # A resumed training needs the random state.
    "dropout": (lambda: llama(0.2), texts),
}


def arguments(folder, made=TrainingArguments, **changes):
    settings = {"num_train_epochs": EPOCHS, "max_grad_norm": 0, **changes}
    return trainer_arguments.arguments(folder, made, **settings)


class Watched(PruningTrainer):
    """Notes the plan of each epoch."""

    plans: dict[int, list[int]]

    def _run_epoch(self, **given):
        self.plans = getattr(self, "plans", {})
        self.pruner.set_epoch(given["epoch"])
        self.plans[given["epoch"]] = self.pruner.plan.kept.tolist()
        super()._run_epoch(**given)


def trained(case, folder, policy=POLICY, resume=None, made=Watched, more=None, **changes):
    model, data = CASES[case]
    trainer = made(
        model(),
        arguments(folder, **changes),
        train_dataset=data(),
        pruning=policy,
        **(more or {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


# -- without pruning ------------------------------------------------------------------------------


class SameOrder(Trainer):
    """The Trainer alone, in the order of ``DistributedSampler``."""

    def _get_train_sampler(self, train_dataset=None):
        return DistributedSampler(train_dataset, 1, 0, seed=self.args.seed)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("case", ["image", "language"])
def test_without_pruning_the_weights_are_those_of_the_trainer_alone(case, accumulation, tmp_path):
    changes = {
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
    }
    pruning = trained(case, tmp_path, fp.FullData(2), **changes)
    model, data = CASES[case]
    alone = SameOrder(model(), arguments(tmp_path, **changes), train_dataset=data())
    alone.train()
    assert torch.equal(weights(pruning.model), weights(alone.model))
    own, others = (trainer.state.log_history for trainer in (pruning, alone))
    losses = [log.get("loss") for log in own if "fineprune/epoch" not in log]
    assert losses == [log.get("loss") for log in others]
    assert pruning.state.global_step == alone.state.global_step == 2 * math.ceil(10 / accumulation)


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_a_watch_changes_nothing_and_is_resumed(strategy, tmp_path):
    changes = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 3,
        "label_smoothing_factor": 0.2,
        "eval_strategy": "epoch",
        "save_strategy": "steps",
        "save_steps": 3,
        "train_sampling_strategy": strategy,
    }
    given = {"train_dataset": labelled_texts(), "eval_dataset": labelled_texts()[:16]}
    alone = Trainer(bert(), arguments(tmp_path / "alone", **changes), **given)
    alone.train()
    watches = [fp.LabelWatch(N, 3) for _ in range(2)]
    for watch, resume in zip(watches, (None, str(tmp_path / "whole/checkpoint-3")), strict=True):
        args = arguments(tmp_path / ("again" if resume else "whole"), **changes)
        trainer = WatchingTrainer(bert(), args, watch=watch, **given)
        trainer.train(resume_from_checkpoint=resume)
        assert torch.equal(weights(trainer.model), weights(alone.model))
        assert trainer.evaluate()["eval_loss"] == alone.evaluate()["eval_loss"]
    assert torch.equal(*(watch.ranking().scores for watch in watches))
    assert watches[0].ranking().labels.tolist() == [
        int(item["labels"]) for item in labelled_texts()
    ]


def test_a_watch_takes_logits_without_a_name(tmp_path):
    class PlainForImageClassification(ViTForImageClassification):
        def forward(self, pixel_values, labels=None):
            return super().forward(pixel_values, labels=labels).to_tuple()

    watch, model = fp.LabelWatch(N, 2), PlainForImageClassification(vit().config)
    args = arguments(tmp_path, num_train_epochs=1)
    WatchingTrainer(model, args, train_dataset=images(), watch=watch).train()
    assert watch.ranking().labels.tolist() == [int(item["labels"]) for item in images()]


@pytest.mark.parametrize("case", ["text", "language"])
def test_the_labels_of_classifiers_are_watched_if_the_policy_uses_them(tmp_path, case):
    policy = fp.Adaptive(2, save=0, rates=[1, 1])
    trainer = trained(case, tmp_path, policy, num_train_epochs=2)
    assert (trainer.pruner.watch is not None) == (case == "text")


# -- with pruning ---------------------------------------------------------------------------------


def loss_of_samples(case, outputs, labels):
    """Return losses of shape (B,) as a plain loop computes them, and their factors in the mean."""
    if case != "language":
        return F.cross_entropy(outputs.logits, labels, reduction="none"), torch.ones(len(labels))
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    losses = F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), reduction="none")
    tokens = targets.ne(-100).sum(1)
    return losses.view(targets.shape).sum(1) / tokens, tokens


def plain_loop(case, accumulation, policy=POLICY):
    """Train the same in a plain loop; return the model, the pruner, the plans and the steps."""
    made, data = CASES[case]
    model = made().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = fp.Pruner(data(), policy, seed=42, batch_size=BATCH, accumulation=accumulation)
    collate = fp.IndexedCollate(transformers.default_data_collator)
    loader = DataLoader(pruner.dataset, BATCH, sampler=pruner.sampler, collate_fn=collate)
    plans, steps = {}, 0
    for epoch in pruner.epochs():
        plans[epoch] = pruner.plan.kept.tolist()
        batches = list(loader)
        for begin in range(0, len(batches), accumulation):
            step = batches[begin : begin + accumulation]
            parts = []
            for index, batch in step:
                labels = batch.pop("labels")
                parts.append((index, *loss_of_samples(case, model(**batch), labels)))
            total = sum(share.sum() for *_, share in parts)
            for index, losses, shares in parts:
                pruner.record(index, losses.detach())
                ((pruner.weighted(index, losses) * shares).sum() / total).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return model, pruner, plans, steps


@pytest.mark.parametrize(
    ("case", "accumulation"), [("image", 1), ("image", 2), ("text", 1), ("language", 2)]
)
def test_with_pruning_it_trains_as_a_plain_loop_does(case, accumulation, tmp_path):
    model, pruner, plans, steps = plain_loop(case, accumulation)
    trainer = trained(case, tmp_path, gradient_accumulation_steps=accumulation)
    assert trainer.plans == plans
    assert [len(plan) for plan in plans.values()] == [8 * batches for batches in BATCHES]
    assert torch.equal(trainer.pruner.counts, pruner.counts)
    assert pruner.counts.sum() > 0
    assert trainer.state.global_step == steps == pruner.total_steps()
    torch.testing.assert_close(weights(trainer.model), weights(model), rtol=1e-4, atol=1e-6)


def test_the_weights_of_a_policy_change_the_loss(tmp_path):
    policy = fp.InfoBatch(EPOCHS, save=0.2, anneal=0.2)
    model, pruner, plans, steps = plain_loop("language", 2, policy)
    trainer = trained("language", tmp_path, policy, gradient_accumulation_steps=2)
    assert trainer.plans == plans
    assert trainer.state.global_step == steps == pruner.total_steps()
    torch.testing.assert_close(weights(trainer.model), weights(model), rtol=1e-4, atol=1e-6)
    unweighted = fp.InfoBatch(EPOCHS, save=0.2, anneal=0.2, rescale=False)
    other = trained("language", tmp_path, unweighted, gradient_accumulation_steps=2)
    assert (weights(trainer.model) - weights(other.model)).abs().max() > 1e-3


def test_a_policy_whose_epochs_depend_on_data_trains_its_budget_of_steps(tmp_path):
    policy = fp.Adaptive(EPOCHS, save=0.3, first_epoch=1, rates=range(EPOCHS, 0, -1))
    trainer = trained("image", tmp_path, policy)
    assert trainer.state.global_step == trainer.pruner.total_steps() < sum([10] * EPOCHS)
    assert len({len(plan) for plan in trainer.plans.values()}) > 1
    with pytest.raises(InputError, match="expected a policy whose epochs have lengths known"):
        trained("image", tmp_path, fp.InfoBatch(EPOCHS))


def test_loader_workers_and_a_second_training_change_nothing(tmp_path):
    trainer = trained("image", tmp_path, num_train_epochs=EPOCHS)
    counts, plans = trainer.pruner.counts.clone(), trainer.plans
    workers = trained("image", tmp_path, dataloader_num_workers=2)
    assert workers.plans == plans
    assert torch.equal(workers.pruner.counts, counts)
    assert torch.equal(weights(workers.model), weights(trainer.model))
    trainer.model.load_state_dict(vit().state_dict())
    trainer.train()
    assert torch.equal(trainer.pruner.counts, counts)
    assert torch.equal(weights(workers.model), weights(trainer.model))


def test_a_second_training_has_the_arguments_that_were_set_before_it(tmp_path):
    """As in a hyperparameter search."""
    trainer = trained("image", tmp_path)
    trainer.model.load_state_dict(vit().state_dict())
    changes = {"gradient_accumulation_steps": 2, "seed": 7}
    for name, value in changes.items():
        setattr(trainer.args, name, value)
    trainer.create_accelerator_and_postprocess()
    trainer.train()
    same = trained("image", tmp_path, **changes)
    assert trainer.plans == same.plans
    assert torch.equal(weights(trainer.model), weights(same.model))
    trainer.args.num_train_epochs = 3
    with pytest.raises(InputError, match=f"expected num_train_epochs={EPOCHS}, .* got 3"):
        trainer.train()


def test_the_learning_rate_the_log_and_the_bar_know_the_number_of_steps(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # Its thread would be waited for.
    trainer = trained(
        "image", tmp_path, lr_scheduler_type="linear", logging_steps=1, logging_strategy="steps",
        disable_tqdm=False, eval_strategy="epoch", more={"eval_dataset": images()},
    )  # fmt: skip
    total = sum(BATCHES)
    assert trainer.state.max_steps == trainer.state.global_step == total
    assert trainer.lr_scheduler.get_last_lr()[0] == 0
    history = trainer.state.log_history
    assert [log["epoch"] for log in history if "eval_loss" in log] == [1, 2, 3, 4, 5]
    logs = [log for log in history if "loss" in log]
    assert [log["learning_rate"] for log in logs][-1] == pytest.approx(0.1 / total)
    epochs = [log for log in history if "fineprune/epoch" in log]
    assert [log["fineprune/skipped"] for log in epochs] == pytest.approx([0, 0.4, 0, 0.4, 0])
    assert epochs[-1]["step"] == total
    assert f"{total}/{total}" in capfd.readouterr().err


# -- resuming -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """An undisturbed training with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return trained("dropout", folder, **RESUMED), folder


RESUMED = {
    "save_strategy": "steps",
    "save_steps": 1,
    "gradient_accumulation_steps": 2,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
}


# Two batches per step: the epochs have 5, 3, 5, 3 and 5 steps.
@pytest.mark.parametrize("step", [2, 5, 7, 8, 9, 16])
def test_a_resumed_training_equals_the_undisturbed_one(step, checkpoints, tmp_path):
    whole, folder = checkpoints
    changes = {**RESUMED, "save_strategy": "no"}
    resumed = trained("dropout", tmp_path, resume=str(folder / f"checkpoint-{step}"), **changes)
    assert resumed.plans == {e: p for e, p in whole.plans.items() if e in resumed.plans}
    first = next(epoch for epoch, last in enumerate([5, 8, 13, 16, 21]) if step < last)
    assert sorted(resumed.plans) == list(range(first, EPOCHS))
    assert resumed.state.global_step == whole.state.global_step == 21
    assert torch.equal(resumed.pruner.counts, whole.pruner.counts)
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_a_training_that_was_saved_after_its_last_step_is_complete(checkpoints, tmp_path):
    whole, folder = checkpoints
    changes = {**RESUMED, "save_strategy": "no"}
    resumed = trained("dropout", tmp_path, resume=str(folder / "checkpoint-21"), **changes)
    assert resumed.pruner.position == whole.pruner.position
    assert torch.equal(resumed.pruner.counts, whole.pruner.counts)


def test_a_checkpoint_that_does_not_fit_is_refused(checkpoints, tmp_path):
    _, folder = checkpoints
    inside = str(folder / "checkpoint-2")
    with pytest.raises(
        InputError, match=r"with the batches of the checkpoint, .*'accumulation': 2"
    ):
        trained("dropout", tmp_path, resume=inside, **{**RESUMED, "gradient_accumulation_steps": 3})
    with pytest.raises(InputError, match="expected a pruner state with seed"):
        trained("dropout", tmp_path, resume=inside, **{**RESUMED, "data_seed": 7})
    file = folder / "checkpoint-4" / "pruner.pt"
    for damaged in (b"", b"no file of torch", file.read_bytes()[:-100]):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=r"4/pruner\.pt, .*: resume from another") as raised:
            trained("dropout", tmp_path, resume=str(file.parent), **RESUMED)
        assert "weights_only" not in str(raised.value)
    file.unlink()
    # A training that is killed while it saves has not written this file yet.
    with pytest.raises(InputError, match=r"expected the pruner in .*saved to its end"):
        trained("dropout", tmp_path, resume=str(folder / "checkpoint-4"), **RESUMED)


# -- learning rates -------------------------------------------------------------------------------


SAVING = fp.Adaptive(EPOCHS, save=0.3)
FOUND = "fineprune: adaptive takes the learning rates from LambdaLR, which steps per step"


def said(capsys):
    """Return what the trainer says about the learning rates."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("fineprune:")]


def rates_of(pruner):
    """Return the rate of each epoch, relative to the largest one, as the policy knows it."""
    return pruner.policy.rates


def test_the_policy_finds_the_learning_rates_of_the_scheduler(tmp_path, capsys):
    trainer = trained("image", tmp_path, SAVING, lr_scheduler_type="linear", warmup_steps=3)
    assert said(capsys) == [FOUND]
    numbers = [len(plan) for plan in trainer.plans.values()]
    assert numbers[0] == N > 2 * numbers[-1]
    assert trainer.state.global_step == trainer.pruner.total_steps() == 35

    given = fp.Pruner(images(), SAVING, batch_size=BATCH, seed=42)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    given.set_rates(transformers.get_scheduler("linear", optimizer, 3, 35), by="steps")
    assert rates_of(trainer.pruner) == rates_of(given)
    before = weights(trainer.model)
    trainer.model.load_state_dict(vit().state_dict())
    trainer.train()  # The scheduler of the first training does not count.
    assert torch.equal(weights(trainer.model), before)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("polynomial", {}),
        *((f"cosine_{kind}_min_lr", {"min_lr": 0.01}) for kind in ("with", "warmup_with")),
    ],
)
def test_schedulers_that_read_the_optimizers_default_rate_are_found(kind, more, tmp_path, capsys):
    changes = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": more, "warmup_steps": 3}
    trainer = trained("image", tmp_path, SAVING, **changes)
    assert said(capsys) == [FOUND]
    assert rates_of(trainer.pruner)[-1] < 0.3
    assert trainer.state.global_step == 35


def test_a_resumed_training_finds_the_rates_of_the_whole_one(tmp_path, capsys):
    changes = {"lr_scheduler_type": "cosine", "save_strategy": "steps", "save_steps": 4}
    whole = trained("language", tmp_path / "whole", SAVING, **changes)
    for step in (4, 32):
        inside = str(tmp_path / "whole" / f"checkpoint-{step}")
        resumed = trained("language", tmp_path / "again", SAVING, resume=inside, **changes)
        assert rates_of(resumed.pruner) == rates_of(whole.pruner)
        assert torch.equal(weights(resumed.model), weights(whole.model))
    assert said(capsys) == [FOUND] * 3


def test_a_scheduler_of_ones_own_gives_its_learning_rates(tmp_path, capsys):
    model = vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.1)
    trainer = Watched(
        model, arguments(tmp_path), train_dataset=images(), pruning=SAVING,
        optimizers=(optimizer, scheduler),
    )  # fmt: skip
    trainer.train()
    assert "from StepLR" in said(capsys)[0]
    assert rates_of(trainer.pruner)[0] == 1
    assert rates_of(trainer.pruner)[-1] == pytest.approx(0.1)
    assert scheduler.last_epoch == trainer.state.global_step == 35


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
def test_learning_rates_that_depend_on_the_loss_are_taken_to_be_constant(kind, tmp_path, capsys):
    with pytest.warns(UserWarning, match="Adaptive was given no learning rates"):
        trainer = trained(
            "image", tmp_path, SAVING, lr_scheduler_type=kind, eval_strategy="epoch",
            more={"eval_dataset": images()},
        )  # fmt: skip
    assert "takes the learning rate to be constant" in said(capsys)[0]
    assert set(rates_of(trainer.pruner)) == {1}


# -- forward passes -------------------------------------------------------------------------------


class OwnBase(Trainer):
    """Its loss is that of the model, which it computes itself."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def translator():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


BASES = {
    "trainer": (Trainer, TrainingArguments, vit, images, {}),
    "own": (OwnBase, TrainingArguments, vit, images, {}),
    "translation": (
        transformers.Seq2SeqTrainer,
        transformers.Seq2SeqTrainingArguments,
        translator,
        texts,
        {"predict_with_generate": True, "generation_max_length": 4},
    ),
}


def counted_passes(base, folder, policy=None):
    """Train and evaluate; return the trainer, and its forward passes with and without gradients."""
    kind, settings, model, data, changes = BASES[base]
    network, passes = model(), {True: 0, False: 0}

    def count(*_):
        passes[torch.is_grad_enabled()] += 1

    network.register_forward_hook(count)
    args = arguments(folder, settings, eval_strategy="epoch", **changes)
    pruning = {} if policy is None else {"pruning": policy}
    made = kind if policy is None else type("Pruning", (PruningMixin, kind), {})
    trainer = made(network, args, train_dataset=data(), eval_dataset=data()[:16], **pruning)
    trainer.train()
    return trainer, passes


@pytest.mark.parametrize("base", BASES)
def test_a_trainer_makes_as_many_forward_passes_as_without_the_mixin(base, tmp_path):
    alone, passes = counted_passes(base, tmp_path)
    unpruned, same = counted_passes(base, tmp_path, fp.FullData(EPOCHS))
    assert same == passes
    assert passes[True] == 10 * EPOCHS
    pruned, fewer = counted_passes(base, tmp_path, POLICY)
    assert fewer == {True: sum(BATCHES), False: passes[False]}
    assert pruned.pruner.counts.sum() > 0
    evaluations = [
        [set(log) for log in trainer.state.log_history if "eval_loss" in log]
        for trainer in (alone, unpruned, pruned)
    ]
    assert evaluations[0] == evaluations[1] == evaluations[2]


class Doubling(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**{name: torch.cat([part, part]) for name, part in inputs.items()}).loss


class Elsewhere(OwnBase):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return vit()(**inputs).loss


class Doubled(OwnBase):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * super().compute_loss(model, inputs)


class Repeating(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return DistributedSampler(train_dataset, 1, 0)


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return DataLoader(images(), BATCH, collate_fn=transformers.default_data_collator)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (Doubling, "give the trainer sample_losses="),
        (Elsewhere, "expected compute_loss to call the model"),
        (
            Doubled,
            "to be the mean of the losses of its samples, .*: give the trainer sample_losses=",
        ),
        (Repeating, "expected the class with the sampler=Trainer, .* got Repeating"),
        (OwnLoader, "expected a training loader|expected the training loader"),
    ],
)
def test_a_trainer_with_other_losses_or_samples_is_refused(base, message, tmp_path):
    made = type("Pruning", (PruningMixin, base), {})
    with pytest.raises(InputError, match=message):
        trained("image", tmp_path, made=made)


def test_a_compute_loss_in_front_of_the_mixin_is_refused(tmp_path):
    class InFront(PruningTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

    with pytest.raises(InputError, match=r"derive the class in the order \(mixin, InFront\)"):
        trained("image", tmp_path, made=InFront)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="transformers asks torch for it (2.7)"
)
def test_a_compiled_model_trains_the_same(tmp_path):
    plain = trained("image", tmp_path)
    compiled = trained("image", tmp_path, torch_compile=True, torch_compile_backend="eager")
    assert compiled.plans == plain.plans
    torch.testing.assert_close(weights(compiled.model), weights(plain.model), rtol=1e-4, atol=1e-6)


def test_a_loss_function_of_ones_own_comes_with_the_losses_of_the_samples(tmp_path):
    def loss_of_batch(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    def losses_of_samples(outputs, inputs):
        return F.cross_entropy(outputs.logits, inputs["labels"], reduction="none")

    given = {"compute_loss_func": loss_of_batch, "sample_losses": losses_of_samples}
    own = trained("image", tmp_path, more=given, gradient_accumulation_steps=2)
    usual = trained("image", tmp_path, gradient_accumulation_steps=2)
    assert own.plans == usual.plans
    torch.testing.assert_close(weights(own.model), weights(usual.model), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["image", "language"])
def test_with_label_smoothing_the_smoothed_losses_are_recorded(case, tmp_path):
    """Their mean is compared with the loss of the Trainer."""
    trainer = trained(case, tmp_path, label_smoothing_factor=0.2)
    assert trainer.pruner.counts.sum() > 0


def test_the_weights_of_a_policy_have_their_effect_if_the_model_does_not_divide(tmp_path):
    """BERT's classifier takes ``num_items_in_batch`` and ignores it."""

    class Dividing(Watched):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    policy, halved = fp.InfoBatch(EPOCHS, save=0.2, anneal=0.2), {"learning_rate": 0.05}
    one, other = (
        trained("text", tmp_path, policy, made=made, gradient_accumulation_steps=2, **changes)
        for made, changes in ((Watched, halved), (Dividing, {}))
    )
    assert one.plans == other.plans
    torch.testing.assert_close(weights(one.model), weights(other.model), rtol=1e-4, atol=1e-6)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_train_epochs": 3}, "expected num_train_epochs=5, .* got 3"),
        ({"max_steps": 100}, "expected max_steps=-1, .* got 100"),
        ({"auto_find_batch_size": True}, "expected auto_find_batch_size=False"),
        ({"ignore_data_skip": True}, "expected ignore_data_skip=False"),
        ({"enable_jit_checkpoint": True}, "expected enable_jit_checkpoint=False"),
        ({"train_sampling_strategy": "group_by_length"}, "expected train_sampling_strategy=random"),
    ],
)
def test_arguments_that_would_undo_the_pruning_are_refused(changes, expected, tmp_path):
    with pytest.raises(InputError, match=expected):
        trained("image", tmp_path, **changes)


def test_what_has_no_indices_is_refused(tmp_path):
    with pytest.raises(TypeError, match="expected a policy such as"):
        trained("image", tmp_path, fp.Pruner(images(), POLICY))
    tuples = {"data_collator": lambda items: [item["labels"] for item in items]}
    with pytest.raises(InputError, match="expected the collate function to return a dict"):
        trained("image", tmp_path, more=tuples)


def made_small(model, **more):
    torch.manual_seed(0)
    names = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    names |= {"cls_token_id": 1, "sep_token_id": 2}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return model(model.config_class(**names, **sizes, intermediate_size=8, **more))


@pytest.mark.parametrize(
    ("model", "data", "more"),
    [
        (transformers.GPT2LMHeadModel, texts, {}),
        (transformers.OpenAIGPTLMHeadModel, texts, {}),
        (transformers.BertLMHeadModel, texts, {"is_decoder": True}),
        (transformers.BertForMaskedLM, texts, {}),
        (BertForSequenceClassification, labelled_texts, {"num_labels": 3}),
        (BertForSequenceClassification, measured_texts, {"num_labels": 1}),
        (BertForSequenceClassification, tagged_texts, {"num_labels": 2, **MULTI_LABEL}),
    ],
)
def test_the_losses_of_a_model_are_its_own(model, data, more, tmp_path):
    """In the first batch, they are compared with the model's loss; the class has another name."""
    trainer = PruningTrainer(
        made_small(type("Renamed", (model,), {}), **more),
        arguments(tmp_path, gradient_accumulation_steps=2, num_train_epochs=2),
        train_dataset=data(),
        pruning=fp.Adaptive(2, save=0, rates=[1, 1]),
    )
    trainer.train()
    assert trainer.state.global_step == 10


def test_a_loss_that_is_not_known_is_not_guessed(tmp_path):
    xlnet = made_small(transformers.XLNetLMHeadModel, d_head=4)  # It predicts no next tokens.
    trainer = PruningTrainer(xlnet, arguments(tmp_path), train_dataset=texts(), pruning=POLICY)
    with pytest.raises(InputError, match=r"to be the mean of the losses of its samples, .*: give"):
        trainer.train()


# -- the release of transformers ------------------------------------------------------------------


def test_the_table_names_all_private_methods_that_are_overridden():
    overridden = {
        name
        for part in PruningMixin.__mro__
        if part.__module__.startswith("fineprune.")
        for name in vars(part)
        if name.startswith("_") and not name.startswith("__") and hasattr(Trainer, name)
    }
    assert overridden == set(checks.OVERRIDDEN)


def test_a_release_without_a_private_method_is_refused(monkeypatch, tmp_path):
    monkeypatch.delattr(Trainer, "_run_epoch")
    with pytest.raises(InputError, match=r"transformers 5\.19 to .* without Trainer\._run_epoch"):
        trained("image", tmp_path)


# -- two processes --------------------------------------------------------------------------------


def train_ranks(folder):
    """Train with two processes, which are forks of this one, so that it imports once."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train_rank, args=(rank, folder, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(int(any(rank.exitcode for rank in ranks)))


def train_rank(rank, folder, port):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ |= launched(rank, port)
    saves = {"save_strategy": "steps", "save_steps": 7}
    told = {"language": summary(trained("language", f"{folder}/whole", **RANKED, **saves))}
    inside = f"{folder}/whole/checkpoint-7"
    told["resumed"] = summary(trained("language", f"{folder}/again", resume=inside, **RANKED))
    try:
        trained("image", folder, accelerator_config={"even_batches": False}, **RANKED)
    except InputError as error:
        told["refused"] = str(error)
    # With images, each batch is split among the processes.
    split = {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 8}
    told["image"] = summary(trained("image", folder, **{**RANKED, **split}))
    torch.save(told, f"{folder}/rank{rank}.pt")
    leave_group()


def summary(trainer):
    return {
        "plans": trainer.plans,
        "counts": trainer.pruner.counts,
        "steps": trainer.state.global_step,
        "weights": weights(trainer.model),
    }


# Two batches per step, so that the epochs have 5, 3, 5, 3 and 5 steps; step 7 is inside epoch 1.
RANKED = {
    "per_device_train_batch_size": BATCH // 2,
    "gradient_accumulation_steps": 2,
    "ddp_backend": "gloo",
}


@pytest.fixture(scope="module")
def ranks_folder(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    code = f"import test_trainer; test_trainer.train_ranks({str(folder)!r})"
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    subprocess.run([*python, "-c", code], env=environment, check=True, timeout=240)
    return folder


@pytest.fixture(scope="module")
def ranks(ranks_folder):
    return [torch.load(ranks_folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", ["image", "language"])
def test_two_processes_train_as_one_with_the_doubled_batch(case, ranks, tmp_path):
    whole = trained(case, tmp_path, gradient_accumulation_steps=2)
    for told in ranks:
        assert told[case]["plans"] == whole.plans
        assert torch.equal(told[case]["counts"], whole.pruner.counts)
        assert told[case]["steps"] == whole.state.global_step == 21
        torch.testing.assert_close(
            told[case]["weights"], weights(whole.model), rtol=1e-4, atol=1e-6
        )


def test_two_processes_resume_inside_an_epoch(ranks):
    for told in ranks:
        resumed, whole = told["resumed"], told["language"]
        assert sorted(resumed["plans"]) == [1, 2, 3, 4]
        assert torch.equal(resumed["counts"], whole["counts"])
        assert torch.equal(resumed["weights"], whole["weights"])
        assert resumed["steps"] == whole["steps"]


def test_one_process_resumes_what_two_began(ranks, ranks_folder, tmp_path):
    inside = str(ranks_folder / "whole" / "checkpoint-7")
    resumed = trained("language", tmp_path, resume=inside, gradient_accumulation_steps=2)
    assert sorted(resumed.plans) == [1, 2, 3, 4]
    assert torch.equal(resumed.pruner.counts, ranks[0]["language"]["counts"])


def test_two_processes_must_have_equally_many_batches(ranks):
    for told in ranks:
        assert "expected even_batches=True" in told["refused"]


# -- the examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("trainer_image", 512), ("trainer_text", 128)])
def test_an_example_learns_in_fewer_steps(name, size, tmp_path):
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    trainer = main(size, str(tmp_path))
    steps = size // 32 * trainer.pruner.policy.epochs
    assert trainer.state.global_step == trainer.pruner.total_steps() < 0.8 * steps
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[-1] < 0.9 * losses[0]
    marked = [
        line for line in (EXAMPLES / f"{name}.py").read_text().splitlines()
        if re.search(r"# \d$", line)
    ]  # fmt: skip
    assert len(marked) == 2
