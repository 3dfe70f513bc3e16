"""The contract of the sampler: ranks share the kept samples in equal numbers of whole batches."""

import random

import numpy as np
import pytest
import reference as twin
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fineprune as fp

# e = 1, 2 are full; 3, 4, 5 prune; 6 is full (position 0) and clears; 7, 8 are full; 9 ... prune.
SCHEDULE = fp.Schedule(epochs=12, window=6, start=3)
FULL = [0, 1, 5, 6, 7, 11]
PRUNED = [2, 3, 4, 8, 9, 10]


def quiet(examples):
    return settings(max_examples=examples, derandomize=True, deadline=None)


def torchs_sampler(n, ranks, rank, seed, drop_last):
    """Return torch's own sampler of ``n`` samples."""
    data = TensorDataset(torch.arange(n))
    return DistributedSampler(data, ranks, rank, shuffle=True, seed=seed, drop_last=drop_last)


def trained_state(n, policy, seed, epochs=2):
    """Return the state and the counts of a single process after ``epochs`` full epochs."""
    rng = random.Random(seed)
    pruner = fp.Pruner(n, policy, seed=seed)
    for epoch in range(epochs):
        pruner.set_epoch(epoch)
        for batch in torch.arange(n).split(5):
            losses = [rng.randrange(3) / 4 for _ in batch]
            pruner.record(batch, torch.tensor(losses))
        pruner.end_epoch()
    return pruner.state_dict(), pruner.counts.tolist()


def indices(sampler):
    return [int(index) for index in sampler]


# --- full epochs -----------------------------------------------------------------------------


@quiet(80)
@given(
    n=st.integers(1, 60),
    ranks=st.integers(1, 5),
    batch=st.none() | st.integers(1, 8),
    accumulation=st.integers(1, 3),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 11),
)
def test_full_data_is_torchs_distributed_sampler(
    n, ranks, batch, accumulation, drop_last, seed, epoch
):
    for rank in range(ranks):
        theirs = torchs_sampler(n, ranks, rank, seed, drop_last)
        theirs.set_epoch(epoch)
        ours = fp.Pruner(
            n,
            fp.FullData(12),
            seed=seed,
            batch_size=batch,
            accumulation=1 if batch is None else accumulation,
            drop_last=drop_last,
            num_replicas=ranks,
            rank=rank,
        )
        ours.set_epoch(epoch)
        assert len(ours.sampler) == len(theirs)
        assert indices(ours.sampler) == list(theirs)
        assert ours.plan.kept.tolist() == list(range(n))


# --- pruning epochs --------------------------------------------------------------------------


@st.composite
def shapes(draw):
    """Draw N, ranks, batch, accumulation and prune so that rounding leaves something to skip."""
    ranks = draw(st.integers(1, 4))
    batch = draw(st.integers(1, 6))
    accumulation = draw(st.integers(1, 3))
    unit = ranks * batch * accumulation
    kept = unit * draw(st.integers(1, 4))
    n = kept + draw(st.integers(1, 40))
    wanted = kept - draw(st.integers(0, unit - 1))
    return n, ranks, batch, accumulation, n - wanted, kept


def of_shape(shape, drop_last, *, rank=0, seed=0):
    """Return a rank's Pruner with ``FinePruning`` for what ``shapes`` draws."""
    n, ranks, batch, accumulation, prune, _ = shape
    return fp.Pruner(
        n,
        fp.FinePruning(SCHEDULE, prune),
        seed=seed,
        batch_size=batch,
        accumulation=accumulation,
        drop_last=drop_last,
        num_replicas=ranks,
        rank=rank,
    )


@pytest.mark.filterwarnings("ignore:the samples of epoch")
@quiet(80)
@given(
    shape=shapes(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**31),
    epoch=st.sampled_from(PRUNED),
)
def test_ranks_share_the_kept_set_in_whole_batches(shape, drop_last, seed, epoch):
    n, ranks, batch, accumulation, prune, kept = shape
    state, counts = trained_state(n, fp.FinePruning(SCHEDULE, prune), seed)
    plans, shares = [], []
    for rank in range(ranks):
        pruner = of_shape(shape, drop_last, rank=rank, seed=seed)
        pruner.load_state_dict(state)
        assert pruner.counts.tolist() == counts
        pruner.set_epoch(epoch)
        share = indices(pruner.sampler)
        assert len(pruner.sampler) == len(share) == kept // ranks
        assert len(share) % (batch * accumulation) == 0
        assert indices(pruner.sampler) == share
        order = pruner.sampler.order()
        assert order.dtype == torch.int64
        assert order.tolist() == share
        shares += share
        plans.append(pruner.plan.kept.tolist())
    assert sorted(shares) == plans[0]
    assert all(plan == plans[0] for plan in plans)
    assert twin.why_invalid(counts, plans[0], n - kept) is None


@quiet(40)
@given(
    shape=shapes(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**31),
    epoch=st.sampled_from(FULL),
)
def test_full_epochs_of_a_pruned_training_are_torchs_too(shape, drop_last, seed, epoch):
    n, ranks, _, _, prune, _ = shape
    state, _ = trained_state(n, fp.FinePruning(SCHEDULE, prune), seed)
    for rank in range(ranks):
        pruner = of_shape(shape, drop_last, rank=rank, seed=seed)
        pruner.load_state_dict(state)
        pruner.set_epoch(epoch)
        theirs = torchs_sampler(n, ranks, rank, seed, drop_last)
        theirs.set_epoch(epoch)
        assert len(pruner.sampler) == len(theirs)
        assert indices(pruner.sampler) == list(theirs)


@quiet(30)
@given(n=st.integers(8, 60), ranks=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_without_a_batch_size_the_kept_set_is_a_multiple_of_the_ranks(n, ranks, seed):
    prune = n // 2
    kept = twin.round_up(n - prune, ranks)
    policy = fp.FinePruning(SCHEDULE, prune)
    state, counts = trained_state(n, policy, seed)
    shares = []
    for rank in range(ranks):
        pruner = fp.Pruner(n, policy, seed=seed, num_replicas=ranks, rank=rank)
        pruner.load_state_dict(state)
        pruner.set_epoch(3)
        assert len(pruner.sampler) == kept // ranks
        shares += indices(pruner.sampler)
    assert sorted(shares) == pruner.plan.kept.tolist()
    assert twin.why_invalid(counts, sorted(shares), n - kept) is None


# --- the length ------------------------------------------------------------------------------


def test_the_state_of_a_loader_can_be_saved_again_before_its_next_batch():
    first, second = (fp.Pruner(96, fp.FullData(2), batch_size=8) for _ in range(2))
    reading = iter(first.sampler)
    for _ in range(24):
        next(reading)
    state = first.sampler.state_dict()
    for pruner in (first, second):
        pruner.sampler.load_state_dict(state)
        assert pruner.sampler.state_dict() == state == {"epoch": 0, "yielded": 24}
        assert len(indices(pruner.sampler)) == 72


@pytest.mark.filterwarnings("ignore:the samples of epoch")  # The same one may be drawn again.
@quiet(40)
@given(
    shape=shapes(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**31),
    epochs=st.lists(st.integers(0, 11), min_size=1, max_size=6),
)
def test_the_length_is_exact_right_after_set_epoch(shape, drop_last, seed, epochs):
    n, ranks, batch, accumulation, prune, _ = shape
    pruner = of_shape(shape, drop_last, rank=ranks - 1, seed=seed)
    for epoch in epochs:
        pruner.set_epoch(epoch)
        length = len(pruner.sampler)
        skipped = prune if epoch in PRUNED else 0
        unit = ranks * batch * accumulation
        assert length == twin.samples_per_rank(n, skipped, ranks, unit, drop_last)
        assert length == len(indices(pruner.sampler))
        assert length == len(pruner.sampler)


@quiet(40)
@given(shape=shapes(), drop_last=st.booleans())
def test_total_steps_counts_what_a_loader_yields(shape, drop_last):
    n, ranks, batch, accumulation, prune, _ = shape
    pruner = of_shape(shape, drop_last)
    loader = DataLoader(
        TensorDataset(torch.arange(n)), batch, sampler=pruner.sampler, drop_last=drop_last
    )
    expected = walked = 0
    for epoch in range(12):
        left_out = prune if epoch in PRUNED else 0
        unit = ranks * batch * accumulation
        samples = twin.samples_per_rank(n, left_out, ranks, unit, drop_last)
        expected += -(-twin.batches(samples, batch, drop_last) // accumulation)
        pruner.set_epoch(epoch)
        batches = sum(1 for _ in loader)
        assert batches == len(loader)
        walked += -(-batches // accumulation)
    assert pruner.total_steps() == expected == walked


# --- calling order ---------------------------------------------------------------------------


@quiet(40)
@given(
    seed=st.integers(0, 2**31),
    epoch=st.sampled_from([2, 3, 4]),
    visits=st.lists(st.integers(0, 11), max_size=8),
)
def test_set_epoch_in_any_order_changes_nothing(seed, epoch, visits):
    policy = fp.FinePruning(SCHEDULE, 8)
    state, counts = trained_state(24, policy, seed)
    pruner = fp.Pruner(24, policy, seed=seed, batch_size=4)
    pruner.load_state_dict(state)
    pruner.set_epoch(epoch)
    kept, order = pruner.plan.kept.tolist(), indices(pruner.sampler)
    for visit in visits:
        pruner.set_epoch(visit)
        assert pruner.counts.tolist() == counts
    pruner.set_epoch(epoch)
    assert pruner.counts.tolist() == counts
    assert pruner.plan.epoch == epoch
    assert pruner.plan.kept.tolist() == kept
    assert indices(pruner.sampler) == order


@quiet(20)
@given(seed=st.integers(0, 2**31), calls=st.integers(1, 4))
def test_set_epoch_in_the_middle_of_an_epoch_changes_nothing(seed, calls):
    policy = fp.FinePruning(SCHEDULE, 8)
    state, counts = trained_state(24, policy, seed)
    pruner, plain = (fp.Pruner(24, policy, seed=seed, batch_size=4) for _ in range(2))
    for one in (pruner, plain):
        one.load_state_dict(state)
        one.set_epoch(2)
    kept, order = pruner.plan.kept.tolist(), indices(pruner.sampler)
    for start in range(0, 16, 4):
        batch = torch.tensor(order[start : start + 4])
        losses = torch.tensor([0.0, 1.0, 2.0, 3.0])
        for one in (pruner, plain):
            one.record(batch, losses)
        for _ in range(calls):
            pruner.set_epoch(2)
            indices(pruner.sampler)
        assert pruner.counts.tolist() == counts
        assert pruner.plan.kept.tolist() == kept
        assert len(pruner.sampler) == 16
    for one in (pruner, plain):
        one.end_epoch()
    assert pruner.counts.tolist() == plain.counts.tolist() != counts


@pytest.mark.parametrize("following", [3, 5, 11])
def test_set_epoch_of_a_later_epoch_ends_the_one_with_records(following):
    policy = fp.FinePruning(SCHEDULE, 8)
    state, _ = trained_state(24, policy, seed=3)
    implicit, explicit = (fp.Pruner(24, policy, seed=3, batch_size=4) for _ in range(2))
    for one in (implicit, explicit):
        one.load_state_dict(state)
        one.set_epoch(2)
        one.record(one.plan.kept, torch.arange(16.0))
    explicit.end_epoch()
    explicit.set_epoch(following)
    implicit.set_epoch(following)
    assert implicit.counts.tolist() == explicit.counts.tolist()
    assert implicit.plan.kept.tolist() == explicit.plan.kept.tolist()


def test_the_sampler_is_a_distributed_sampler_and_sets_the_epoch_itself():
    # Frameworks call set_epoch on samplers of this type only.
    pruner = fp.Pruner(24, fp.FinePruning(SCHEDULE, 8), batch_size=4)
    assert isinstance(pruner.sampler, DistributedSampler)
    pruner.sampler.set_epoch(3)
    assert pruner.plan.epoch == 3
    assert len(pruner.sampler) == len(indices(pruner.sampler)) == 16


# --- seeds -----------------------------------------------------------------------------------


def kept_by(seed, epoch, rank=0, ranks=1):
    policy = fp.FinePruning(SCHEDULE, 100)
    pruner = fp.Pruner(200, policy, seed=seed, batch_size=5, num_replicas=ranks, rank=rank)
    pruner.set_epoch(epoch)
    return pruner.plan.kept.tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**31])
def test_ties_break_the_same_way_on_every_rank(seed):
    plans = [kept_by(seed, 2, rank, 4) for rank in range(4)]
    assert all(plan == plans[0] for plan in plans)
    assert plans[0] == kept_by(seed, 2)


def test_ties_break_by_the_seed_and_the_epoch():
    plans = [kept_by(seed, epoch) for seed in (0, 1, 2) for epoch in (2, 3, 4)]
    assert len({tuple(plan) for plan in plans}) == len(plans)
    # Neighbouring seeds and epochs have different streams. With seed + epoch, these would be equal.
    assert kept_by(1, 3) != kept_by(2, 2)


def numpys_state():
    return np.random.get_state(legacy=False)["state"]["key"].copy()  # noqa: NPY002


@pytest.mark.parametrize("policy", [fp.FinePruning(SCHEDULE, 8), fp.RandomPruning(SCHEDULE, 8)])
def test_no_global_random_state_is_touched(policy):
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    before = random.getstate(), numpys_state()
    pruner = fp.Pruner(24, policy, batch_size=4)
    for epoch in range(12):
        pruner.set_epoch(epoch)
        order = torch.tensor(indices(pruner.sampler))
        pruner.record(order, order.float())
        pruner.end_epoch()
    assert torch.equal(torch.rand(4), expected)
    assert random.getstate() == before[0]
    assert np.array_equal(numpys_state(), before[1])


# --- rounding --------------------------------------------------------------------------------


def test_rounding_that_leaves_nothing_to_skip_is_an_error():
    # 20 of 24 samples are to be kept, but a whole step has 4 x 2 x 3 = 24.
    with pytest.raises(ValueError, match="24") as error:
        fp.Pruner(
            24,
            fp.FinePruning(SCHEDULE, 4),
            batch_size=4,
            accumulation=3,
            num_replicas=2,
            rank=0,
        )
    assert "\n" not in str(error.value)
