"""User-defined datasets with random transforms, which are reproducible for each sample."""

import functools
import multiprocessing
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import in_session, wait_until_ended
from resuming import small_recipe, weights
from torch.utils.data import Dataset

from fineprune.distributed.all_reduce import RankGroup
from fineprune.errors import InputError, TrainingDiverged
from fineprune.inspection.inspected import read_inspected
from fineprune.networks.registry import build_network
from fineprune.runs.files import read_metrics
from fineprune.runs.run import read_run
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.data import load_data
from fineprune.training.data.run_data import split
from fineprune.training.trainer import train


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    """Images of two classes, with noise from the generators of torch, NumPy and Python."""

    classes: tuple[str, ...] = ("dark", "bright")

    def __init__(self, samples, noise):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(samples, 3, 32, 32, generator=generator)
        self.y = (self.x.mean((1, 2, 3)) > self.x.mean()).long()
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        if self.noise:
            x = x + torch.rand(()) + float(np.random.rand()) + random.random()  # noqa: NPY002
        return x, self.y[index]


def noisy():
    return Noisy(96, noise=True), Noisy(32, noise=False)


def with_gaps():
    """The same without noise, and with pixels that are not known."""
    train, test = Noisy(96, noise=False), Noisy(32, noise=False)
    train.x[:, 0, 0, 0] = torch.nan
    return train, test


def with_gaps_in_the_test_set():
    train, test = Noisy(96, noise=False), Noisy(32, noise=False)
    test.x[test.y == 0, 0, 0, 0] = torch.nan
    return train, test


def noisy_with_plain():
    return *noisy(), Noisy(96, noise=False)


def noisy_test():
    return Noisy(96, noise=True), Noisy(32, noise=True)


class Labels(Dataset[tuple[torch.Tensor, object]]):
    """Grey images with the given labels."""

    def __init__(self, labels):
        self.given = labels

    def __len__(self):
        return len(self.given)

    def __getitem__(self, index):
        return torch.full((3, 32, 32), index / len(self)), self.given[index]


def of_train(last):
    return Labels([0, 1] * 47 + [0, last]), Labels([0, 1] * 16)


# Each has one label that is no class.
too_large = functools.partial(of_train, 2)
negative = functools.partial(of_train, -100)
text = functools.partial(of_train, "dark")
fractions = functools.partial(of_train, 0.5)
missing_label = functools.partial(of_train, None)


def too_large_in_the_test_set():
    return Labels([0, 1] * 48), Labels([0, 1] * 15 + [0, 2])


def arrays():
    return Labels([torch.tensor([1]), np.uint8(0), True, torch.tensor(1)] * 24), Labels([0, 1] * 16)


def probabilities():
    return Labels([torch.tensor([0.25, 0.75]), torch.tensor([1.0, 0.0])] * 48), Labels([0, 1] * 16)


def other_shape_in_the_test_set():
    train, test = of_train(1)
    return train, [(x[:1], y) for x, y in (test[index] for index in range(len(test)))]


def float64():
    return tuple([(x.double(), y) for x, y in map(part.__getitem__, range(32))] for part in noisy())


def probabilities_only():
    return probabilities()[0], probabilities()[0]


def plain_samples_of_another_length():
    return *noisy(), Noisy(95, noise=False)


def recipe(*changes, function="noisy"):
    changes = ("training.epochs=2", "training.batch_size=32", "pruning.prune=32", *changes)
    data = {"name": f"{__name__}:{function}"}
    return small_recipe("training.evaluate_every=1", *changes, data=data)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "reference"
    train(recipe(), folder)
    return weights(folder)


def test_evaluation_does_not_change_the_random_numbers_of_the_training(tmp_path, reference):
    train(recipe("training.evaluate_every=2"), tmp_path / "run")
    assert torch.equal(weights(tmp_path / "run"), reference)


def test_the_random_numbers_of_a_sample_depend_only_on_seed_epoch_and_index():
    def noise(workers, epoch, order, size):
        source: Any = load_data(recipe("run.seed=3", f"data.workers={workers}")).train
        batches = source.open().batches(torch.tensor(order), epoch, size)
        found = [
            (i, x) for index, (xs, _) in batches for i, x in zip(index.tolist(), xs, strict=True)
        ]
        return {i: float((x - source.dataset.x[i]).mean()) for i, x in found}

    alone, together = noise(0, 1, [5], 1), noise(2, 1, [7, 9, 5, 4], 2)
    assert alone[5] == together[5]
    assert len({alone[5], together[7], noise(0, 0, [5], 1)[5]}) == 3


class ParentOf(Labels):
    """Samples that say which process loads them, with the noise of a random transform."""

    def __getitem__(self, index):
        return os.getppid() + torch.rand(1, 1, 1, dtype=torch.float64), 0


def parents():
    return ParentOf([0, 1] * 16), ParentOf([0, 1] * 16)


@pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="there is no fork server"
)
def test_loader_processes_are_not_forked_from_a_process_with_threads():
    settings = recipe("data.workers=1", "network.classes=2", function="parents")
    x, _ = load_data(settings).train.open().batch(torch.tensor([0]), 0)
    assert int(x) != os.getpid()


ORPHAN = """
import multiprocessing, os, sys, time
from fineprune.datasets.loader_process import follow_training

def load():
    print(os.getpid(), flush=True)
    time.sleep(1)
    follow_training(0)
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    multiprocessing.Process(target=load).start()
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_loader_process_whose_training_died_before_it_began_ends(method, tmp_path):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    command = [sys.executable, str(script), method]
    training = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert training.stdout is not None
    assert int(training.stdout.readline()) in in_session(training.pid)
    training.kill()
    training.wait()
    training.stdout.close()
    assert not wait_until_ended(training.pid, seconds=20)


def generator_states():
    key = np.random.get_state(legacy=False)["state"]["key"]  # noqa: NPY002
    return torch.get_rng_state(), key.tolist(), random.getstate()


def test_the_users_generators_are_restored():
    states = generator_states()
    _ = list(load_data(recipe()).train.open().batches(torch.arange(9), 1, 4))
    after = generator_states()
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]


DRAWS_AT_ITS_IMPORT = """
import random
import numpy as np
import torch
import test_own_data

FIRST = (torch.rand(1), np.random.rand(), random.random())

def data():
    train, test = test_own_data.noisy()
    order = np.random.permutation(torch.randperm(len(train)).tolist())
    return torch.utils.data.Subset(train, random.sample(order.tolist(), 64)), test
"""


def test_a_split_that_the_function_draws_is_the_same_in_every_process(tmp_path, monkeypatch):
    (tmp_path / "drawing.py").write_text(DRAWS_AT_ITS_IMPORT)
    monkeypatch.syspath_prepend(tmp_path)
    settings = recipe("data.name=drawing:data", "network.classes=2")
    states = generator_states()
    train: Any = load_data(settings).train
    first = train.dataset.indices
    after = generator_states()
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]
    _ = torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
    again: Any = load_data(settings.replaced("run", seed=5)).train
    assert again.dataset.indices == first


def unseeded():
    order = np.random.default_rng().permutation(64)
    samples = [(torch.full((3, 32, 32), float(number)), int(number) % 2) for number in order]
    return samples[:32], samples[32:]


def test_a_function_that_returns_other_data_later_is_refused(tmp_path, monkeypatch):
    changed = recipe("network.classes=2", function="unseeded")
    begun = load_data(changed)
    with pytest.raises(InputError, match="the data with which the run began, got different ones"):
        load_data(changed, begun.digests)
    monkeypatch.setattr(RankGroup, "gather", lambda ranks, own: [own, {"data": "of another rank"}])
    with pytest.raises(InputError, match=r"the same data from .* on all ranks, got different data"):
        train(changed, tmp_path / "run")


class OwnGenerator(Labels):
    """Samples with noise that nothing seeds, as some transforms draw it."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * float(np.random.default_rng().uniform(1, 9)), y


def own_generator():
    return OwnGenerator([0, 1] * 16), OwnGenerator([0, 1] * 16)


@pytest.mark.parametrize("function", ["noisy_test", "own_generator", "fractions"])
def test_random_transforms_and_seeds_do_not_make_other_data(function):
    made = recipe("network.classes=2", function=function)
    begun = load_data(made).digests
    assert load_data(made.replaced("run", seed=5), begun).digests == begun


def other_classes():
    train, test = Noisy(32, noise=False), Noisy(32, noise=False)
    test.classes = ("bright", "dark")
    return train, test


def one_class_less():
    train, test = other_classes()
    test.classes = ("dark",)
    return train, test


def drawing():
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002
    return noisy()


def test_the_initial_weights_do_not_depend_on_what_the_function_draws(tmp_path, reference):
    train(recipe(function="drawing"), tmp_path / "run")
    assert torch.equal(weights(tmp_path / "run"), reference)


def test_pixels_that_are_not_numbers_are_no_random_transforms():
    assert load_data(recipe("data.validation=32", function="with_gaps")).num_samples == 64


def test_validation_uses_samples_without_random_transforms(tmp_path):
    with pytest.raises(InputError, match="random transforms only"):
        train(recipe("data.validation=32"), tmp_path / "run")
    validated = recipe("data.validation=32", function="noisy_with_plain")
    summary = train(validated, tmp_path / "run")
    assert summary.evaluated_on == "validation"
    loss = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["validation_loss"]
    plain = Noisy(96, noise=False)
    _, held_out = split(96, 32)
    model = load_checkpoint(tmp_path / "run" / "checkpoint.pt")["model"]
    network = build_network("lenet", 2, 3)
    network.load_state_dict(model)
    with torch.no_grad():
        logits = network.eval()(plain.x[held_out])
    assert loss == pytest.approx(float(F.cross_entropy(logits, plain.y[held_out])), abs=1e-5)


def test_the_test_set_is_the_same_in_every_evaluation(tmp_path):
    train(recipe("training.lr=1e-12", function="noisy_test"), tmp_path / "run")
    first, second = (line["test_loss"] for line in read_metrics(tmp_path / "run/metrics.jsonl"))
    assert first == pytest.approx(second, abs=1e-6)


def test_a_test_sample_with_nan_is_wrong_and_said(tmp_path, caplog):
    summary = train(
        recipe("run.history=true", function="with_gaps_in_the_test_set"), tmp_path / "run"
    )
    labels = with_gaps_in_the_test_set()[1].y
    dark = int((labels == 0).sum())
    assert f"epoch 2: the network returns NaN for {dark} of 32 samples of the test" in caplog.text
    assert summary.accuracy_last is not None
    assert summary.accuracy_last <= 1 - dark / 32
    inspected = read_inspected([read_run(tmp_path / "run")])
    assert inspected.recognised() == [0, summary.accuracy_last * 32 / (32 - dark)]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("plain_samples_of_another_length", r"96 training samples, without .* got 95 samples"),
        ("recipe", r"\(train, test\) or \(train, test, plain\), got Recipe"),
        ("other_shape_in_the_test_set", r"\(3, 32, 32\) .* to train on, got \(1, 32, 32\)"),
        ("float64", r"or convert the samples, which are torch\.float64, to float32"),
        ("of_two_parts", r"with x of shape \(channels, \.\.\.\) from .*, got"),
        ("probabilities_only", r"expected one class for each sample .* got \(2,\) values"),
        ("with_equal_keys", r"a unique key for each of the 96 samples .* 1 of them diff"),
        ("other_classes", "expected the same attribute classes .*'dark' and 'bright' as class 0"),
        ("one_class_less", "expected the same attribute classes .*None as class 1"),
    ],
)
def test_what_the_function_returns_is_checked_before_anything_is_trained(function, said, tmp_path):
    with pytest.raises(InputError, match=said):
        train(recipe("network.classes=2", function=function), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("function", "wrong", "workers"),
    [
        ("too_large", "training set of .*got '2' for sample 95", 0),
        ("negative", "training set of .*got '-100' for sample 95", 1),
        ("text", "training set of .*got 'dark' for sample 95", 0),
        ("fractions", "training set of .*got '0.5' for sample 95", 0),
        ("missing_label", "training set of .*got 'None' for sample 95", 0),
        ("too_large_in_the_test_set", "test set of .*got '2' for sample 31", 1),
    ],
)
def test_a_label_that_is_no_class_is_named_in_one_line(function, wrong, workers, tmp_path):
    changed = recipe("network.classes=2", f"data.workers={workers}", function=function)
    with pytest.raises(InputError, match=f"^expected a class from 0 to 1 .*{wrong}.*$") as caught:
        train(changed, tmp_path / "run")
    assert "\n" not in str(caught.value)
    if wrong.startswith("training"):  # Even while the error is kept, no loader process is left.
        assert not [child for child in multiprocessing.active_children() if child.daemon]


def test_a_sample_of_another_shape_is_named(tmp_path):
    changed = recipe("network.classes=2", "data.workers=1", function="ragged")
    shapes = r"\(3, 32, 32\) and, for sample 95, \(3, 30, 32\): crop, resize or pad"
    with pytest.raises(InputError, match=f"^expected samples of one shape .*{shapes}.*$") as caught:
        train(changed, tmp_path / "run")
    assert "\n" not in str(caught.value)


class Ragged(Labels):
    """Grey images, of which the last one is lower than the others."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x[:, :30] if index == len(self) - 1 else x), y


def ragged():
    return Ragged([0, 1] * 48), Labels([0, 1] * 16)


def of_two_parts():
    return [((torch.zeros(3, 8, 8), torch.zeros(5)), 0)] * 8, [(torch.zeros(3, 8, 8), 0)] * 8


def with_equal_keys():
    train, test = noisy()
    train.keys = ["a"] * len(train)
    return train, test


@pytest.mark.parametrize("function", ["arrays", "probabilities"])
def test_labels_may_be_numbers_of_any_kind_or_probabilities(function, tmp_path):
    summary = train(recipe("network.classes=2", function=function), tmp_path / "run")
    assert summary.samples_trained == 160


def test_a_loss_that_is_not_a_number_may_come_from_the_users_samples(tmp_path):
    with pytest.raises(TrainingDiverged, match=r"check that all samples of .* are finite$"):
        train(recipe("network.classes=2", function="not_a_number"), tmp_path / "run")


def not_a_number():
    noisy = Noisy(96, noise=False)
    noisy.x[7, 0, 0, 0] = torch.nan
    return noisy, Noisy(32, noise=False)
