"""Kakurenbo: a slow twin written from the paper, rescoring, and exact resume."""

import math
import runpy
from pathlib import Path

import pytest
import torch
from resuming import falling_losses, stopped_and_resumed, train_pruner

import fineprune as fp
from fineprune.errors import InputError

EXAMPLE = Path(__file__).parents[1] / "examples" / "skipped_losses.py"
N, EPOCHS = 60, 10


losses_of = falling_losses(N)


def rescored_losses(epoch, index):
    """Return other losses than those of the training, as the network has changed meanwhile."""
    return losses_of(epoch + 1000, index) * 0.3


def train(pruner, batch=6, rescored=rescored_losses, stop=None):
    return train_pruner(pruner, losses_of, rescored=rescored, batch=batch, stop=stop)


def twin(prune, confidence):
    """The rule, sample by sample: which samples each epoch trains, and by which learning rate.

    The rate follows the largest number of hidden samples, as in the authors' code.
    """
    loss: dict[int, float] = {}
    plans = []
    for epoch in range(EPOCHS):
        factor = 1.0
        for start, smaller in ((30, 0.8), (60, 0.6), (80, 0.4)):
            if epoch * 100 >= start * EPOCHS:
                factor = smaller
        most = math.floor(factor * math.floor(prune * N + 1e-9) + 1e-9)
        hidden = []
        for sample in sorted(loss, key=lambda sample: loss[sample])[:most]:
            right_with = math.exp(-loss[sample])
            if right_with >= confidence:
                hidden.append(sample)
        trained = [sample for sample in range(N) if sample not in hidden]
        rate = 1 / (1 - most / N) if epoch else 1.0
        for sample in range(N):
            source = rescored_losses if sample in hidden else losses_of
            loss[sample] = source(epoch, torch.tensor([sample])).item()
        plans.append((trained, rate))
    return plans


@pytest.mark.parametrize("prune", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("confidence", [0.6, 0.7, 0.95])
def test_it_equals_a_twin_written_from_the_paper(prune, confidence):
    policy = fp.Kakurenbo(EPOCHS, prune, confidence=confidence)
    plans, _ = train(fp.Pruner(N, policy, seed=3))
    numbers = set()
    for (kept, weights), (trained, rate) in zip(plans, twin(prune, confidence), strict=True):
        assert kept == trained
        assert (weights or [1.0] * len(kept)) == pytest.approx([rate] * len(kept))
        numbers.add(len(kept))
    assert len(numbers) > 2


def test_the_losses_of_hidden_samples_are_the_last_known_ones_without_rescoring():
    with_rescoring, _ = train(fp.Pruner(N, fp.Kakurenbo(EPOCHS, 0.5)))
    without, _ = train(fp.Pruner(N, fp.Kakurenbo(EPOCHS, 0.5)), rescored=None)
    assert without[:2] == with_rescoring[:2]
    # A hidden sample keeps its low loss, so it remains hidden as long as there is room.
    hidden = [set(range(N)) - set(kept) for kept, _ in without]
    assert hidden[1]
    assert hidden[1] <= hidden[2]
    assert without != with_rescoring


@pytest.mark.parametrize("batch", [4, 7])
def test_shortened_epochs_have_whole_steps(batch):
    plans, _ = train(fp.Pruner(N, fp.Kakurenbo(EPOCHS, 0.5), batch_size=batch), batch)
    numbers = [len(kept) for kept, _ in plans]
    assert min(numbers) < N
    assert all(number == N or number % batch == 0 for number in numbers)


def test_what_is_rescored_is_what_the_epoch_skipped_and_a_later_one_needs():
    pruner = fp.Pruner(N, fp.Kakurenbo(EPOCHS, 0.5, anneal=0.2))
    numbers = []
    for epoch in pruner.epochs():
        for index in pruner.sampler.order().split(6):
            parameter = torch.ones((), requires_grad=True)
            pruner.record(index, losses_of(epoch, index) * parameter).backward()
        wanted = pruner.to_rescore()
        skipped = sorted(set(range(N)) - set(pruner.plan.kept.tolist()))
        if wanted is not None:
            assert wanted.tolist() == skipped
        numbers.append((len(skipped), 0 if wanted is None else len(wanted)))
    assert numbers[0] == (0, 0)
    # The eighth epoch skips samples, but the ninth and tenth train all of them.
    assert numbers[7][0] > 0
    assert numbers[7:] == [(numbers[7][0], 0), (0, 0), (0, 0)]
    assert all(wanted == skipped for skipped, wanted in numbers[:7])


@pytest.mark.parametrize("stop", [(0, 3), (1, 0), (4, 5), (4, "rescoring"), (9, 2)])
@pytest.mark.parametrize("options", [{}, {"max_skips": 2, "keep_per_class": 0.3}])
def test_a_stopped_training_continues_exactly(stop, options, tmp_path):
    def made():
        labels = [sample % 4 for sample in range(N)]
        policy = fp.Kakurenbo(EPOCHS, 0.6, **options)
        return fp.Pruner(N, policy, seed=2, batch_size=6, labels=labels)

    whole, _ = train(made())
    assert stopped_and_resumed(made, train, stop, tmp_path) == whole


def test_samples_without_a_finite_loss_are_not_hidden():
    pruner = fp.Pruner(8, fp.Kakurenbo(3, 0.5))
    losses = torch.tensor([torch.nan, torch.inf, 0.01, 0.02, 0.03, 0.04, 5.0, 6.0])
    pruner.record(torch.arange(8), losses)
    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        pruner.end_epoch()
    pruner.set_epoch(1)
    assert pruner.plan.kept.tolist() == [0, 1, 5, 6, 7]  # At most 0.8 times 4 are hidden.


def test_what_cannot_be_rescored_is_refused():
    pruner = fp.Pruner(N, fp.InfoBatch(EPOCHS))
    assert pruner.to_rescore() is None
    with pytest.raises(InputError, match="needs losses of trained samples only"):
        pruner.rescore([1], torch.ones(1))
    pruner = fp.Pruner(N, fp.Kakurenbo(EPOCHS))
    with pytest.raises(InputError, match="expected one loss for each index"):
        pruner.rescore([1, 2], torch.ones(1))
    with pytest.raises(InputError, match=r"use fp\.reduce_pixels, or losses\.flatten"):
        pruner.rescore([1, 2], torch.ones(2, 8, 8))
    pruner.record(torch.arange(N), torch.ones(N))
    pruner.rescore([N], torch.ones(1))
    with pytest.raises(InputError, match=r"expected indices in 0\.\.59, got 60\.\.60"):
        pruner.end_epoch()
    pruner = fp.Pruner(N, fp.Kakurenbo(EPOCHS))
    pruner.record(torch.arange(N), torch.ones(N))
    pruner.end_epoch()
    with pytest.raises(InputError, match=r"call rescore\(\) before end_epoch\(\)"):
        pruner.rescore([1], torch.ones(1))


class Some(fp.FullData):
    """A policy that asks for some of the skipped samples only."""

    name = "some"
    rescores = True

    def num_kept(self, epoch):
        return N // 2

    def select(self, epoch, num_kept, rng):
        self.seen = {}
        return fp.EpochPlan(epoch, torch.arange(num_kept))

    def to_rescore(self, plan, skipped):
        return skipped[skipped % 2 == 0]

    def observe_rescored(self, epoch, index, losses):
        self.seen.update(zip(index.tolist(), losses.tolist(), strict=True))


def test_a_policy_of_ones_own_says_what_is_rescored():
    pruner = fp.Pruner(N, Some(2))
    pruner.record(pruner.sampler.order(), torch.ones(N // 2))
    wanted = pruner.to_rescore()
    assert wanted is not None
    assert wanted.tolist() == list(range(N // 2, N, 2))
    for index in wanted.split(4):
        pruner.rescore(index, index.float())
    pruner.end_epoch()
    policy = pruner.policy
    assert isinstance(policy, Some)
    assert policy.seen == {sample: sample for sample in range(N // 2, N, 2)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "expected epochs"),
        ({"epochs": 8, "prune": 1.0}, r"expected prune as a share in \[0, 1\)"),
        ({"epochs": 8, "confidence": 0.5}, r"expected confidence as a probability in \(0.5, 1\]"),
        ({"epochs": 8, "confidence": float("nan")}, "expected confidence as a probability"),
        ({"epochs": 8, "max_skips": 0}, "expected max_skips"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        fp.Kakurenbo(**arguments)


def test_more_samples_to_hide_than_there_are_is_refused():
    with pytest.raises(InputError, match="expected prune to leave at least one of 60 samples"):
        fp.Pruner(N, fp.Kakurenbo(EPOCHS, 60))


def test_the_example_of_a_loop_that_rescores_skips_and_learns(capsys):
    assert runpy.run_path(str(EXAMPLE))["main"]() > 0.85
    words = capsys.readouterr().out.split()
    trained, evaluated = int(words[1]), int(words[6])
    assert trained < 0.8 * 1280 * 20
    assert 0 < evaluated <= 1280 * 20 - trained
