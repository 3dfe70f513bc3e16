"""Small promises of ``Pruner`` that the larger tests would not notice if they were broken."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.policies.matched import Matched
from fineprune.pruning.policies.registry import POLICIES

N, EPOCHS = 24, 4


def test_a_batch_of_one_sample_per_rank_is_a_batch():
    pruner = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=1, sharded_by_loader=True)
    assert pruner.batches(0) == N


def test_the_state_of_a_loader_names_the_epoch_only_if_the_user_has_not():
    one = fp.Pruner(N, fp.FullData(EPOCHS))
    one.sampler.load_state_dict({"epoch": 2, "yielded": 5})
    assert one.sampler.epoch == 2
    other = fp.Pruner(N, fp.FullData(EPOCHS))
    other.sampler.set_epoch(1)
    other.sampler.load_state_dict({"epoch": 2, "yielded": 5})
    assert other.sampler.epoch == 1
    assert len(list(other.sampler)) == N


@pytest.mark.parametrize("last", [False, True])
def test_an_incomplete_last_batch_is_trained_after_a_resume_unless_it_is_dropped(last):
    def new():
        return fp.Pruner(N, fp.FullData(EPOCHS), batch_size=10, drop_last=not last)

    stopped = new()
    for index in torch.tensor(list(stopped.sampler)).split(10)[:2]:
        stopped.record(index, torch.ones(10))
    assert stopped.total_steps() == EPOCHS * (3 if last else 2)
    resumed = new()
    resumed.load_state_dict(stopped.state_dict())
    assert next(iter(resumed.epochs())) == (0 if last else 1)


def test_an_epoch_takes_the_padding_of_its_last_batch_and_no_sample_more():
    ranks: dict[str, Any] = {"num_replicas": 2, "rank": 0}
    padded = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=10, **ranks)
    for first in range(0, N // 2, 10):
        padded.record(torch.arange(first, first + 10) % N, torch.ones(10))
    with pytest.raises(InputError, match="expected at most 24 samples in epoch 0") as caught:
        padded.record(torch.arange(1), torch.ones(1))
    assert str(caught.value).endswith("start it anew in each epoch")
    exact = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=8)
    for first in range(0, N, 8):
        exact.record(torch.arange(first, first + 8), torch.ones(8))
    with pytest.raises(InputError, match="expected at most 24 samples in epoch 0"):
        exact.record(torch.arange(1), torch.ones(1))


def test_a_seed_chooses_the_same_samples_in_every_release():
    schedule = fp.Schedule(epochs=EPOCHS, window=EPOCHS, start=1)
    plain = fp.Pruner(12, fp.RandomPruning(schedule, 0.5), seed=3)
    plain.set_epoch(2)
    assert plain.plan.kept.tolist() == [0, 1, 3, 4, 10, 11]
    assert list(plain.sampler) == [11, 0, 1, 4, 10, 3]


def test_pruners_of_one_policy_do_not_learn_from_each_other():
    policy = fp.FinePruning(fp.Schedule(epochs=EPOCHS, window=EPOCHS, start=2), prune=8)
    one, other = fp.Pruner(N, policy, batch_size=8), fp.Pruner(N, policy, batch_size=8)
    for index in torch.tensor(list(one.sampler)).split(8):
        one.record(index, torch.arange(8.0))
    one.end_epoch()
    assert one.policy.counts.sum() > 0
    assert other.policy.counts.sum() == 0


# What a user has set for all of torch


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_default_type_and_device_of_torch_make_no_difference(name):
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        seen = losses_of_a_training(policy_named(name))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert seen == losses_of_a_training(policy_named(name))


def policy_named(name):
    """A policy that skips samples, with as few arguments as possible."""
    rates = [0.1] * 6
    any_policy: dict[str, Any] = {**POLICIES}
    needed = {
        "align-prune": lambda: fp.AlignPrune(16, 0.3),
        "adaptive": lambda: fp.Adaptive(6, 0.3, rates),
        "fine-pruning": lambda: fp.FinePruning(fp.Schedule(6, 3, 1), 0.3),
        "random": lambda: fp.RandomPruning(fp.Schedule(6, 3, 1), 0.3),
        "matched": lambda: Matched(6, [40, 40, 20, 20, 20, 20], [1, 1, 2, 2, 2, 2]),
        "full": lambda: fp.FullData(6),
    }
    return needed.get(name, lambda: any_policy[name](6, save=0.3))()


def test_the_page_on_policies_names_the_bytes_per_sample():
    page = (Path(__file__).parent.parent / "docs/policies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\w+` \| `([\w-]+)` \|.*\| (\d+)[^|]*\|$", page, re.MULTILINE)
    rows = [(name, stated) for name, stated in rows if name != "align-prune"]  # See below.
    assert {name for name, _ in rows} == {*POLICIES} - {"matched", "random", "full", "align-prune"}
    for name, stated in rows:
        pruner = fp.Pruner(40, policy_named(name), batch_size=4)
        pruner.set_epoch(0)
        assert arrays_of(pruner.policy) == 40 * int(stated), name
    aligned = fp.Pruner(40, fp.AlignPrune(16, 0.3, trajectory=5), batch_size=4)
    assert "4 for each epoch of `trajectory`, and 9" in page
    assert arrays_of(aligned.policy) == 40 * (4 * 5 + 9)


def arrays_of(owner):
    """The bytes of all arrays and tensors that an object holds, itself or in objects of its own."""
    return sum(
        value.nbytes if hasattr(value, "nbytes") else arrays_of(value)
        for value in vars(owner).values()
        if hasattr(value, "nbytes") or hasattr(value, "__dict__")
    )


def losses_of_a_training(policy):
    pruner = fp.Pruner(40, policy, batch_size=4)
    seen = []
    for epoch in pruner.epochs():
        for batch in torch.from_numpy(np.array(list(pruner.sampler))).split(4):
            losses = torch.from_numpy((batch.numpy() % 7 + 1) / np.float32(1 + epoch))
            mean = pruner.record(batch, losses.requires_grad_())
            mean.backward()
            seen.append((batch.tolist(), mean.item()))
    fp.Pruner(40, policy, batch_size=4).load_state_dict(pruner.state_dict())
    return seen


# What was trained is known after a resume


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("full", {"batch_size": 5}, {"batch_size": 5, "num_replicas": 2, "rank": 1}),
        *(
            (name, before, after)
            for name in ("full", "adaptive", "fine-pruning")
            for before, after in (
                ({"batch_size": 4}, {"batch_size": 10}),
                ({"batch_size": 10}, {"batch_size": 4, "accumulation": 3}),
            )
        ),
    ],
)
@pytest.mark.parametrize("stop", [3, 33, 70])
def test_all_steps_are_taken_after_a_resume_with_larger_or_smaller_ones(name, before, after, stop):
    pruner = fp.Pruner(200, policy_named(name), **{"num_replicas": 1, "rank": 0, **before})
    steps_of_a_training(pruner, stop)
    resumed = fp.Pruner(200, policy_named(name), **{"num_replicas": 1, "rank": 0, **after})
    resumed.load_state_dict(pruner.state_dict())
    left = resumed.total_steps() - resumed.steps_done
    assert steps_of_a_training(resumed) == left
    assert resumed.steps_done == resumed.total_steps()


def steps_of_a_training(pruner, most=None):
    """Train, at most so many batches, and return the number of steps."""
    steps = batches = 0
    for _ in pruner.epochs():
        if batches == most:
            return steps
        indices = list(pruner.sampler)
        for begin in range(0, len(indices), pruner.shape.batch_size):
            if batches == most:
                return steps
            index = torch.tensor(indices[begin : begin + pruner.shape.batch_size])
            pruner.observe(index, torch.ones(len(index)))
            batches += 1
            steps += pruner.step_is_due
    return steps


# A line was forgotten


# Losses and indices of unusual kinds


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32])
def test_indices_of_any_integer_type_are_the_same_samples(dtype):
    pruners = [fp.Pruner(N, Matched(1, [N], [2.0]), batch_size=4) for _ in range(2)]
    losses = torch.arange(4.0)
    index = torch.arange(4, 8)
    means = [p.record(i, losses) for p, i in zip(pruners, (index, index.to(dtype)), strict=True)]
    assert means[0] == means[1]
    assert pruners[1].position.samples == 4


# Labels that are watched
