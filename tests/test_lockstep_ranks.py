"""Ranks as threads of one process: every policy observes what the ranks recorded together."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import fineprune as fp
from fineprune.errors import InputError

N, BATCH, EPOCHS, RANKS = 22, 4, 3, 2

pytestmark = pytest.mark.filterwarnings("ignore:1 losses of epoch")


class Together:
    """Gathers the arrays of ranks that are threads."""

    def __init__(self):
        self._barrier = threading.Barrier(RANKS, timeout=60)
        self._arrays = [np.empty(0)] * RANKS

    def of_rank(self, rank):
        def gather(array):
            self._arrays[rank] = np.array(array)
            self._barrier.wait()
            gathered = [one.copy() for one in self._arrays]
            self._barrier.wait()
            return gathered

        return gather


class Observing(fp.Policy):
    """Skips six samples with even numbers in odd epochs, and keeps what it is told."""

    name = "observing"
    needs_losses = True
    needs_marks = True

    def __init__(self):
        super().__init__(EPOCHS)
        self.told = []

    def lengths(self):
        return [16 if epoch % 2 else N for epoch in range(EPOCHS)]

    def select(self, epoch, number, rng):
        odd_first = [*range(1, N, 2), *range(0, N, 2)]
        return fp.EpochPlan(epoch, torch.tensor(sorted(odd_first[:number])))

    def learn(self, epoch, losses, above_mean, ranking):
        self.told.append((epoch, losses, above_mean))


def losses_of(epoch, index, rank):
    losses = torch.as_tensor(index) * 1.0 + 100 * epoch + 0.5 * rank
    return torch.where(torch.as_tensor(index) == 7, torch.inf, losses)


def on_both_ranks(work):
    together = Together()

    def run(rank):
        options = {"num_replicas": RANKS, "rank": rank, "all_gather": together.of_rank(rank)}
        return work(rank, options)

    with ThreadPoolExecutor(RANKS) as threads:
        return [future.result() for future in [threads.submit(run, rank) for rank in range(RANKS)]]


def train(rank, options):
    pruner = fp.Pruner(N, Observing(), seed=4, batch_size=BATCH, **options)
    recorded = []
    for epoch in pruner.epochs():
        batches = torch.tensor(list(pruner.sampler)).split(BATCH)
        for index in batches:
            pruner.record(index, losses_of(epoch, index, rank))
        recorded.append(batches)
    return recorded, pruner


def test_every_rank_learns_one_value_per_sample_from_the_batches_of_all():
    (recorded, one), (of_other, other) = on_both_ranks(train)
    assert len(one.policy.told) == EPOCHS
    for epoch, told in enumerate(one.policy.told):
        expected, above = np.full(N, np.nan, np.float32), np.zeros(N, bool)
        for batches in zip(recorded[epoch], of_other[epoch], strict=True):
            values = [losses_of(epoch, batch, rank) for rank, batch in enumerate(batches)]
            together = torch.cat(values)
            mean = together[together.isfinite()].double().mean().item()
            for batch, losses in zip(batches, values, strict=True):
                for index, loss in zip(batch.tolist(), losses.tolist(), strict=True):
                    expected[index] = np.fmax(expected[index], loss)
                    above[index] |= np.isfinite(loss) and loss > mean
        assert told[0] == epoch
        np.testing.assert_array_equal(told[1], expected)
        np.testing.assert_array_equal(told[2], above)
    for mine, its in zip(one.policy.told, other.policy.told, strict=True):
        for array, same in zip(mine[1:], its[1:], strict=True):
            np.testing.assert_array_equal(array, same)
    # Number 7 has no finite loss, on whichever rank it is recorded.
    assert one.nonfinite == other.nonfinite == 1


def test_ranks_with_different_seeds_are_refused():
    def differently(rank, options):
        pruner = fp.Pruner(N, Observing(), seed=rank, batch_size=BATCH, **options)
        with pytest.raises(InputError, match="expected the same seed on every rank, got different"):
            train_one_epoch(pruner, rank)

    on_both_ranks(differently)


@pytest.mark.parametrize("learns", [False, True])
def test_a_rank_that_has_no_batch_is_an_error_on_all_ranks_at_the_end_of_the_epoch(learns):
    def record(rank, options):
        schedule = fp.Schedule(2, window=2, start=1)
        policy: fp.Policy = fp.FinePruning(schedule, prune=6) if learns else fp.FullData(2)
        pruner = fp.Pruner(N, policy, **options)
        if rank == 0:
            index = torch.arange(rank, N, RANKS)
            pruner.record(index, losses_of(0, index, rank))
        with pytest.raises(InputError, match=r"equally many batches .* got 0 to 1 in epoch 0"):
            pruner.end_epoch()

    on_both_ranks(record)


def test_one_rank_may_try_a_copy():
    def record(rank, options):
        pruner = fp.Pruner(N, fp.FullData(2), batch_size=BATCH, **options)
        if rank == 0:
            index = torch.tensor(list(pruner.sampler))[:BATCH]
            copy.deepcopy(pruner).record(index, losses_of(0, index, rank))
        train_one_epoch(pruner, rank)

    on_both_ranks(record)


class Keyed(fp.FullData):
    name = "keyed"

    def settings(self):
        return {"policy": self.name, "pairs": {(1, 2): object()}}


def test_any_settings_of_own_policies_are_compared():
    on_both_ranks(
        lambda rank, options: train_one_epoch(
            fp.Pruner(N, Keyed(2), batch_size=BATCH, **options), rank
        )
    )


DIFFERENT = {
    "number of samples": lambda rank, options: fp.Pruner(
        N + rank, fp.FullData(2), batch_size=BATCH, **options
    ),
    "batch_size": lambda rank, options: fp.Pruner(
        N, fp.FullData(2), batch_size=BATCH * (1 + rank), **options
    ),
    "seed": lambda rank, options: fp.Pruner(
        N, fp.FullData(2), seed=rank, batch_size=BATCH, **options
    ),
    "label of each sample": lambda rank, options: fp.Pruner(
        N, fp.FullData(2), labels=[rank] + [0] * (N - 1), batch_size=BATCH, **options
    ),
    "policy": lambda rank, options: fp.Pruner(
        N, fp.Adaptive(4, save=0.3 + 0.1 * rank), batch_size=BATCH, **options
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_refused_with_the_first_batch_of_any_policy(what):
    """Also if the policy learns nothing, and before the ranks wait for each other elsewhere."""

    def differently(rank, options):
        pruner = DIFFERENT[what](rank, options)
        index = next(iter(torch.tensor(list(pruner.sampler)).split(4)))
        with pytest.raises(InputError, match=f"expected the same {what}.* on every rank"):
            pruner.record(index, losses_of(0, index, rank))

    on_both_ranks(differently)


def test_ranks_may_have_equal_labels_of_other_types():
    def train(rank, options):
        labels = np.arange(N, dtype=[np.int32, np.int64][rank])
        train_one_epoch(
            fp.Pruner(N, fp.FullData(2), labels=labels, batch_size=BATCH, **options), rank
        )

    on_both_ranks(train)


def train_one_epoch(pruner, rank):
    for index in torch.tensor(list(pruner.sampler)).split(BATCH):
        pruner.record(index, losses_of(0, index, rank))
    pruner.end_epoch()


def test_a_rank_that_leaves_out_a_batch_is_an_error_on_all_ranks():
    """Its later batches would be compared with those that the other rank trained a step before."""

    def leave_out(rank, options):
        pruner = fp.Pruner(N, Observing(), seed=4, batch_size=BATCH, **options)
        for number, index in enumerate(pruner.sampler.order().split(BATCH)):
            if (rank, number) != (1, 1):
                pruner.record(index, losses_of(0, index, rank))
        own = -(-N // RANKS // BATCH)
        with pytest.raises(InputError, match=f"equally many batches .* got {own - 1} to {own}"):
            pruner.end_epoch()

    on_both_ranks(leave_out)


@pytest.mark.parametrize(
    ("gathered", "said"),
    [
        (lambda array: [array], r"got 1 of shape \(\d+,\)"),
        (lambda array: np.concatenate([array, array]), r"got \d+ of shape \(\)"),
        (lambda array: [array, array[:1]], r"got 2 of shape \(1,\) and \(\d+,\)"),
        (lambda array: None, "got None"),
    ],
)
def test_what_is_not_gathered_from_all_ranks_is_refused(gathered, said):
    options = {"num_replicas": RANKS, "rank": 0, "all_gather": gathered}
    with pytest.raises(InputError, match=f"all_gather to return the 2 arrays .*, {said}: start"):
        train(0, options)
