"""Two ranks over Gloo: they count as one process with the doubled batch, and exchange states."""

import dataclasses
import runpy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_group import gloo_group
from resuming import refusal
from resuming import whole_losses as losses_of

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.replicas import share_of_rank

OWN_N = 96
EXAMPLE = Path(__file__).parents[1] / "examples" / "own_policy.py"
N, BATCH, WORLD, EPOCHS = 80, 8, 2, 7
POLICY = fp.FinePruning(fp.Schedule(EPOCHS, window=3, start=1, block=2, count=1), prune=32)


def train(pruner, stop=None, batch=BATCH, shard=slice(None)):
    """Train with made-up losses, up to a batch: ``stop`` is its epoch and its number.

    Returns:
        The (epoch, indices) of each batch of this rank, and the kept samples of each epoch.
    """
    seen: list[tuple[int, list[int]]] = []
    plans: dict[int, list[int]] = {}
    for epoch in pruner.epochs():
        plans[epoch] = pruner.plan.kept.tolist()
        for number, indices in enumerate(pruner.sampler.order().split(batch)[shard]):
            if (epoch, number) == stop:
                return seen, plans
            pruner.record(indices, losses_of(epoch, indices))
            seen.append((epoch, indices.tolist()))
    return seen, plans


def interrupted(made, **how):
    """Train with a resume in the middle of epoch 4, and return all that is known of it."""
    stopped, resumed = made(), made()
    before, plans = train(stopped, (4, 2), **how)
    careless = refusal(stopped.state_dict)
    stopped.synchronize()
    state = stopped.state_dict()
    resumed.load_state_dict(state)
    position = dataclasses.asdict(resumed.position)
    after, later = train(resumed, **how)
    return {
        "seen": before + after,
        "plans": plans | later,
        "learned": resumed.state_dict()["learned"],
        "counts": resumed.counts,
        "careless": careless,
        "state": state,
        "position": position,
    }


def ranks(rank, folder):
    early = fp.Pruner(N, POLICY, seed=1, batch_size=BATCH)
    with gloo_group(rank, folder, WORLD):
        pruner = fp.Pruner(N, POLICY, seed=1, batch_size=BATCH)
        seen, _ = train(pruner)
        warned = [
            warnings_of(early),
            warnings_of(unsharded()),
            warnings_of(shared(), every=2),
            warnings_of(unsharded(2 * BATCH), every=2),
        ]
        results = {
            "seen": seen,
            "counts": pruner.counts,
            "resumed": interrupted(partial(fp.Pruner, N, POLICY, seed=1, batch_size=BATCH)),
            "others": {name: interrupted(partial(other, name)) for name in OTHERS},
            "observed": observed(),
            "recorded_differently": recorded_differently(rank),
            "nonfinite": nonfinite_losses(rank),
            "refused": refused(rank),
            "sharded": interrupted(unsharded, shard=slice(rank, None, WORLD)),
            "promised": [unsharded().batches(epoch) for epoch in range(EPOCHS)],
            "total_steps": unsharded().total_steps(),
            "left_out": left_out(rank),
            "warned": warned,
        }
        torch.save(results, f"{folder}/rank{rank}.pt")


OTHERS = {
    "repb": fp.RePB(EPOCHS, 0.3, rescale=False),
    "align-prune": fp.AlignPrune(EPOCHS, 0.3, trajectory=2, rescale=False),
    "infobatch": fp.InfoBatch(EPOCHS, save=0.2, anneal=0.15, rescale=False),
    "adaptive": fp.Adaptive(EPOCHS, save=0.3, rates=[1] * EPOCHS, first_epoch=2),
    "own": runpy.run_path(str(EXAMPLE))["SkipEasiest"](EPOCHS, warmup=1),
}


def other(name, batch=BATCH):
    return fp.Pruner(OWN_N, OTHERS[name], seed=1, batch_size=batch)


class Remembers(fp.FullData):
    """A policy that only remembers what it learns."""

    name = "remembers"
    needs_losses = True
    needs_marks = True

    def learn(self, epoch, losses, above_mean, ranking):
        self.learned = [losses, above_mean]


def observed():
    """Let both ranks record a batch of two samples, one of them in both; return what is learned."""
    pruner = fp.Pruner(4, Remembers(1))
    if dist.get_rank() == 0:
        pruner.record([0, 1], torch.tensor([1.0, 3.0]))
    else:
        pruner.record([1, 2], torch.tensor([torch.inf, 2.5]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner.end_epoch()
    policy = pruner.policy
    assert isinstance(policy, Remembers)
    return [values.tolist() for values in policy.learned]


def recorded_differently(rank):
    """Return what each rank is told if one records fewer batches, or no logits."""
    messages = []
    for differs in ("batches", "logits"):
        pruner = fp.Pruner(N, fp.FullData(1), batch_size=BATCH)
        for number, index in enumerate(pruner.sampler.order().split(BATCH)):
            if differs == "batches" and rank and number == 2:
                break
            given = () if differs == "logits" and rank else (torch.rand(len(index), 3), index % 3)
            pruner.record(index, torch.ones(len(index)), *given)
        messages.append(refusal(pruner.end_epoch))
    return messages


def nonfinite_losses(rank):
    """Let rank 0 record one loss that is NaN and rank 1 two; return what each pruner reports."""

    def record(pruner, batches):
        for indices in pruner.sampler.order().split(BATCH)[batches]:
            losses = losses_of(0, indices)
            losses[: rank + 1] = torch.nan
            pruner.record(indices, losses)

    def end(pruner):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pruner.end_epoch()
        return pruner.nonfinite

    whole, first, resumed = (fp.Pruner(N, POLICY, seed=1, batch_size=BATCH) for _ in range(3))
    record(whole, slice(None))
    record(first, slice(2))
    first.synchronize()
    state = [first.state_dict()]
    dist.broadcast_object_list(state, src=0)  # Every rank loads the state that rank 0 saved.
    resumed.load_state_dict(state[0])
    next(resumed.epochs())
    record(resumed, slice(None))
    return {"whole": end(whole), "resumed": end(resumed)}


class DrawsItsOwn(fp.RandomPruning):
    """A policy that draws from a generator that differs between the ranks."""

    name = "draws-its-own"
    needs_losses = True

    def select(self, epoch, number, rng):
        return super().select(epoch, number, np.random.default_rng(dist.get_rank()))


def refused(rank):
    """Return the errors of settings that would let the ranks train by different plans."""
    pruners = [
        fp.Pruner(N, DrawsItsOwn(POLICY.schedule, 32), batch_size=BATCH),
        fp.Pruner(N, POLICY, seed=rank, batch_size=BATCH),
        fp.Pruner(N + rank, POLICY, batch_size=BATCH),
        fp.Pruner(N, POLICY, batch_size=BATCH + rank),
        fp.Pruner(N, fp.Adaptive(EPOCHS, save=0.3 + 0.1 * rank), batch_size=BATCH),
    ]
    calls = [partial(train, pruner) for pruner in pruners]
    return [refusal(call) for call in (*calls, partial(fp.Pruner, N, POLICY, num_replicas=4))]


def left_out(rank):
    """Leave every fifth sample out of the batches, as a framework shards them, with a resume.

    Return what this rank trains, and when a step is due. The state of rank 0 is that of all ranks.
    """
    seen, due = [], []

    def begin():
        # Some batches must be filled.
        return fp.Pruner(
            N - 3, fp.FullData(1), batch_size=BATCH, sharded_by_loader=True, accumulation=100
        )

    def batches(pruner):
        order = pruner.sampler.order()
        filled = order[torch.arange(-(-len(order) // (WORLD * BATCH)) * WORLD * BATCH) % len(order)]
        return filled.split(BATCH)[rank::WORLD]

    def record(pruner, indices):
        readable = indices[indices % 5 > 0]
        pruner.record(readable, torch.ones(len(readable)))
        seen.extend(readable.tolist())
        due.append(pruner.step_is_due)

    stopped, resumed = begin(), begin()
    stopped.start_epoch(0)
    for indices in batches(stopped)[:2]:
        record(stopped, indices)
    stopped.synchronize()
    states = [stopped.state_dict()]
    torch.distributed.broadcast_object_list(states)
    resumed.load_state_dict(states[0])
    for _ in resumed.epochs():
        for indices in batches(resumed):
            record(resumed, indices)
    return {"seen": seen, "due": due}


def unsharded(batch_size=BATCH):
    """Return a pruner that leaves sharding to a framework that does not exist."""
    return fp.Pruner(N, POLICY, seed=1, batch_size=batch_size, sharded_by_loader=True)


def shared():
    """Return a pruner that shares the samples among the ranks, in epochs of many batches."""
    return fp.Pruner(4 * N, POLICY, seed=1, batch_size=BATCH)


def warnings_of(pruner, every=1):
    """Train two epochs, of which only some batches are recorded, and return what is noticed."""

    def train():
        for epoch in range(2):
            pruner.start_epoch(epoch)
            for indices in pruner.sampler.order().split(BATCH)[::every]:
                pruner.record(indices, losses_of(epoch, indices))
            pruner.end_epoch()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = refusal(train)
    return [str(warning.message) for warning in caught] + ([error] if error else [])


@pytest.fixture(scope="module")
def two_ranks(spawned):
    return spawned(ranks, WORLD)


def joined(first, second):
    """Return the (epoch, samples) of the batches of both ranks together."""
    pairs = zip(first["seen"], second["seen"], strict=True)
    return [(epoch, sorted(mine + theirs)) for (epoch, mine), (_, theirs) in pairs]


@pytest.fixture(scope="module")
def one_process():
    """What one process with the doubled batch trains, and its counts."""
    pruner = fp.Pruner(N, POLICY, seed=1, batch_size=BATCH * WORLD)
    seen, _ = train(pruner, batch=BATCH * WORLD)
    return [(epoch, sorted(indices)) for epoch, indices in seen], pruner.counts


def test_two_ranks_count_as_one_process_with_the_doubled_batch(two_ranks, one_process):
    first, second = two_ranks
    expected, counts = one_process
    assert joined(first, second) == expected
    # Both ranks stopped in the middle of a pruning epoch after synchronize(), and were resumed.
    assert POLICY.schedule.prunes(4) or POLICY.schedule.prunes(3)
    for rank in two_ranks:
        assert rank["resumed"]["seen"] == rank["seen"]
        assert torch.equal(rank["counts"], counts)
        assert torch.equal(rank["resumed"]["counts"], counts)
        # Without synchronize(), no state is made.
        assert "synchronize" in rank["resumed"]["careless"]
    # The same state resumes in one process, which trains the rest of the epoch.
    alone: Any = fp.Pruner(N, POLICY, seed=1, batch_size=BATCH * WORLD)
    alone.load_state_dict(first["resumed"]["state"])
    train(alone, batch=BATCH * WORLD)
    assert torch.equal(alone.counts, counts)


@pytest.mark.parametrize("name", OTHERS)
def test_ranks_learn_the_same_as_one_process_with_the_doubled_batch(two_ranks, name):
    batch = BATCH * WORLD
    alone = interrupted(partial(other, name, batch), batch=batch)
    assert len({len(kept) for kept in alone["plans"].values()}) > 1
    for rank in two_ranks:
        for what in ("plans", "learned"):
            ours = rank["others"][name][what]
            torch.testing.assert_close(ours, alone[what], rtol=0, atol=0, equal_nan=True)


def test_every_rank_learns_the_largest_loss_of_a_sample_and_any_mark(two_ranks):
    for rank in two_ranks:
        losses, above_mean = rank["observed"]
        np.testing.assert_equal(losses, [1.0, np.inf, 2.5, np.nan])
        # The mean of the finite losses of the batch is 2.17.
        assert above_mean == [False, True, True, False]


def test_ranks_that_record_differently_get_the_same_error(two_ranks):
    batches, logits = two_ranks[0]["recorded_differently"]
    assert two_ranks[1]["recorded_differently"] == [batches, logits]
    assert "the same number of batches on every rank" in batches
    assert "the same kind of records on every rank" in logits


def test_nonfinite_losses_are_counted_once_over_all_ranks_and_a_resume(two_ranks):
    batches = N // WORLD // BATCH
    for rank in two_ranks:
        assert rank["nonfinite"] == {"whole": 3 * batches, "resumed": 3 * batches}


def test_ranks_that_would_train_by_different_plans_are_refused(two_ranks):
    for rank in two_ranks:
        plans, seeds, samples, batches, policies, replicas = rank["refused"]
        assert "same plan on every rank" in plans
        assert "same seed" in seeds
        assert "same number of samples" in samples
        assert "same batch_size" in batches
        assert "same policy" in policies
        assert "expected rank together with num_replicas=4" in replicas


def test_batches_that_a_framework_shards_count_as_those_of_one_process(two_ranks, one_process):
    expected, counts = one_process
    assert joined(*(rank["sharded"] for rank in two_ranks)) == expected
    for rank in two_ranks:
        assert rank["total_steps"] == len(expected)
        assert rank["promised"] == [
            sum(epoch == number for number, _ in expected) for epoch in range(EPOCHS)
        ]
        sharded = rank["sharded"]
        assert torch.equal(sharded["counts"], counts)
        assert sharded["position"] == {"epoch": 4, "batches": 2, "samples": 2 * BATCH}
        assert "synchronize" in sharded["careless"]


def test_samples_that_are_left_out_of_sharded_batches_count_as_loaded(two_ranks):
    first, second = (rank["left_out"] for rank in two_ranks)
    assert first["due"] == second["due"] == [*(len(first["due"]) - 1) * [False], True]
    times = np.bincount(first["seen"] + second["seen"], minlength=N - 3)
    readable = np.arange(N - 3) % 5 > 0
    assert times[readable].min() == 1
    assert times[~readable].max() == 0
    assert times.sum() < readable.sum() + WORLD * BATCH  # The last batches are filled.


def test_ranks_that_all_train_everything_or_share_twice_are_refused(two_ranks):
    for rank in two_ranks:
        early, unsharded, shared_twice, of_all_processes = rank["warned"]
        assert "made after the process group of 2 ranks" in early[0]
        assert "leave out num_replicas and sharded_by_loader" in unsharded[0]
        assert "record every batch" in shared_twice[0]
        assert "leave out num_replicas and sharded_by_loader" in of_all_processes[0]
        assert len(early) == len(unsharded) == len(shared_twice) == 1


@pytest.mark.parametrize("rank", range(4))
def test_the_rank_is_that_of_the_group_or_must_be_given(rank):
    assert share_of_rank(4, rank, None, None) == (4, rank)
    assert share_of_rank(4, rank, 4, None) == (4, rank)
    assert share_of_rank(4, rank, 1, None) == (1, 0)
    assert share_of_rank(4, rank, 8, rank + 4) == (8, rank + 4)
    assert share_of_rank(1, 0, 4, rank) == (4, rank)
    for replicas in (2, 8):
        with pytest.raises(InputError, match="give both or neither"):
            share_of_rank(4, rank, replicas, None)
    for size, wrong in ((2, 2), (4, 4), (None, 4), (4, -1), (4, 0.5), (0, None)):
        with pytest.raises(InputError, match="expected"):
            share_of_rank(4, rank, size, wrong)  # type: ignore[arg-type]


def test_a_launcher_without_a_process_group_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        fp.Pruner(N, POLICY)
