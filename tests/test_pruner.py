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


def test_a_loop_that_never_records_is_noticed_only_if_losses_are_needed():
    random = made(fp.RandomPruning(SCHEDULE, prune=32), batch_size=16)
    for _ in random.epochs():
        assert len(list(random.sampler)) == len(random.plan.kept)
    assert random.steps_done == random.total_steps()
    pruner = made(batch_size=16)
    data = TensorDataset(torch.arange(N))
    loader = DataLoader(data, batch_size=16, sampler=pruner.sampler)
    message = r"epoch 0 recorded no losses.*pruner\.record"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        assert all(sum(1 for _ in loader) == len(loader) for _ in pruner.epochs())
    assert len(caught) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_the_second_epoch_that_is_broken_off_warns_once(workers):
    pruner = fp.Pruner(torch.arange(N), fp.FinePruning(SCHEDULE, 32), batch_size=8)
    loader = DataLoader(pruner.dataset, batch_size=8, sampler=pruner.sampler, num_workers=workers)

    def train():
        for epoch in pruner.epochs():
            for number, (indices, _) in enumerate(loader):
                if number == 5:
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


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("owner", ["torch", "a larger tensor", "numpy"])
def test_a_batch_may_be_changed_after_it_was_recorded(owner, inference):
    """As by loaders and CUDA graphs, which use memory again; torch does not notice NumPy."""
    pruner = made(length=8)
    with torch.inference_mode(inference):
        numbers = np.empty(2, np.int64)
        index = numbers if owner == "numpy" else torch.from_numpy(numbers)
        memory = torch.empty(4 if owner == "a larger tensor" else 2)
        if owner == "numpy":
            memory = torch.from_numpy(np.empty(2, np.float32))
        for first in range(0, 8, 2):
            numbers[:] = first, first + 1
            memory[:2] = torch.tensor([1.0, 2.0])
            pruner.record(index, memory[:2])
            memory.numpy()[:] = numbers[:] = 0
    pruner.end_epoch()
    assert pruner.counts.tolist() == [0, 1] * 4


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


class Nameless(fp.FullData):
    name = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("policy", "given"),
    [(fp.FullData, "the class FullData"), (0.3, "float"), (Nameless(3), "Nameless")],
)
def test_only_a_policy_with_a_name_is_taken(policy, given):
    with pytest.raises(TypeError, match=rf"a policy such as .* with a name, got {given}"):
        fp.Pruner(8, policy)


def run(pruner, stop=None, seen=None):
    """Train up to a batch, with made-up losses, and return the indices of every epoch in order."""
    seen = {} if seen is None else seen
    for epoch in pruner.epochs():
        for number, indices in enumerate(pruner.sampler.order().split(16)):
            if (epoch, number) == stop:
                return seen
            pruner.record(indices, losses_of(epoch, indices))
            seen.setdefault(epoch, []).extend(indices.tolist())
    return seen


@pytest.fixture(scope="module")
def whole():
    """A training that was never stopped: its indices and its counts."""
    pruner = made(batch_size=16)
    return run(pruner), pruner.counts


@pytest.mark.parametrize("epoch", range(12))
@pytest.mark.parametrize("after", [0, 1, 3])
def test_resume_at_every_boundary_and_inside_every_epoch(epoch, after, whole, tmp_path):
    first = made(batch_size=16)
    seen = run(first, (epoch, after))
    torch.save(first.state_dict(), tmp_path / "state.pt")

    second = made(batch_size=16)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(second.plan.kept, first.plan.kept)
    assert run(second, seen=seen) == whole[0]
    assert torch.equal(second.counts, whole[1])


def test_a_state_taken_in_mid_epoch_changes_nothing(whole):
    asked = made(batch_size=16)
    for epoch in asked.epochs():
        for indices in asked.sampler.order().split(16):
            asked.record(indices, losses_of(epoch, indices))
            asked.state_dict()
    assert torch.equal(asked.counts, whole[1])


def stopped_in_epoch_5(policy=None):
    """Return a Pruner that was stopped, and one that has loaded its state."""
    first, second = made(policy, batch_size=16), made(policy, batch_size=16)
    run(first, (5, 2))
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize("policy", [fp.FinePruning(SCHEDULE, 32), fp.RandomPruning(SCHEDULE, 32)])
def test_a_later_epoch_than_the_loaded_one_starts_at_its_beginning(policy):
    first, second = stopped_in_epoch_5(policy)
    first.end_epoch()
    assert next(second.epochs(start=6)) == 6
    # The loaded epoch has been ended with what it had recorded.
    if second.counts is not None:
        assert torch.equal(second.counts, first.counts)
    assert sorted(second.sampler.order().tolist()) == second.plan.kept.tolist()


@pytest.mark.parametrize("start", [0, 2, 4])
def test_epochs_never_go_backwards(start):
    first, second = stopped_in_epoch_5()
    for pruner in (first, second):
        with pytest.raises(InputError, match=f"of epoch {start}, which has ended.* epoch 5"):
            next(pruner.epochs(start=start))
        with pytest.raises(InputError, match=f"of epoch {start}, which has ended"):
            pruner.start_epoch(start)
    second.set_epoch(start)  # It may be looked at.
    with pytest.raises(InputError, match=f"of epoch {start}, which has ended"):
        second.record([0, 1], torch.ones(2))


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


REMEDY = ": load it with the version of fineprune that saved"


def changed(**parts):
    return lambda state: state | parts


def without(part):
    return lambda state: {name: value for name, value in state.items() if name != part}


def progress(**parts):
    return lambda state: {**state, "progress": state["progress"] | parts}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: [], "expected a pruner state as a dict, got list"),
        (lambda state: {}, "expected a pruner state"),
        (
            lambda state: {"model": {}, "pruner": state},
            r"the keys \['model', 'pruner'\]: give what",
        ),
        (changed(version=0), REMEDY),
        (changed(learned={}), REMEDY),
        (changed(totals={"from_a_later_version": 1}), REMEDY),
        (changed(shape={"from_a_later_version": 1}), REMEDY),
        (changed(recorded={}), REMEDY),
        (changed(progress={}), REMEDY),
        (changed(watch={"num_classes": 3}), "expected"),
        (changed(seed=4), "expected a pruner state with seed=3, got 4"),
        *(
            (without(part), REMEDY)
            for part in ("version", "learned", "totals", "recorded", "shape")
        ),
        (progress(weights=torch.ones(3)), "expected"),
        (progress(kept=torch.zeros(N // 8, dtype=torch.uint8)), "expected"),
    ],
)
def test_a_state_that_is_refused_changes_nothing(change, message):
    pruner, other = (made(fp.InfoBatch(4), batch_size=16) for _ in range(2))
    for one, batches in ((pruner, 3), (other, 5)):
        record_with_logits(one, slice(batches))
    before = saved(pruner)
    with pytest.raises(InputError, match=message):
        pruner.load_state_dict(change(other.state_dict()))
    assert saved(pruner) == before


def record_with_logits(pruner, batches):
    """Record some batches of the first epoch, with made-up losses and logits."""
    for index in pruner.sampler.order().split(16)[batches]:
        logits = torch.randn(len(index), 3, generator=torch.Generator().manual_seed(int(index[0])))
        pruner.record(index, losses_of(0, index), logits, index % 3)


def pickled(pruner):
    return pickle.loads(pickle.dumps(pruner))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("batches", [0, 4, 8])
def test_a_copy_goes_on_by_itself_and_alike(copied, batches):
    """Launchers that spawn their ranks pickle what the ranks train with."""
    data = TensorDataset(torch.zeros(N))
    pruner = fp.Pruner(data, fp.InfoBatch(4), batch_size=16)
    loader = pruner.loader()
    record_with_logits(pruner, slice(batches))
    other = copied(pruner)
    before = saved(other)
    record_with_logits(pruner, slice(batches, None))
    pruner.end_epoch()
    assert saved(other) == before
    record_with_logits(other, slice(batches, None))
    other.end_epoch()
    assert saved(other) == saved(pruner)
    for one, batches_of_it in ((pruner, loader), (other, other.loader())):
        one.set_epoch(1)
        assert len(list(batches_of_it)) == one.batches(1)
    assert (other.dataset.dataset is data) == (copied is copy.deepcopy)


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
        ([0, 1], np.ones(2, np.float32), r"losses as a torch\.Tensor, got ndarray"),
        ([0, 1], torch.ones(2).to_sparse(), r"expected a dense tensor .* values.to_dense\(\)"),
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


def test_the_state_of_a_finished_training_can_be_loaded():
    policy = fp.Adaptive(6, save=0.5, rates=[1] * 6)
    pruner, loaded = (made(policy, batch_size=16) for _ in range(2))
    run(pruner)
    loaded.load_state_dict(pruner.state_dict())
    assert list(loaded.epochs()) == []
    assert loaded.state_dict()["epoch"] == 6


def test_a_small_flush_block_changes_nothing(whole, monkeypatch):
    monkeypatch.setattr("fineprune.pruning.recorder._REDUCE_AT", 20)
    flushed = made(batch_size=16)
    run(flushed)
    assert torch.equal(flushed.counts, whole[1])


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
