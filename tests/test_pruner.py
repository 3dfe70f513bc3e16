"""The contract of Pruner in one process: when counts change, what is recorded, and the state."""

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from resuming import saved
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fineprune as fp
from fineprune.errors import InputError

N = 128
SCHEDULE = fp.Schedule(epochs=12, window=4, start=1, block=2, count=1)


def made(policy=None, **options):
    length = options.pop("length", N)
    policy = policy or fp.FinePruning(SCHEDULE, prune=length // 4)
    return fp.Pruner(length, policy, **{"seed": 3, **options})


def losses_of(epoch, indices):
    """Return made-up losses. A sample with a higher index is more often above the mean."""
    noise = np.random.default_rng(epoch).random(N, dtype=np.float32)
    return torch.from_numpy(noise + np.arange(N, dtype=np.float32) / N)[indices]


def train_epoch(pruner, epoch, batch=16, stop_after=None):
    for number, indices in enumerate(pruner.sampler.order().split(batch)):
        if number == stop_after:
            return
        pruner.record(indices, losses_of(epoch, indices))


def test_a_mean_is_over_the_whole_batch_and_a_mark_needs_more():
    pruner = made(length=4)
    pruner.set_epoch(0)
    pruner.record([0, 1], torch.tensor([1.0, 3.0]))
    pruner.record([2, 3], torch.tensor([10.0, 10.0]))
    pruner.end_epoch()
    assert pruner.counts.tolist() == [0, 1, 0, 0]


def test_a_tolerance_is_a_share_of_the_absolute_mean():
    pruner = made(fp.FinePruning(SCHEDULE, prune=1, tolerance=0.5), length=4)
    pruner.set_epoch(0)
    pruner.record([0, 1, 2], torch.tensor([1.0, 2.0, 3.5]))  # mean 2.17, threshold 3.25
    pruner.end_epoch()
    pruner.set_epoch(1)
    pruner.record([0, 1, 2], torch.tensor([-1.0, -2.0, -3.5]))  # mean -2.17, threshold -1.08
    pruner.end_epoch()
    assert pruner.counts.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("kind", [fp.FinePruning, fp.RandomPruning])
def test_a_loader_without_the_sampler_is_an_error_if_the_batch_size_is_known(kind):
    pruner = made(kind(fp.Schedule(6, 6, 1), prune=32), batch_size=16)
    shuffle = torch.Generator().manual_seed(0)
    message = r"samples that epoch 0 trains, got sample \d+, which it skips: .*pruner\.sampler"

    def train():
        for epoch in pruner.epochs():
            for indices in torch.randperm(N, generator=shuffle).split(16):
                pruner.record(indices, losses_of(epoch, indices))

    with pytest.raises(InputError, match=message):
        train()
    assert pruner.position.batches < 6


def test_a_loop_that_never_records_is_noticed_after_its_first_epoch():
    pruner = made(batch_size=16)
    data = TensorDataset(torch.arange(N))
    loader = DataLoader(data, batch_size=16, sampler=pruner.sampler)
    message = r"epoch 0 recorded no losses.*pruner\.record"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        assert all(sum(1 for _ in loader) == len(loader) for _ in pruner.epochs())
    assert len(caught) == 1


def test_epochs_that_train_nothing_or_need_no_losses_do_not_warn():
    for _ in made().epochs():
        pass
    random = made(fp.RandomPruning(SCHEDULE, prune=32))
    for _ in random.epochs():
        assert len(random.sampler.order())


@pytest.mark.parametrize("policy", [fp.FinePruning(SCHEDULE, 32), fp.RandomPruning(SCHEDULE, 32)])
@pytest.mark.parametrize("stop", [1, 5])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_second_epoch_that_is_broken_off_warns_once(policy, stop, workers):
    data = torch.arange(N)
    pruner = fp.Pruner(data, policy, batch_size=8)
    loader = DataLoader(pruner.dataset, batch_size=8, sampler=pruner.sampler, num_workers=workers)

    def train():
        for epoch in pruner.epochs():
            for number, (indices, _) in enumerate(loader):
                if number == stop:
                    break
                pruner.record(indices, losses_of(epoch, indices))
            if workers and epoch == 3:
                break

    with pytest.warns(RuntimeWarning, match="epoch 1 recorded .* ended early, too") as caught:
        train()
    assert len(caught) == 1


@pytest.mark.parametrize("batch_size", [40, 100, 128])
def test_a_dropped_last_batch_is_no_reason_to_warn(batch_size):
    pruner = made(fp.FinePruning(SCHEDULE, 20), drop_last=True)
    data = TensorDataset(torch.arange(N))
    loader = DataLoader(data, batch_size, sampler=pruner.sampler, drop_last=True)
    for epoch in pruner.epochs():
        for (indices,) in loader:
            pruner.record(indices, losses_of(epoch, indices))
        if not len(loader):
            pruner.record(pruner.plan.kept[:1], torch.ones(1))


@pytest.mark.parametrize("skips", ["the sampler", "the trainer"])
def test_training_the_rest_of_an_epoch_is_no_reason_to_warn(skips):
    first = made(batch_size=8)
    run(first, upto=6, batch=8)
    train_epoch(first, 6, batch=8, stop_after=10)
    second = made(batch_size=8)
    second.load_state_dict(first.state_dict())
    if skips == "the sampler":
        run(second, batch=8)
    else:
        second.set_epoch(6)
        for indices in second.sampler.order().split(8)[10:]:
            second.record(indices, losses_of(6, indices))
        second.end_epoch()


def test_an_epoch_that_has_ended_takes_no_more_losses():
    pruner = made(length=2)
    pruner.set_epoch(0)
    pruner.record([0, 1], torch.tensor([0.0, 1.0]))
    pruner.end_epoch()
    with pytest.raises(ValueError, match=r"loop over pruner\.epochs\(\)"):
        pruner.record([0, 1], torch.tensor([0.0, 1.0]))
    pruner.set_epoch(1)
    pruner.record([0, 1], torch.tensor([0.0, 1.0]))


def test_losses_that_are_not_finite_are_reported_and_left_out():
    pruner = made(length=4)
    pruner.set_epoch(0)
    pruner.record([0, 1, 2, 3], torch.tensor([float("nan"), float("inf"), 1.0, 2.0]))
    with pytest.warns(RuntimeWarning, match="2 losses of epoch 0 were NaN or infinite") as said:
        pruner.end_epoch()
    assert said[0].filename == __file__  # A warning names the user's line.
    assert pruner.counts.tolist() == [0, 0, 0, 1]
    assert pruner.nonfinite == 2


def test_the_most_counted_are_skipped_for_that_epoch_only():
    pruner = made(fp.FinePruning(fp.Schedule(epochs=4, window=8, start=2, block=2), prune=2))
    sizes = []
    for _ in pruner.epochs():
        kept = pruner.plan.kept
        sizes.append(len(kept))
        if len(kept) < N:
            assert not {7, 8} & set(kept.tolist())
        losses = torch.zeros(N)
        losses[[7, 8]] = 1.0
        pruner.record(kept, losses[kept])
    assert sizes == [N, N - 2, N, N - 2]


def test_record_leaves_the_given_tensors_alone():
    pruner = made(length=2)
    pruner.set_epoch(0)
    index, losses = torch.tensor([0, 1]), torch.tensor([1.0, 2.0], requires_grad=True)
    loss = pruner.record(index, losses)
    loss.backward()
    assert losses.grad is not None
    assert torch.equal(losses.grad, torch.tensor([0.5, 0.5]))
    assert losses.tolist() == [1.0, 2.0]
    assert index.tolist() == [0, 1]
    pruner.end_epoch()
    assert pruner.counts.tolist() == [0, 1]


@pytest.mark.parametrize(
    "memory", [torch.empty(2), torch.empty(4), torch.from_numpy(np.empty(2, np.float32))]
)
def test_losses_may_be_changed_in_place_after_they_were_recorded(memory):
    """Also through NumPy, or by a CUDA graph, which uses the same memory again."""
    pruner = made(length=8)
    for first in range(0, 8, 2):
        memory[:2] = torch.tensor([1.0, 2.0])
        pruner.record([first, first + 1], memory[:2])
        memory.numpy()[:] = 0
    pruner.end_epoch()
    assert pruner.counts.tolist() == [0, 1] * 4


def test_a_loader_may_use_the_memory_of_the_indices_again():
    pruner = made(length=8)
    memory = np.empty(2, np.int64)
    index = torch.from_numpy(memory)  # NumPy does not change the version of this tensor.
    for first in range(0, 8, 2):
        memory[:] = first, first + 1
        pruner.record(index, torch.tensor([1.0, 2.0]))
    pruner.end_epoch()
    assert pruner.counts.tolist() == [0, 1] * 4


def test_a_wrong_batch_is_an_error_at_once_and_no_other_batch_is_lost():
    pruner = made(length=128)
    for first in range(0, 128, 2):
        index, losses = torch.tensor([first, first + 1]), torch.tensor([1.0, 2.0])
        if first == 40:
            with pytest.raises(InputError, match="one loss for each index"):
                pruner.record(index, losses[:1])
        pruner.record(index, losses)
    pruner.end_epoch()
    assert pruner.counts.tolist() == [0, 1] * 64


def test_tensors_of_the_inference_mode_and_numpy_arrays_are_copied():
    pruner = made(length=4)
    with torch.inference_mode():
        index, losses = torch.tensor([0, 1]), torch.tensor([1.0, 2.0])
        pruner.record(index, losses)
        losses.fill_(7.0)
    array = np.array([2, 3])
    pruner.record(array, torch.tensor([3.0, 1.0]))
    array[:] = 0
    pruner.end_epoch()
    assert pruner.counts.tolist() == [0, 1, 1, 0]


def test_a_view_of_a_large_tensor_is_copied_and_does_not_keep_it_alive():
    pruner = made(length=2)
    base = torch.rand(2, 1000, requires_grad=True) * 1.0
    alive = weakref.ref(base.untyped_storage())
    losses = base[:, 0]
    pruner.record([0, 1], losses).backward()
    del base, losses
    assert alive() is None


def test_half_precision_losses_keep_their_samples_apart():
    pruner = made(length=600)
    pruner.set_epoch(0)
    losses = torch.zeros(600, dtype=torch.bfloat16)
    losses[257] = 1.0
    pruner.record(torch.arange(600), losses)
    pruner.end_epoch()
    assert pruner.counts.nonzero().flatten().tolist() == [257]


def test_a_loss_with_class_weights_may_backpropagate_its_own_scalar():
    torch.manual_seed(0)
    weight = torch.tensor([1.0, 5.0, 0.5])
    logits = torch.randn(8, 3, requires_grad=True)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 1, 1])
    pruner = made(length=8)
    pruner.set_epoch(0)
    pruner.record(torch.arange(8), F.cross_entropy(logits, y, weight=weight, reduction="none"))
    F.cross_entropy(logits, y, weight=weight).backward()
    alone = logits.detach().requires_grad_()
    F.cross_entropy(alone, y, weight=weight).backward()
    assert logits.grad is not None
    assert alone.grad is not None
    assert torch.equal(logits.grad, alone.grad)
    pruner.end_epoch()
    assert pruner.counts.sum() > 0


def test_ignore_index_samples_have_loss_zero_and_no_mark():
    logits = torch.tensor([[3.0, 0.0], [0.0, 3.0], [0.0, 3.0]])
    y = torch.tensor([-100, 0, 1])
    pruner = made(length=3)
    pruner.set_epoch(0)
    pruner.record([0, 1, 2], F.cross_entropy(logits, y, ignore_index=-100, reduction="none"))
    pruner.end_epoch()
    assert pruner.counts.tolist() == [0, 1, 0]


class HalfWeighted(fp.FullData):
    """A policy that keeps all samples but one and gives each a weight of one half."""

    name = "half-weighted"

    def lengths(self):
        return [self._num_samples - 1] * self.epochs

    def select(self, epoch, number, rng):
        weights = torch.full((self._num_samples,), 0.5)
        return fp.EpochPlan(epoch, torch.arange(number), weights)


def test_a_plan_with_weights_scales_the_loss():
    pruner = made(HalfWeighted(2), length=5)
    losses = torch.tensor([1.0, 3.0], requires_grad=True)
    loss = pruner.record([0, 1], losses)
    loss.backward()
    assert loss.item() == 1.0
    assert losses.grad is not None
    assert torch.equal(losses.grad, torch.tensor([0.25, 0.25]))
    pruner.end_epoch()


def test_with_weights_it_is_an_error_to_backpropagate_another_scalar():
    pruner = made(HalfWeighted(2), length=5)
    losses = torch.tensor([1.0, 3.0], requires_grad=True)
    pruner.record([0, 1], losses)
    losses.mean().backward()
    with pytest.raises(RuntimeError, match="backpropagated"):
        pruner.end_epoch()


class Plans(fp.FullData):
    """A policy that keeps 4 of 8 samples, as a given function says."""

    name = "given-plans"

    def __init__(self, plan, number=4):
        super().__init__(3)
        self.plan, self.number = plan, number

    def lengths(self):
        return None if self.number is None else [self.number] * self.epochs

    def select(self, epoch, number, rng):
        return self.plan(epoch)


def kept(*indices, dtype=torch.int64, weights=None):
    return lambda epoch: fp.EpochPlan(epoch, torch.tensor(indices, dtype=dtype), weights)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (kept(0, 1, 1, 2), "ascending order"),
        (kept(3, 2, 1, 0), "ascending order"),
        (kept(-1, 0, 1, 2), "ascending order"),
        (kept(0, 1, 2, 8), r"indices in 0\.\.7, got 8"),
        (kept(0, 1, 2), "expected 4 kept samples, got 3"),
        (kept(0, 1, 2, 3, 4), "expected 4 kept samples, got 5"),
        (kept(), "one or more indices"),
        (kept(0, 1, 2, 3, dtype=torch.int32), "torch.int64"),
        (kept(0, 1, 2, 3, dtype=torch.float32), "torch.int64"),
        (lambda epoch: fp.EpochPlan(epoch, torch.zeros(2, 2, dtype=torch.int64)), "one dimension"),
        (lambda epoch: fp.EpochPlan(epoch, torch.arange(4, device="meta")), "on the CPU"),
        (
            lambda epoch: fp.EpochPlan(epoch, [0, 1, 2, 3]),  # type: ignore[arg-type]
            "kept as a tensor, got list",
        ),
        (lambda epoch: fp.EpochPlan(epoch + 1, torch.arange(4)), "a plan for epoch 0"),
        (lambda epoch: fp.EpochPlan(-1, torch.arange(4)), "epoch to be a whole number"),
        (lambda epoch: torch.arange(4), "an EpochPlan, got Tensor"),
        (lambda epoch: None, "an EpochPlan, got NoneType"),
        (kept(0, 1, 2, 3, weights=torch.ones(4)), "each of 8 samples, got 4"),
        (kept(0, 1, 2, 3, weights=torch.ones(8, dtype=torch.float64)), "torch.float32"),
        (kept(0, 1, 2, 3, weights=torch.full((8,), torch.nan)), "finite weights"),
        (kept(0, 1, 2, 3, weights=[1.0] * 8), "weights as a tensor, got list"),
    ],
)
def test_a_wrong_plan_is_refused_and_its_policy_named(plan, message):
    with pytest.raises(InputError, match=message) as raised:
        fp.Pruner(8, Plans(plan))
    assert "policy 'given-plans' in epoch 0: expected" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("number", [0, -1, 9, 4.0, True, "4"])
def test_a_wrong_number_of_kept_samples_is_refused_and_its_policy_named(number):
    with pytest.raises(InputError, match=r"lengths\(\) of policy 'given-plans'"):
        fp.Pruner(8, Plans(kept(0, 1, 2, 3), number))


def test_a_plan_of_any_length_is_taken_where_the_policy_is_free():
    for indices in ([5], [0, 7], list(range(7))):
        pruner = fp.Pruner(8, Plans(kept(*indices), number=None))
        assert pruner.plan.kept.tolist() == indices
    pruner = fp.Pruner(300_000, Plans(kept(*range(1, 300_000, 2)), number=None))
    assert len(pruner.sampler.order()) == 150_000


def test_a_large_plan_with_one_repetition_is_refused():
    for place in (1, 1 << 18, (1 << 18) + 1, 299_999):
        indices = torch.arange(300_000)
        indices[place] = indices[place - 1]
        with pytest.raises(InputError, match="ascending order"):
            fp.EpochPlan(0, indices)


@pytest.mark.parametrize(("policy", "given"), [(fp.FullData, "the class FullData"), (0.3, "float")])
def test_only_a_policy_is_taken(policy, given):
    with pytest.raises(TypeError, match=rf"a policy such as .* with a name, got {given}"):
        fp.Pruner(8, policy)


def test_a_policy_without_a_name_is_refused():
    class Nameless(fp.FullData):
        name = None  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"expected a policy such as .* with a name, got Nameless"):
        fp.Pruner(8, Nameless(3))


def run(pruner, upto=None, seen=None, batch=16):
    """Train with the made-up losses, and return the indices of every epoch in order."""
    seen = {} if seen is None else seen
    for epoch in pruner.epochs():
        if epoch == upto:
            break
        for indices in pruner.sampler.order().split(batch):
            pruner.record(indices, losses_of(epoch, indices))
            seen.setdefault(epoch, []).extend(indices.tolist())
    return seen


@pytest.mark.parametrize("epoch", range(12))
@pytest.mark.parametrize("after", [0, 1, 3])
def test_resume_at_every_boundary_and_inside_every_epoch(epoch, after, tmp_path):
    whole = made(batch_size=16)
    expected = run(whole)

    first = made(batch_size=16)
    seen = run(first, upto=epoch)
    train_epoch(first, epoch, stop_after=after)
    done = first.sampler.order()[: 16 * after].tolist()
    torch.save(first.state_dict(), tmp_path / "state.pt")

    second = made(batch_size=16)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    if done:
        seen[epoch] = done
    assert torch.equal(second.plan.kept, first.plan.kept)
    run(second, seen=seen)
    assert seen == expected
    assert torch.equal(second.counts, whole.counts)


def test_a_state_taken_in_mid_epoch_changes_nothing():
    whole, asked = made(batch_size=16), made(batch_size=16)
    expected = run(whole)
    for epoch in asked.epochs():
        for indices in asked.sampler.order().split(16):
            asked.record(indices, losses_of(epoch, indices))
            asked.state_dict()
    assert expected
    assert torch.equal(asked.counts, whole.counts)


def stopped_and_resumed(policy=None):
    """Return a Pruner that was stopped inside epoch 5, and one that has loaded its state."""
    first, second = made(policy, batch_size=16), made(policy, batch_size=16)
    run(first, upto=5)
    train_epoch(first, 5, stop_after=2)
    second.load_state_dict(first.state_dict())
    return first, second


def test_setting_earlier_epochs_keeps_the_plan_of_a_loaded_epoch():
    first, second = stopped_and_resumed()
    for epoch in range(6):
        second.set_epoch(epoch)
    assert torch.equal(second.plan.kept, first.plan.kept)
    first.end_epoch()
    second.end_epoch()
    assert torch.equal(second.counts, first.counts)


@pytest.mark.parametrize("policy", [fp.FinePruning(SCHEDULE, 32), fp.RandomPruning(SCHEDULE, 32)])
def test_a_later_epoch_than_the_loaded_one_starts_at_its_beginning(policy):
    first, second = stopped_and_resumed(policy)
    first.end_epoch()
    assert next(second.epochs(start=6)) == 6
    # The loaded epoch has been ended with what it had recorded.
    if second.counts is not None:
        assert torch.equal(second.counts, first.counts)
    assert sorted(second.sampler.order().tolist()) == second.plan.kept.tolist()


@pytest.mark.parametrize("start", [0, 2, 4])
def test_epochs_never_go_backwards(start):
    first, second = stopped_and_resumed()
    for pruner in (first, second):
        with pytest.raises(InputError, match=f"of epoch {start}, which has ended.* epoch 5"):
            next(pruner.epochs(start=start))
        with pytest.raises(InputError, match=f"of epoch {start}, which has ended"):
            pruner.start_epoch(start)
    second.set_epoch(start)  # It may be looked at.
    with pytest.raises(InputError, match=f"of epoch {start}, which has ended"):
        second.record([0, 1], torch.ones(2))


def test_the_loaded_epoch_itself_is_continued():
    _, second = stopped_and_resumed()
    assert next(second.epochs(start=5)) == 5
    assert len(second.sampler.order()) == len(second.sampler) - 2 * 16


def test_break_leaves_the_epoch_open_and_epochs_continues_it():
    whole, broken = made(batch_size=16), made(batch_size=16)
    expected = run(whole)
    seen: dict[int, list[int]] = {}
    for epoch in broken.epochs():
        for number, indices in enumerate(broken.sampler.order().split(16)):
            if (epoch, number) == (6, 2):
                break
            broken.record(indices, losses_of(epoch, indices))
            seen.setdefault(epoch, []).extend(indices.tolist())
        if epoch == 6:
            break
    run(broken, seen=seen)
    assert seen == expected
    assert torch.equal(whole.counts, broken.counts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 127}, "num_samples=127"),
        ({"seed": 4}, "seed=4"),
        ({"policy": fp.FinePruning(SCHEDULE, prune=33)}, "prune=33, got 32"),
        ({"policy": fp.RandomPruning(SCHEDULE, prune=32)}, "policy=random, got fine-pruning"),
    ],
)
def test_a_state_of_another_run_is_refused(change, message):
    state = made().state_dict()
    with pytest.raises(ValueError, match=message):
        made(**change).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: [],
        lambda state: {},
        lambda state: {**state, "version": 0},
        lambda state: {key: value for key, value in state.items() if key != "learned"},
        lambda state: {key: value for key, value in state.items() if key != "progress"},
        lambda state: {**state, "progress": {**state["progress"], "weights": torch.ones(3)}},
        lambda state: {
            **state,
            "progress": {**state["progress"], "kept": torch.zeros(N // 8, dtype=torch.uint8)},
        },
    ],
)
def test_a_damaged_state_is_refused(change):
    pruner = made()
    train_epoch(pruner, 0, stop_after=2)
    with pytest.raises(InputError, match="expected"):
        made().load_state_dict(change(pruner.state_dict()))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"learned": {}},
        {"totals": {"from_a_later_version": 1}},
        {"shape": {"from_a_later_version": 1}},
        {"recorded": {}},
        {"progress": {"from_a_later_version": 1}},
    ],
)
def test_a_state_of_another_version_says_what_to_do(change):
    pruner = made()
    train_epoch(pruner, 0, stop_after=2)
    state = pruner.state_dict()
    lacks = {name: value for name, value in state.items() if name not in change}
    for other in (state | change, lacks):
        with pytest.raises(InputError, match=": load it with the version of fineprune that saved"):
            made().load_state_dict(other)


def test_the_settings_of_an_own_policy_may_be_empty():
    class Own(fp.FullData):
        def settings(self):
            return {**super().settings(), "of_augmentation": {}}

    state = fp.Pruner(N, Own(4)).state_dict()
    fp.Pruner(N, Own(4)).load_state_dict(state)


@pytest.mark.parametrize(
    ("index", "losses", "message"),
    [
        ([0, 1], torch.tensor(1.0), "reduction"),
        ([0, 1], torch.ones(3), "one loss and one index per sample"),
        (torch.tensor(0), torch.ones(1), "one loss and one index per sample"),
        ([0, 1], torch.ones(3, 2), "one loss and one index per sample"),
        ([0, 1], torch.ones(2, 5), "the losses and not the logits"),
        ([0, 1], torch.ones(2, 4, 4), "reduce_pixels"),
        ([0.0, 1.0], torch.ones(2), "expected integer indices"),
        ([0, 1], torch.ones(2, dtype=torch.int64), "floating-point"),
        ([0, N], torch.ones(2), f"0..{N - 1}"),
        ([-1, 0], torch.ones(2), f"0..{N - 1}"),
    ],
)
def test_a_wrong_batch_fails_at_once(index, losses, message):
    pruner = made()
    pruner.set_epoch(0)
    with pytest.raises(ValueError, match=message):
        pruner.record(index, losses)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "number of samples"),
        ({"seed": -1}, "seed"),
        ({"batch_size": 0}, "batch_size"),
        ({"accumulation": 2}, "batch_size with accumulation"),
        ({"num_replicas": 2, "rank": 2}, "rank in 0..1"),
        ({"policy": fp.FinePruning(SCHEDULE, prune=N)}, "leave at least one"),
        ({"batch_size": 128}, "larger prune or save, or a smaller batch_size"),
    ],
)
def test_wrong_settings_fail_at_the_start(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


@pytest.mark.parametrize("prune", [1.0, -0.1, -1, True, float("nan"), "0.3"])
def test_a_wrong_prune_fails_at_the_start(prune):
    with pytest.raises(ValueError, match="expected prune"):
        fp.FinePruning(SCHEDULE, prune=prune)


def test_one_sample_and_a_batch_larger_than_the_set():
    pruner = made(fp.FinePruning(SCHEDULE, prune=0), length=1)
    for _ in pruner.epochs():
        pruner.record(pruner.plan.kept, torch.tensor([1.0]))
    assert pruner.counts.tolist() == [0]
    with pytest.raises(ValueError, match="larger prune or save, or a smaller batch_size"):
        made(batch_size=256)


def trained_weights(loss_of, loader_of):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(100, 8, generator=generator), torch.randint(0, 3, (100,), generator=generator)
    )
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in loader_of(data):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_full_data_trains_the_weights_of_a_plain_loop_bit_for_bit():
    def plain_loader(data):
        sampler: DistributedSampler[int] = DistributedSampler(data, 1, 0, seed=5)
        loader = DataLoader(data, batch_size=16, sampler=sampler)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            yield from loader

    pruners = []

    def pruned_loader(data):
        pruner = fp.Pruner(data, fp.FinePruning(fp.Schedule(4, 2, 0), prune=0), seed=5)
        pruners.append(pruner)
        loader = DataLoader(pruner.dataset, batch_size=16, sampler=pruner.sampler)
        for _ in pruner.epochs():
            yield from loader

    def plain_loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    def recorded_loss(model, batch):
        index, (x, y) = batch
        return pruners[0].record(index, F.cross_entropy(model(x), y, reduction="none"))

    expected = trained_weights(plain_loss, plain_loader)
    assert torch.equal(expected, trained_weights(recorded_loss, pruned_loader))


# Dynamo causes this warning while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_recording_inside_a_compiled_step_is_left_out_of_it():
    pruner = made(length=8)
    layer = torch.nn.Linear(2, 1)

    @torch.compile(backend="eager")
    def step(index, x):
        return pruner.record(index, layer(x).square().flatten())

    for epoch in range(2):
        pruner.set_epoch(epoch)
        for index in pruner.sampler.order().split(4):
            step(index, torch.randn(len(index), 2)).backward()
        pruner.end_epoch()
    assert 0 < pruner.counts.sum() <= 16


@pytest.mark.parametrize("policy", [fp.FinePruning(SCHEDULE, 32), fp.RandomPruning(SCHEDULE, 32)])
def test_recording_on_a_gpu_does_not_wait_for_it(policy):
    """Meta tensors have no values, so that reading one, as ``.item()`` does, raises an error."""
    pruner = made(policy)
    for _ in range(3):
        index = torch.ones(16, dtype=torch.int64, device="meta")
        loss = pruner.record(index, torch.ones(16, device="meta"))
        with pytest.raises(RuntimeError, match="meta tensors"):
            loss.item()


@pytest.mark.parametrize(
    ("shift", "message"), [(0, "sample 0 twice"), (N, rf"indices in 0\.\.{N - 1}, got {N}")]
)
def test_indices_on_a_gpu_are_checked_when_the_epoch_ends(shift, message, monkeypatch):
    """Meta tensors stand for those of a GPU, which are read at the end."""
    pruner = made(fp.FullData(2), batch_size=16)
    for _ in range(2):
        index = torch.ones(16, dtype=torch.int64, device="meta")
        pruner.record(index, torch.ones(16, device="meta"))
    read = np.concatenate([np.arange(16), np.arange(16) + shift])
    host = read, np.ones(32, np.float32), np.array([16, 16])
    monkeypatch.setattr("fineprune.pruning.recorder._on_host", lambda batches: host)
    with pytest.raises(InputError, match=message):
        pruner.end_epoch()


def test_a_small_flush_block_changes_nothing(monkeypatch):
    expected = made(batch_size=16)
    run(expected)
    monkeypatch.setattr("fineprune.pruning.recorder._REDUCE_AT", 20)
    flushed = made(batch_size=16)
    run(flushed)
    assert torch.equal(expected.counts, flushed.counts)


def test_counts_need_two_bytes_only_beyond_255_epochs():
    def dtype(window):
        policy = fp.FinePruning(fp.Schedule(1000, window, 0), prune=1)
        return fp.Pruner(4, policy).counts.dtype

    assert dtype(255) == torch.uint8
    assert dtype(256) == torch.int16


@pytest.mark.parametrize("policy", [fp.Adaptive(6, save=0.5, rates=[1] * 6), fp.FullData(6)])
def test_the_state_of_a_finished_training_can_be_loaded(policy):
    losses = torch.rand(6, 64, generator=torch.Generator().manual_seed(0))

    def new():
        return fp.Pruner(64, policy, batch_size=8)

    pruner = new()
    for epoch in pruner.epochs():
        for batch in torch.tensor(list(pruner.sampler)).split(8):
            pruner.record(batch, losses[epoch, batch])
    loaded = new()
    loaded.load_state_dict(pruner.state_dict())
    assert list(loaded.epochs()) == []
    assert loaded.state_dict()["epoch"] == 6


def test_a_pruner_that_is_pickled_within_an_epoch_keeps_its_losses():
    pruner = fp.Pruner(64, fp.InfoBatch(4), batch_size=8)
    batches = pruner.sampler.order().split(8)
    losses = torch.rand(8, 8)
    for batch, values in zip(batches[:4], losses[:4], strict=True):
        pruner.record(batch, values)
    other = pickle.loads(pickle.dumps(pruner))
    for used in (pruner, other):
        for batch, values in zip(batches[4:], losses[4:], strict=True):
            used.record(batch, values)
        used.end_epoch()
    assert saved(other) == saved(pruner)


@pytest.mark.parametrize(
    "change",
    [
        {"learned": {}},
        {"totals": {"other": 1}},
        {"recorded": {}},
        {"watch": {"num_classes": 3}},
        {"progress": {}},
        {"seed": 4},
    ],
)
def test_a_state_that_is_refused_changes_nothing(change):
    pruner, other = (made(fp.InfoBatch(4), batch_size=16) for _ in range(2))
    for one, batches in ((pruner, 3), (other, 5)):
        for index in one.sampler.order().split(16)[:batches]:
            logits = torch.randn(len(index), 3, generator=torch.Generator().manual_seed(batches))
            one.record(index, losses_of(batches, index), logits, index % 3)
    before = saved(pruner)
    with pytest.raises(InputError):
        pruner.load_state_dict(other.state_dict() | change)
    assert saved(pruner) == before


def test_a_wrong_index_is_refused_in_any_batch_of_any_policy():
    pruner = made(fp.FullData(2), batch_size=16)
    first, second, *_ = pruner.sampler.order().split(16)
    pruner.record(first, torch.ones(16))
    for wrong in (-1, N, 1000):
        index = second.clone()
        index[3] = wrong
        with pytest.raises(InputError, match=rf"indices in 0\.\.{N - 1}, got"):
            pruner.record(index, torch.ones(16))
    pruner.record(second, torch.ones(16))
    assert pruner.position.batches == 2


def test_a_copy_has_the_same_data_set():
    data = TensorDataset(torch.zeros(N, 2))
    copied = copy.deepcopy(fp.Pruner(data, fp.FullData(2), batch_size=16))
    assert copied.dataset.dataset is data
