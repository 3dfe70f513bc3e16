"""Pruning in Lightning's Trainer: equal to Lightning alone and to a plain loop, also resumed."""

import copy
import csv
import importlib
import importlib.util
import itertools
import pickle
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

import fineprune as fp
from fineprune.errors import InputError

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
    ),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
]


@pytest.fixture(scope="module")
def runs(one_thread_everywhere):
    """The trainings, in one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PL_GLOBAL_SEED", raising=False)
        yield importlib.import_module("lightning_runs")


@pytest.fixture(scope="module")
def pruning(runs):
    """The callback's class."""
    return importlib.import_module("fineprune.integrations.lightning").DataPruning


@pytest.fixture(scope="module")
def watching(runs):
    """The class of the callback that only watches."""
    return importlib.import_module("fineprune.integrations.lightning").LabelWatching


@pytest.fixture(scope="module")
def undisturbed(runs, pruning, tmp_path_factory):
    """A pruned training, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    net = runs.fit(pruning(runs.POLICY), runs.every_step(folder))
    return net, folder


# --- parity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_without_pruning_the_weights_are_those_of_lightning_alone(runs, pruning, workers):
    """Dropout shows that no random numbers are drawn in addition."""
    data = runs.ordered_loader(num_workers=workers, persistent_workers=workers > 0)
    alone, unpruned = (
        runs.fit(*callbacks, net=runs.Net(dropout=0.3), data=data)
        for callbacks in ([], [pruning(fp.FullData(runs.EPOCHS))])
    )
    assert runs.equal_weights(alone, unpruned)
    assert unpruned.steps == alone.steps == 13 * runs.EPOCHS
    assert not runs.equal_weights(alone, runs.Net())


def test_pruning_equals_the_plain_loop(runs, undisturbed):
    net, _ = undisturbed
    network, pruner, steps = runs.plain_loop(runs.POLICY)
    assert runs.equal_weights(net.network, network)
    assert torch.equal(runs.pruner_of(net).counts, pruner.counts)
    assert pruner.counts.any()
    assert net.trainer.global_step == net.steps == steps == sum(runs.BATCHES)
    assert net.lengths == runs.BATCHES  # The totals of the progress bar.
    assert net.validations == runs.EPOCHS


def test_the_loggers_of_the_trainer_receive_every_epoch(runs, pruning, tmp_path):
    logger = importlib.import_module("lightning.pytorch.loggers").CSVLogger(tmp_path)
    net = runs.fit(pruning(runs.POLICY), logger=logger, log_every_n_steps=1)
    lines = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    epochs = [line for line in lines if line["fineprune/epoch"]]
    pruner = runs.pruner_of(net)
    kept = [pruner.step_counts.num_kept(epoch) for epoch in range(runs.EPOCHS)]
    assert [float(line["fineprune/skipped"]) for line in epochs] == [
        1 - number / len(runs.DATA) for number in kept
    ]
    ends = list(itertools.accumulate(runs.BATCHES))
    assert [int(line["step"]) for line in epochs] == ends


def test_accumulation_equals_the_plain_loop(runs, pruning):
    net = runs.fit(pruning(runs.POLICY), accumulate_grad_batches=3)
    network, pruner, steps = runs.plain_loop(runs.POLICY, accumulation=3)
    assert runs.equal_weights(net.network, network)
    assert torch.equal(runs.pruner_of(net).counts, pruner.counts)
    assert net.trainer.global_step == net.steps == steps < sum(runs.BATCHES) / 2


def test_weights_and_numbers_that_depend_on_the_losses_equal_the_plain_loop(runs, pruning):
    policy = fp.InfoBatch(runs.EPOCHS, prune=0.5)
    net = runs.fit(pruning(policy), net=runs.Net(steps=100))
    network, _, steps = runs.plain_loop(policy, steps=100)
    assert runs.equal_weights(net.network, network)
    assert net.trainer.global_step == steps < 13 * runs.EPOCHS
    assert net.validations == runs.EPOCHS


def test_the_number_of_steps_is_known_even_if_the_first_epoch_is_pruned(runs, pruning):
    schedule = fp.Schedule(runs.EPOCHS, window=runs.EPOCHS, start=0)
    net = runs.fit(pruning(fp.RandomPruning(schedule, 0.3)))
    assert net.steps == net.trainer.global_step == 9 * runs.EPOCHS


def test_two_ranks_equal_lightning_alone_and_one_process(runs, pruning, undisturbed, tmp_path):
    if sys.platform != "linux":
        pytest.skip("the ranks are forks")
    one, other = runs.on_two_ranks(tmp_path)
    net, _ = undisturbed
    for found in (one, other):
        assert found["unpruned"]
        assert found["resumed"] == {12: True, 18: True}
        assert torch.equal(found["counts"], runs.pruner_of(net).counts)
        assert found["steps"] == (net.steps, net.steps)
        assert found["lengths"] == runs.BATCHES
        assert "got use_distributed_sampler=False" in found["refused"]
        assert found["sampled"]
        for name, value in net.network.state_dict().items():
            assert torch.equal(found["weights"][name], one["weights"][name])
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-6)


# --- watching -----------------------------------------------------------------------------------


def test_a_watch_changes_nothing_and_is_resumed(runs, watching, tmp_path):
    """It refuses nothing of what the pruning does."""
    options = {"accumulate_grad_batches": 3, "limit_train_batches": 9, "val_check_interval": 4}
    alone = runs.fit(data=runs.ordered_loader(), **options)
    watches = [fp.LabelWatch(len(runs.DATA), runs.LABELS) for _ in range(2)]
    for watch, ckpt_path in zip(watches, (None, tmp_path / "epoch=2.ckpt"), strict=True):
        callbacks = (
            [watching(watch)] if ckpt_path else [watching(watch), runs.every_epoch(tmp_path)]
        )
        net, data = runs.Returning(), runs.ordered_loader(fp.Indexed(runs.DATA))
        runs.fit(*callbacks, net=net, data=data, ckpt_path=ckpt_path, **options)
        assert runs.equal_weights(net, alone)
        assert net.trainer.global_step == alone.trainer.global_step == 3 * runs.EPOCHS
    assert torch.equal(*(watch.ranking().scores for watch in watches))
    assert watches[0].ranking().labels.tolist() == runs.DATA.tensors[1].tolist()


def test_a_step_that_returns_nothing_to_watch_is_refused(runs, watching):
    with pytest.raises(InputError, match=r"expected training_step to return .* got no 'index'"):
        runs.fit(watching(fp.LabelWatch(len(runs.DATA), runs.LABELS)), net=runs.Net(steps=100))


# --- learning rates -----------------------------------------------------------------------------


def adaptive(epochs, rates=None):
    return fp.Adaptive(epochs, 0.3, rates)


@pytest.fixture
def said(caplog):
    """What the callback says."""
    return lambda: [line for line in caplog.messages if line.startswith("fineprune:")]


def test_the_policy_finds_the_learning_rates_of_the_scheduler(runs, pruning, said):
    """A plain loop gives them itself; the training is the same."""
    policy = adaptive(runs.EPOCHS)
    net = runs.fit(pruning(policy))
    (line,) = said()
    assert line == (
        "fineprune: adaptive takes the learning rates from OneCycleLR, which steps per step"
    )
    network, pruner, steps = runs.plain_loop(policy, gives_rates=True)
    assert pruner.policy.rates[-1] < 0.2 < max(pruner.policy.rates)
    assert runs.pruner_of(net).policy.rates == pruner.policy.rates
    assert runs.equal_weights(net.network, network)
    assert net.trainer.global_step == steps == round(0.7 * 13 * runs.EPOCHS)
    assert net.lengths[0] == 13 > 2 * net.lengths[-1]


def test_a_resumed_run_finds_the_learning_rates_of_the_whole_training(runs, pruning, tmp_path):
    policy = adaptive(runs.EPOCHS)
    whole = runs.fit(pruning(policy), runs.every_step(tmp_path))
    for step in (5, 30):
        file = tmp_path / f"step={step}.ckpt"
        assert_continues(runs, runs.fit(pruning(policy), ckpt_path=file), whole)


SCHEDULERS = {
    "per epoch": ({"interval": "epoch"}, "which steps per epoch", 0.01),
    "per step": ({"interval": "step"}, "which steps per step", 0.01),
    "now and then": ({"interval": "epoch", "frequency": 2}, "to be constant", 1),
    "none": (None, None, 1),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Adaptive was given no learning rates")
def test_schedulers_per_epoch_and_per_step_and_none(runs, pruning, said, kind):
    options, words, last = SCHEDULERS[kind]
    net = runs.Scheduled(options)
    runs.fit(pruning(adaptive(3)), net=net, max_epochs=3)
    found = runs.pruner_of(net).policy.rates
    assert (found[0], found[-1]) == pytest.approx((1, last))
    assert len(said()) == (words is not None)
    assert words is None or words in said()[0]
    assert net.trainer.global_step == round(0.7 * 3 * 13)


def test_without_learning_rates_the_policy_says_what_it_assumes(runs, pruning):
    with pytest.warns(UserWarning, match="Adaptive was given no learning rates"):
        runs.fit(pruning(adaptive(3)), net=runs.Scheduled(None, plateau=True), max_epochs=3)


def test_learning_rates_that_were_given_stay(runs, pruning, said):
    net = runs.fit(pruning(adaptive(runs.EPOCHS, [6, 5, 4, 3, 2, 1])))
    assert runs.pruner_of(net).policy.rates[-1] == pytest.approx(1 / 6)
    assert not said()


# --- resume -------------------------------------------------------------------------------------


def assert_continues(runs, net, undisturbed):
    assert runs.equal_weights(net, undisturbed)
    ours, theirs = (runs.pruner_of(one).policy.state_dict() for one in (net, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in runs.PER_SAMPLE if name in ours)
    assert net.trainer.global_step == undisturbed.trainer.global_step


@pytest.mark.parametrize("step", [5, 18])
def test_watched_labels_change_nothing_and_are_resumed(runs, pruning, undisturbed, step, tmp_path):
    net = runs.fit(pruning(runs.POLICY), runs.every_step(tmp_path), net=runs.WatchedNet())
    assert_continues(runs, net, undisturbed[0])
    resumed = runs.fit(
        pruning(runs.POLICY), net=runs.WatchedNet(), ckpt_path=tmp_path / f"step={step}.ckpt"
    )
    watch, again = (runs.pruner_of(one).watch for one in (net, resumed))
    assert watch.ranking().labels.tolist() == runs.DATA.tensors[1].tolist()
    for ours, theirs in zip(watch.suspects(), again.suspects(), strict=True):
        assert torch.equal(ours, theirs)


# The first batch; within a full and a pruned epoch; the last batch of each, and of the training.
@pytest.mark.parametrize(
    ("step", "validations"), [(1, 6), (13, 5), (25, 4), (18, 5), (31, 4), (62, 1)]
)
def test_a_resumed_run_equals_the_undisturbed_one(runs, pruning, undisturbed, step, validations):
    whole, folder = undisturbed
    net = runs.fit(pruning(runs.POLICY), ckpt_path=folder / f"step={step}.ckpt")
    assert_continues(runs, net, whole)
    assert net.validations == validations
    left = len(net.lengths)  # Lightning does not announce the epoch in which a run is resumed.
    assert net.lengths == runs.BATCHES[runs.EPOCHS - left :]


def test_a_resumed_run_with_accumulation_and_two_validations_per_epoch(runs, pruning, tmp_path):
    options = {"accumulate_grad_batches": 3, "val_check_interval": 0.5}
    saving = runs.every_step(tmp_path), runs.every_epoch(tmp_path)
    whole = runs.fit(pruning(runs.POLICY), *saving, **options)
    assert whole.validations == 2 * runs.EPOCHS
    # Within an epoch, after its last batch, at its end, and before a validation within an epoch.
    for name, validations in (("step=5", 9), ("step=6", 8), ("epoch=1", 8), ("step=21", 1)):
        file = tmp_path / f"{name}.ckpt"
        net = runs.fit(pruning(runs.POLICY), ckpt_path=file, **options)
        assert_continues(runs, net, whole)
        assert net.validations == validations


def test_a_finished_run_that_is_resumed_trains_nothing(runs, pruning, undisturbed, tmp_path):
    whole, _ = undisturbed
    whole.trainer.save_checkpoint(tmp_path / "last.ckpt")
    net = runs.fit(pruning(runs.POLICY), ckpt_path=tmp_path / "last.ckpt")
    assert_continues(runs, net, whole)
    assert net.lengths == []


def test_a_second_fit_is_refused(runs, pruning):
    net = runs.fit(pruning(runs.POLICY))
    with pytest.raises(InputError, match=r"expected one call of fit.. with a DataPruning"):
        net.trainer.fit(net, runs.loader(), runs.loader(shuffle=False))


# Batch 12 is one within the pruned second epoch, and batch 17 its last one.
@pytest.mark.parametrize(
    ("hook", "batch"),
    [
        ("on_train_batch_start", 12),
        ("on_before_optimizer_step", 12),
        ("on_train_batch_end", 12),
        ("on_train_batch_end", 17),
        ("on_train_epoch_end", 17),
    ],
)
def test_a_run_that_an_exception_ends_continues(runs, pruning, undisturbed, hook, batch, tmp_path):
    """A batch is trained again unless the optimizer has used it."""
    file = runs.stopped_checkpoint(tmp_path, hook, batch)
    net = runs.fit(pruning(runs.POLICY), ckpt_path=file)
    assert_continues(runs, net, undisturbed[0])


def test_other_batches_and_checkpoints_without_pruning_are_refused(
    runs, pruning, undisturbed, tmp_path
):
    _, folder = undisturbed
    data = runs.loader(batch_size=runs.BATCH // 2)
    with pytest.raises(InputError, match=r"with the batches of the checkpoint, .*size': 16"):
        runs.fit(pruning(runs.POLICY), data=data, ckpt_path=folder / "step=12.ckpt")
    alone = runs.fit(max_epochs=1)
    alone.trainer.save_checkpoint(tmp_path / "alone.ckpt")
    with pytest.raises(InputError, match="expected a checkpoint of a training with DataPruning"):
        runs.fit(pruning(runs.POLICY), ckpt_path=tmp_path / "alone.ckpt")


def test_the_trainer_is_left_as_it_was(runs, pruning, undisturbed):
    trainer = undisturbed[0].trainer
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
    assert (trainer.max_steps, trainer.reload_dataloaders_every_n_epochs) == (-1, 0)
    pruned = pickle.loads(pickle.dumps(pruning(runs.POLICY)))  # ``ddp_spawn`` does this.
    with pytest.raises(InputError, match="expected a training that has begun"):
        _ = pruned.pruner


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of jsonargparse, by Lightning.
def test_the_configuration_of_the_page_prunes_with_lightning_cli(runs, tmp_path, monkeypatch):
    pytest.importorskip("jsonargparse", reason="jsonargparse is not installed: make integrations")
    cli = importlib.import_module("lightning.pytorch.cli").LightningCLI
    page = (ROOT / "docs/adopt/lightning.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # The CLI sets them.
        monkeypatch.setenv(name, "0")
    Path("training.yaml").write_text(config)
    quiet = ["--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    quiet += ["--trainer.enable_checkpointing=false", "--trainer.accelerator=cpu"]
    args = ["fit", "--config=training.yaml", "--seed_everything=0", *quiet]
    made = cli(runs.Net, runs.Data, args=args)
    epochs = made.trainer.max_epochs
    assert made.trainer.global_step == round(0.65 * 13 * epochs) < 13 * epochs
    assert made.model.lengths[-1] < 13 == made.model.lengths[0]


# --- what would undo the pruning ------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(())


class Halved(DataLoader[Any]):
    """A loader that changes its batches."""

    def __iter__(self):
        return ((x / 2, y) for x, y in super().__iter__())


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "max_epochs": ({"max_epochs": 7}, "expected max_epochs=6"),
    "max_steps": ({"max_steps": 20}, "expected max_steps=-1"),
    "batches": ({"limit_train_batches": 5}, "expected limit_train_batches=1.0"),
    "one batch": ({"limit_train_batches": 1}, "expected limit_train_batches=1.0"),
    "overfit": ({"overfit_batches": 3}, "expected overfit_batches=0.0"),
    "reload": ({"reload_dataloaders_every_n_epochs": 1}, "losses belong to one data set"),
    "validation": ({"val_check_interval": 4}, "expected val_check_interval as a fraction"),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_a_setting_of_the_trainer_that_undoes_the_pruning_is_refused(runs, pruning, setting):
    options, message = SETTINGS[setting]
    net = runs.Net()
    with pytest.raises(InputError, match=message):
        runs.fit(pruning(runs.POLICY), net=net, **options)
    assert net.trainer.global_step == 0


def test_validation_by_steps_and_a_trial_of_few_batches_work(runs, pruning):
    net = runs.fit(pruning(runs.POLICY), val_check_interval=20, check_val_every_n_epoch=None)
    assert net.validations == sum(runs.BATCHES) // 20
    net = runs.fit(pruning(runs.POLICY), fast_dev_run=2)
    assert net.trainer.global_step == 2
    with pytest.warns(UserWarning, match="takes them to be constant"):
        net = runs.fit(pruning(fp.Adaptive(runs.EPOCHS, 0.3)), fast_dev_run=2)
    assert net.trainer.global_step == 2


def test_a_number_of_steps_that_depends_on_the_losses_is_refused_where_it_is_needed(runs, pruning):
    policy = fp.InfoBatch(runs.EPOCHS, prune=0.5)
    with pytest.raises(InputError, match="compute the learning rate from the progress"):
        runs.fit(pruning(policy))


LOADERS = {
    "in order": (lambda data: DataLoader(data, 16), "one with a SequentialSampler"),
    "with replacement": (
        lambda data: DataLoader(data, 16, sampler=RandomSampler(data, replacement=True)),
        "one with a RandomSampler",
    ),
    "batch sampler": (
        lambda data: DataLoader(
            data, batch_sampler=BatchSampler(RandomSampler(data), 16, drop_last=False)
        ),
        "one with a batch_sampler",
    ),
    "share of another rank": (
        lambda data: DataLoader(data, 16, sampler=DistributedSampler(data, 2, 0)),
        "a DistributedSampler for 2 of 1 ranks",
    ),
    "several": (lambda data: [DataLoader(data, 16)] * 2, "list"),
    "no loader": (lambda data: Stream(), "Stream"),
    "its own iteration": (
        lambda data: Halved(data, 16, shuffle=True),
        "Halved, which overrides __iter__",
    ),
    "indexed": (lambda data: DataLoader(fp.Indexed(data), 16), r"one over fp\.Indexed"),
    "stream": (lambda data: DataLoader(Stream(), 16), "a stream"),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_whose_samples_the_pruning_cannot_choose_is_refused(runs, pruning, kind):
    make, found = LOADERS[kind]
    with pytest.raises(InputError, match=f"expected one DataLoader .*, got {found}.*: give fit"):
        runs.fit(pruning(runs.POLICY), data=make(runs.DATA))


def test_callbacks_modules_and_strategies_that_undo_the_pruning_are_refused(runs, pruning):
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    pruned = pruning(runs.POLICY)
    for other in (
        callbacks.StochasticWeightAveraging(0.01),
        callbacks.GradientAccumulationScheduler({0: 2}),
        callbacks.LearningRateFinder(),
        callbacks.BatchSizeFinder(),
    ):
        with pytest.raises(InputError, match=f"expected no {type(other).__name__} together"):
            pruned.setup(runs.trainer(pruned, other), runs.Net(), "fit")
    with pytest.raises(InputError, match="expected one DataPruning"):
        runs.fit(pruned, pruning(runs.POLICY))
    with pytest.raises(InputError, match="got one that takes dataloader_iter"):
        pruned.setup(runs.trainer(pruned), runs.Fetching(), "fit")
    strategies = importlib.import_module("lightning.pytorch.strategies")
    trainer = runs.trainer(pruned)
    for name in ("ModelParallelStrategy", "DeepSpeedStrategy", "SingleDeviceXLAStrategy"):
        kind = getattr(strategies, name)
        strategy = kind.__new__(kind)  # They need GPUs, TPUs or packages.
        trainer._accelerator_connector.strategy = strategy
        with pytest.raises(InputError, match=f"strategy='ddp', got {name}"):
            pruned.setup(trainer, runs.Net(), "fit")


# --- the training step ----------------------------------------------------------------------------


def never(net, step, batch):
    return F.cross_entropy(net.network(batch[0]), batch[1])


def twice(net, step, batch):
    return step(batch, 0) + step(batch, 0)


def another_scalar(net, step, batch):
    step(batch, 0)
    return never(net, step, batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (never, "expected training_step to return record"),
        (twice, "expected one call of record"),
        (another_scalar, "the scalar that record.. returns to be backpropagated"),
    ],
)
def test_a_step_that_does_not_record_as_it_should_is_refused(runs, pruning, change, message):
    weighted = fp.InfoBatch(runs.EPOCHS, prune=0.5)
    with pytest.raises((InputError, RuntimeError), match=message):
        runs.fit(pruning(weighted), net=runs.recording(change))


def test_validation_with_another_trainer_needs_a_copy(runs, pruning, undisturbed):
    with pytest.raises(InputError, match=r"second Trainer.*deepcopy.module.$"):
        runs.fit(runs.ValidateElsewhere(lambda module: module), pruning(runs.POLICY))
    net = runs.fit(runs.ValidateElsewhere(copy.deepcopy), pruning(runs.POLICY))
    assert_continues(runs, net, undisturbed[0])


def test_an_optimizer_that_calls_its_closure_several_times_is_refused(runs, pruning, monkeypatch):
    net = runs.Net()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    monkeypatch.setattr(net, "configure_optimizers", lambda: optimizer)
    with pytest.raises(InputError, match=r"no optimizer that calls training_step .* as LBFGS does"):
        runs.fit(pruning(fp.FullData(runs.EPOCHS)), net=net)


def test_without_weights_another_scalar_may_be_backpropagated(runs, pruning):
    net = runs.fit(pruning(runs.POLICY), net=runs.recording(another_scalar))
    assert net.trainer.global_step == sum(runs.BATCHES)
    assert runs.pruner_of(net).counts.any()


def test_record_is_the_mean_outside_of_the_training(runs):
    losses = torch.tensor([1.0, 3.0])
    assert runs.record(runs.Net(), losses) == 2
    net = runs.fit(fast_dev_run=1)  # Without the callback.
    assert runs.record(net, losses) == 2
    with pytest.raises(InputError, match=r"expected record\(self, losses\) .*, got Tensor first"):
        runs.record(losses, net)


def test_without_lightning_one_line_says_what_to_install(runs, monkeypatch):
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "fineprune.integrations.lightning")
    with pytest.raises(InputError, match=r"pip install 'fineprune\[lightning\]'"):
        importlib.import_module("fineprune.integrations.lightning")


def marked_lines(file):
    """The lines of the pruning, which are numbered: those of the imports and of the step."""
    return re.findall(r"^ *(.*)  # [123]$", file.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_shows_the_lines_of_the_example():
    page = marked_lines(ROOT / "docs/adopt/lightning.md")
    assert page == marked_lines(ROOT / "examples/lightning_trainer.py")
    assert len(page) == 3


def test_the_example_trains_with_pruning(runs, monkeypatch, capsys):
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # ``seed_everything`` sets them.
        monkeypatch.setenv(name, "0")
    example = runpy.run_path(str(ROOT / "examples/lightning_trainer.py"))
    assert example["main"](progress_bar=False) > 0.85
    taken, full = re.findall(r"(\d+) steps instead of (\d+)", capsys.readouterr().out)[0]
    assert int(taken) == round(0.7 * int(full))
