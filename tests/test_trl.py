"""Trainers with a compute_loss of their own: as many forward passes as without the pruning."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from digits_loop import weights
from torch.utils.data import SequentialSampler
from trainer_arguments import arguments

import fineprune as fp
from fineprune.errors import InputError

pytest.importorskip("trl", reason="trl is not installed: make integrations")

from datasets import Dataset
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from fineprune.integrations.transformers import PruningMixin
from fineprune.integrations.transformers.sample_losses import losses_and_tokens

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "trl_sft.py"))
N, BATCH, EPOCHS = 40, 8, 4
# Epochs 1 and 3 keep 24 samples: 3 batches instead of 5.
POLICY = fp.FinePruning(fp.Schedule(EPOCHS, window=2, start=1), prune=16)
BATCHES = [5, 3, 5, 3]

pytestmark = [
    pytest.mark.usefixtures("one_thread_everywhere"),
    # TRL calls what transformers calls deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Counted:
    """Counts the forward passes of the network that it makes, with and without gradients."""

    def __init__(self):
        torch.manual_seed(0)
        self.tokens = EXAMPLE["tokenizer"]()
        self.model = EXAMPLE["network"](self.tokens, 8)
        self.passes = {True: 0, False: 0}
        self.model.register_forward_hook(self.count)

    def count(self, *_):
        self.passes[torch.is_grad_enabled()] += 1


OWN = {"num_train_epochs": EPOCHS, "eval_strategy": "epoch", "bf16": False, "seed": 0}


def texts(number=N):
    return EXAMPLE["sums"](number)


def pairs(number=N):
    """Return sums with a right and a wrong result; in every fourth pair, they are exchanged."""
    items = []
    for place, item in enumerate(texts(number)):
        answers = item["completion"], str(int(item["completion"]) + 7)
        chosen, rejected = answers[::-1] if place % 4 == 0 else answers
        items.append({"prompt": item["prompt"], "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(items)


class PruningSFTTrainer(PruningMixin, SFTTrainer):
    pass


class PruningDPOTrainer(PruningMixin, DPOTrainer):
    pass


def pair_losses(outputs, inputs, beta=0.1):
    """The DPO losses of the page on TRL."""
    chosen, rejected = outputs["log_probs"].sum(1).chunk(2)
    margin = (chosen - inputs["ref_chosen_logps"]) - (rejected - inputs["ref_rejected_logps"])
    return -F.logsigmoid(beta * margin.float())


KINDS = {
    "sft": (SFTTrainer, PruningSFTTrainer, SFTConfig, texts, {}, {}),
    "dpo": (
        DPOTrainer,
        PruningDPOTrainer,
        DPOConfig,
        pairs,
        {"precompute_ref_log_probs": True},
        {"sample_losses": pair_losses},
    ),
}


def trained(kind, folder, policy=None, made=None, more=None, resume=None, **changes):
    """Train with a policy, or with TRL alone; return the trainer and the counts of its passes."""
    alone, pruning, config, data, options, needed = KINDS[kind]
    counted = Counted()
    more = {**({} if policy is None else needed), **(more or {})}
    trainer = (made or (alone if policy is None else pruning))(
        model=counted.model,
        args=arguments(folder, config, **{**OWN, **options, **changes}),
        train_dataset=data(),
        eval_dataset=data(16),
        processing_class=counted.tokens,
        **({} if policy is None else {"pruning": policy}),
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, counted.passes


# -- forward passes --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_full_data_makes_the_passes_of_trl_alone_and_logs_the_same_names(kind, tmp_path):
    alone, passes = trained(kind, tmp_path)
    unpruned, same_passes = trained(kind, tmp_path, fp.FullData(EPOCHS))
    assert passes[True] == 5 * EPOCHS
    assert same_passes == passes
    own, others = (trainer.state.log_history for trainer in (unpruned, alone))
    ours = [log for log in own if "fineprune/epoch" in log]
    assert len(ours) == EPOCHS
    # No metric of TRL has moved into the values of the pruner.
    names = set().union(*ours) - {"epoch", "step"}
    assert all(name.startswith("fineprune/") for name in names)
    kept = [set(log) for log in own if log not in ours]
    assert kept == [set(log) for log in others]


@pytest.mark.parametrize("kind", KINDS)
def test_pruning_saves_the_forward_passes_of_the_steps_that_it_saves(kind, tmp_path):
    _, passes = trained(kind, tmp_path)
    trainer, fewer = trained(kind, tmp_path, POLICY)
    assert trainer.state.global_step == sum(BATCHES) == trainer.pruner.total_steps()
    assert fewer[True] == sum(BATCHES)
    assert passes[True] - fewer[True] == 4
    # Evaluations; DPO's reference is another network.
    assert fewer[False] == passes[False]
    assert trainer.pruner.counts.sum() > 0


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_without_pruning_the_weights_are_those_of_trl_alone(kind, accumulation, tmp_path):
    """Both train in the order of the data."""

    def in_order(base):
        return type(
            "InOrder", (base,), {"_get_train_sampler": lambda self, *_: SequentialSampler(texts())}
        )

    alone, pruning, *_ = KINDS[kind]
    changes = {"gradient_accumulation_steps": accumulation}
    unpruned, _ = trained(kind, tmp_path, fp.FullData(EPOCHS), made=in_order(pruning), **changes)
    expected, _ = trained(kind, tmp_path, made=in_order(alone), **changes)
    assert torch.equal(weights(unpruned.model), weights(expected.model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_equals_the_undisturbed_one(kind, tmp_path):
    """The checkpoint is inside the second epoch; the policy finds the learning rates each time."""
    changes = {"save_strategy": "steps", "save_steps": 7, "lr_scheduler_type": "linear"}
    policy = fp.Adaptive(EPOCHS, save=0.3)
    whole, _ = trained(kind, tmp_path, policy, **changes)
    resumed, passes = trained(
        kind, tmp_path, policy, resume=str(tmp_path / "checkpoint-7"), **changes
    )
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert passes[True] == whole.state.global_step - 7 == 14 - 7
    assert whole.pruner.policy.rates[-1] < 0.5


# -- the losses ------------------------------------------------------------------------------------


def test_the_losses_of_a_fused_head_are_those_of_the_logits(tmp_path):
    trainer, _ = trained("sft", tmp_path, POLICY)
    batch = trainer.data_collator([trainer.train_dataset[number] for number in range(BATCH)])
    with torch.no_grad():
        passes = trainer.model(**batch, fused_lm_head=True), trainer.model(**batch)
    fused, plain = (
        losses_and_tokens(trainer.model, outputs, batch["labels"], 0.0)[0] for outputs in passes
    )
    torch.testing.assert_close(fused, plain)
    assert len(set(fused.tolist())) == BATCH


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_a_policy_reach_the_loss_of_trl(kind, tmp_path):
    policies = [fp.InfoBatch(EPOCHS, save=0.2, anneal=0.2, rescale=on) for on in (True, False)]
    one, other = (weights(trained(kind, tmp_path, policy)[0].model) for policy in policies)
    assert (one - other).abs().max() > 1e-6


def test_pairs_need_losses_of_their_own(tmp_path):
    with pytest.raises(InputError, match=r"expected one loss for each of the 8 samples .*: give"):
        trained("dpo", tmp_path, POLICY, more={"sample_losses": None})


def train_rewards(folder, **more):
    counted = Counted()
    config = LlamaConfig(**{**counted.model.config.to_dict(), "num_labels": 1})
    model = LlamaForSequenceClassification(config)
    model.score.weight.data *= 1000  # At first, the loss of each pair would be log(2).
    trainer = type("PruningRewardTrainer", (PruningMixin, RewardTrainer), {})(
        model=model,
        args=arguments(folder, RewardConfig, **{**OWN, "eval_strategy": "no"}),
        train_dataset=pairs(),
        processing_class=counted.tokens,
        pruning=POLICY,
        **more,
    )
    trainer.train()


def test_rewards_have_no_labels_and_need_the_losses_of_pairs(tmp_path):
    def losses(outputs, inputs):
        chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
        return -F.logsigmoid(chosen - rejected)

    train_rewards(tmp_path, sample_losses=losses)
    with pytest.raises(InputError, match="labels: NoneType: give the trainer sample_losses="):
        train_rewards(tmp_path)


def test_texts_without_padding_have_no_losses(tmp_path):
    packed = {"packing": True, "max_length": 32}
    with pytest.raises(InputError, match="packed into one row have none"):
        trained("sft", tmp_path, fp.Adaptive(EPOCHS, save=0, rates=[1] * EPOCHS), **packed)
    trainer, _ = trained("sft", tmp_path, fp.FullData(EPOCHS), packing_strategy="wrapped", **packed)
    assert trainer.pruner.num_samples == len(trainer.train_dataset) < N  # A row is one sample.


# -- the example -----------------------------------------------------------------------------------


def test_the_example_learns_in_fewer_steps(tmp_path):
    trainer = EXAMPLE["main"](320, str(tmp_path))
    assert trainer.state.global_step == trainer.pruner.total_steps() == 42
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[-1] < 0.9 * losses[0]
