"""What loops of other frameworks use of a Pruner: epochs by number, positions, loaders, reports."""

import difflib
import itertools
from pathlib import Path

import pytest
import torch
from resuming import whole_losses as losses_of
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import fineprune as fp
from fineprune.errors import InputError

ROOT = Path(__file__).parents[1]
N, BATCH = 96, 8
# Epochs 2, 3, 6 and 7 prune.
SCHEDULE = fp.Schedule(epochs=8, window=4, start=3, attenuation=1.0)


def made(policy=None, data=None, **options):
    policy = policy or fp.FinePruning(SCHEDULE, prune=32)
    data = TensorDataset(torch.arange(N) * 10) if data is None else data
    return fp.Pruner(data, policy, **{"seed": 3, "batch_size": BATCH, **options})


def train(pruner, epoch, loader, batches=None):
    """Train some batches of an epoch, and return their indices."""
    seen = []
    for index, _ in itertools.islice(loader, batches):
        # These losses have no gradient, which a policy with weights would miss.
        (pruner.record if pruner.plan.weights is None else pruner.observe)(
            index, losses_of(epoch, index)
        )
        seen.append(index.tolist())
    return seen


def run(pruner):
    """Train to the end with ``epochs``, and return the batches of each epoch."""
    return {epoch: train(pruner, epoch, pruner.loader()) for epoch in pruner.epochs()}


@pytest.fixture(scope="module")
def undisturbed():
    pruner = made()
    return run(pruner), pruner.counts.tolist()


# --- starting an epoch -----------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 3, 7])
@pytest.mark.parametrize("after", [0, 1, 5, None])
def test_a_started_epoch_continues_where_the_state_was_taken(epoch, after, undisturbed):
    first = made()
    seen = {}
    for number in range(epoch + 1):
        first.start_epoch(number)
        last = number == epoch
        seen[number] = train(first, number, first.loader(), after if last else None)
        if not last:
            first.end_epoch()
    second = made()
    second.load_state_dict(first.state_dict())
    assert (
        second.position
        == first.position
        == fp.Position(epoch, len(seen[epoch]), 8 * len(seen[epoch]))
    )
    for number in range(epoch + 1):  # composer calls it for all earlier epochs.
        second.sampler.set_epoch(number)
    for number in range(epoch, 8):
        second.start_epoch(number)
        second.sampler.set_epoch(number)
        seen[number] = seen.get(number, []) + train(second, number, second.loader())
        second.end_epoch()
    assert (seen, second.counts.tolist()) == undisturbed
    assert second.position == fp.Position(8, 0, 0)
    assert "8 of 8 epochs done" in repr(second)


def test_an_epoch_in_progress_cannot_be_set_to_another_one():
    pruner = made()
    pruner.start_epoch(2)
    for call in (pruner.set_epoch, pruner.sampler.set_epoch):
        with pytest.raises(InputError, match=r"expected set_epoch\(2\).* got 3"):
            call(3)
    pruner.set_epoch(2)
    pruner.end_epoch()
    pruner.set_epoch(3)
    for epoch in pruner.epochs(4):
        with pytest.raises(InputError, match=rf"expected set_epoch\({epoch}\).* got 0"):
            pruner.set_epoch(0)
        if epoch == 5:
            break
    pruner.set_epoch(0)  # Leaving the loop leaves the epoch open, but no longer in progress.
    with pytest.raises(InputError, match="epoch 1, which has ended"):
        pruner.start_epoch(1)
    pruner.start_epoch(5)
    assert pruner.plan.epoch == 5
    assert pruner.position == fp.Position(5, 0, 0)


@pytest.mark.parametrize("epoch", [-1, 8])
def test_an_epoch_outside_the_training_is_not_started(epoch):
    for call in (made().start_epoch, made().batches, made().steps):
        with pytest.raises(InputError, match=r"epoch in 0\.\.7"):
            call(epoch)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("epoch", [1, 3, 7])
def test_an_epoch_that_was_complete_when_saved_is_ended_at_once(epoch, drop_last):
    policy = fp.FinePruning(SCHEDULE, prune=35)
    data = TensorDataset(torch.arange(N + 3))
    whole, first, second, body = (made(policy, data, drop_last=drop_last) for _ in range(4))
    expected = run(whole)
    for number in first.epochs():
        train(first, number, first.loader())
        if number == epoch:
            break
    state = first.state_dict()
    second.load_state_dict(state)
    rest = run(second)
    assert rest == {number: batches for number, batches in expected.items() if number > epoch}
    assert second.counts.tolist() == whole.counts.tolist()
    # A loop that must still run the end of its body for this epoch names it.
    body.load_state_dict(state)
    samples = sum(len(batch) for batch in expected[epoch])
    assert body.position == fp.Position(epoch, body.batches(epoch), samples)
    assert [
        (number, len(train(body, number, body.loader())))
        for number in body.epochs(body.position.epoch)
    ] == [(epoch, 0), *((number, len(batches)) for number, batches in rest.items())]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("batches", [3, 8])
def test_a_stateful_loader_does_not_take_a_started_epoch_back(batches, undisturbed):
    def stateful(pruner):
        return StatefulDataLoader(pruner.dataset, batch_size=BATCH, sampler=pruner.sampler)

    first, second = made(), made()
    loader = stateful(first)
    seen = {}
    for epoch in first.epochs():
        seen[epoch] = train(first, epoch, loader, batches if epoch == 3 else None)
        if epoch == 3:
            break
    second.load_state_dict(first.state_dict())
    resumed = stateful(second)
    resumed.load_state_dict(loader.state_dict())
    for epoch in second.epochs():
        seen[epoch] = seen.get(epoch, []) + train(second, epoch, resumed)
    assert (seen, second.counts.tolist()) == undisturbed


# --- numbers known in advance ----------------------------------------------------------------


def test_numbers_that_depend_on_data_are_known_for_the_current_epoch_only():
    pruner = made(fp.InfoBatch(8))
    for epoch in pruner.epochs():
        assert pruner.batches(epoch) == len(pruner.loader())
        for later in range(epoch + 1, 8):
            if pruner.step_counts.num_kept(later) is None:
                with pytest.raises(InputError, match=f"got epoch {later} of policy 'infobatch'"):
                    pruner.batches(later)
        train(pruner, epoch, pruner.loader())


# --- the loader ------------------------------------------------------------------------------


class Texts(Dataset[str]):
    """A data set of strings of different lengths."""

    def __init__(self, number=N):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return "x" * (index + 1)


def lengths(texts):
    return {"length": torch.tensor([len(text) for text in texts])}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("key", [None, "index"])
def test_the_users_collate_function_and_workers_carry_the_index(workers, key):
    pruner = made(data=Texts())
    collate = fp.IndexedCollate(lengths, key) if key else lengths
    trained = 0
    for epoch in pruner.epochs():
        loader = pruner.loader(num_workers=workers, collate_fn=collate)
        for batch in loader:
            index, items = (batch["index"], batch) if key else batch
            assert torch.equal(items["length"], index + 1)
            pruner.record(index, losses_of(epoch, index))
            trained += len(index)
        if epoch == 2:
            break
    assert trained == sum(pruner.step_counts.num_kept(epoch) for epoch in range(3))


def test_a_loader_takes_the_other_options_and_another_view_of_the_samples():
    views = TensorDataset(torch.arange(N) * 20)
    pruner = made(drop_last=True)
    loader = pruner.loader(views, pin_memory=False, shuffle=False, drop_last=True)
    assert loader.drop_last
    index, (x,) = next(iter(loader))
    assert torch.equal(x, index * 20)
    length_only = fp.Pruner(N, fp.FullData(2), batch_size=4)
    assert len(length_only.loader(views)) == 24
    free = made(batch_size=None)
    assert len(free.loader(batch_size=12)) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "expected no shuffle, .* got True: leave it out"),
        ({"sampler": range(3)}, "expected no sampler, "),
        ({"batch_sampler": [[0]]}, "expected no batch_sampler, "),
        ({"drop_last": True}, "expected drop_last=False, .* got True: give it to Pruner"),
        ({"in_order": False}, "expected in_order=True"),
        ({"batch_size": 16}, "expected batch_size=8, .* got 16: give it to Pruner"),
        ({"batch_size": 0}, "batch_size to be a whole number"),
        ({"dataset": Texts(5)}, "the pruner's 96 samples, got one of 5"),
    ],
)
def test_options_that_would_undo_the_pruning_are_refused(options, message):
    with pytest.raises(InputError, match=message) as error:
        made().loader(**options)
    assert "\n" not in str(error.value)


def test_a_loader_needs_a_batch_size_and_a_data_set():
    pruner = made(batch_size=None)
    for call in (pruner.loader, lambda: pruner.batches(0), lambda: pruner.steps(0)):
        with pytest.raises(InputError, match=r"batch_size=\.\.\."):
            call()
    with pytest.raises(InputError, match="expected a pruner that was given a data set"):
        fp.Pruner(N, fp.FullData(2), batch_size=4).loader()


def test_one_collate_function_serves_training_and_evaluation():
    collate = fp.IndexedCollate(lengths, key="index")
    pruner = made(data=Texts())
    assert set(next(iter(pruner.loader(collate_fn=collate)))) == {"index", "length"}
    evaluation = DataLoader(Texts(), batch_size=4, collate_fn=collate)
    assert [set(batch) for batch in evaluation] == [{"length"}] * 24
    # Items that are pairs of an integer and something else have no index all the same.
    pairs = [(3, "a"), (4, "b")]
    assert fp.IndexedCollate(list)(pairs) == pairs


@pytest.mark.parametrize(
    ("function", "message"),
    [(lambda items: items, "return a dict .* got list"), (lambda items: {"i": 0}, "without 'i'")],
)
def test_indices_need_a_dict_with_a_free_key(function, message):
    with pytest.raises(InputError, match=message):
        fp.IndexedCollate(function, key="i")([fp.Indexed(Texts())[0]])


def test_a_plain_script_is_pruned_with_at_most_five_added_or_changed_lines():
    def code(name):
        text = (ROOT / "examples" / name).read_text(encoding="utf-8")
        return [line for line in text.split('"""', 2)[2].splitlines() if line.strip()]

    before, after = code("plain_pytorch_before.py"), code("plain_pytorch.py")
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    changed = [
        max(old_end - old, new_end - new)
        for kind, old, old_end, new, new_end in matcher.get_opcodes()
        if kind != "equal"
    ]
    assert sum(changed) == 5
    assert "import fineprune as fp" in after


# --- settings of sharding frameworks ---------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_replicas": 1},
            "without num_replicas .* got num_replicas=1 and rank=None.*split_batches",
        ),
        ({"rank": 0}, "without num_replicas and rank"),
        ({"batch_size": None}, r"expected batch_size \(that of one rank\)"),
        ({"batch_size": 0}, "batch_size to be a whole number"),
    ],
)
def test_a_framework_that_shards_needs_the_batch_size_of_a_rank_only(options, message):
    with pytest.raises(InputError, match=message):
        made(sharded_by_loader=True, **options)


def test_with_one_process_nothing_is_sharded():
    assert run(made(sharded_by_loader=True)) == run(made())


# --- weights ---------------------------------------------------------------------------------


def weighted_pruner():
    pruner = made(fp.InfoBatch(8, prune=0.5, anneal=0.0))
    for epoch in pruner.epochs():
        if epoch == 2:
            break
        for index, _ in pruner.loader():
            pruner.observe(index, losses_of(epoch, index))
    assert pruner.plan.weights is not None
    return pruner


def test_losses_of_tokens_are_weighted_and_nothing_is_recorded():
    pruner = weighted_pruner()
    index = pruner.plan.kept[:4]
    weights = pruner.plan.weights[index]
    assert len(weights.unique()) > 1
    losses = torch.rand(4, 3, requires_grad=True)
    before = pruner.position
    assert torch.equal(pruner.weighted(index, losses), losses * weights[:, None])
    assert torch.equal(pruner.weighted(index.tolist(), losses[:, 0]), losses[:, 0] * weights)
    assert pruner.position == before


def test_a_scalar_of_weighted_losses_may_replace_the_returned_one():
    pruner = weighted_pruner()
    for index, _ in pruner.loader():
        losses = torch.rand(len(index), 3, requires_grad=True)
        pruner.record(index, losses.mean(1))
        pruner.weighted(index, losses).sum().backward()
    pruner.end_epoch()
    wrong = weighted_pruner()
    index = wrong.plan.kept[:4]
    losses = torch.rand(4, 3, requires_grad=True)
    wrong.record(index, losses.mean(1))
    wrong.weighted(index, losses)  # It is computed, but not backpropagated.
    losses.sum().backward()
    with pytest.raises(RuntimeError, match=r"pruner\.weighted\(index, losses\)"):
        wrong.end_epoch()


def test_without_weights_the_losses_are_returned_as_they_are():
    losses = torch.rand(3, 2)
    assert made().weighted([0, 1, 2], losses) is losses
    for wrong in (torch.tensor(1.0), torch.rand(2), torch.rand(2, 3)):
        with pytest.raises(InputError, match=r"losses of shape \(B, \.\.\.\)"):
            made().weighted([0, 1, 2], wrong)


# --- reports ---------------------------------------------------------------------------------


def test_steps_and_skipped_samples_add_up_over_a_resume():
    policy = fp.FinePruning(SCHEDULE, prune=24)
    first = made(policy, accumulation=3)
    for epoch in first.epochs():
        train(first, epoch, first.loader(), 2 if epoch == 3 else None)
        if epoch == 3:
            break
    second = made(policy, accumulation=3)
    second.load_state_dict(first.state_dict())
    for pruner in (first, second):
        assert "'fine-pruning', 3 of 8 epochs done" in repr(pruner)
        # Two of three batches were accumulated.
        assert pruner.steps_done == sum(pruner.steps(epoch) for epoch in range(3))
        skipped = sum(N - pruner.step_counts.num_kept(epoch) for epoch in range(3))
        assert f"{skipped / (3 * N):.1%} skipped" in repr(pruner)
    run(second)
    assert second.steps_done == second.total_steps()


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_that_the_loop_leaves_early_counts_with_what_it_trained(drop_last):
    samples = N + 3
    data = TensorDataset(torch.arange(samples))
    pruner = made(fp.FullData(3), data, drop_last=drop_last)
    for epoch in pruner.epochs():
        train(pruner, epoch, pruner.loader(), 2 if epoch == 1 else None)
    assert f"{(samples - 2 * BATCH) / (3 * samples):.1%} skipped" in repr(pruner)


def test_each_epoch_is_reported_with_its_step():
    calls = []
    pruner = made(log=lambda values, step: calls.append((values, step)))
    run(pruner)
    steps = itertools.accumulate(pruner.steps(epoch) for epoch in range(8))
    assert [step for _, step in calls] == list(steps)
    assert [values["fineprune/epoch"] for values, _ in calls] == list(range(8))
    shares = [1 - pruner.step_counts.num_kept(epoch) / N for epoch in range(8)]
    assert [values["fineprune/skipped"] for values, _ in calls] == pytest.approx(shares)
    assert calls[-1][0]["fineprune/saved"] == pytest.approx(sum(shares) / 8)
    with pytest.raises(InputError, match=r"callable\(dict, step\).* got str"):
        made(log="wandb")


def test_a_state_that_is_loaded_forgets_the_batches_before_it():
    """As after a loss that was NaN: back to the last state, in the same process."""
    pruner = made()
    state = pruner.state_dict()
    for epoch in pruner.epochs():
        train(pruner, epoch, pruner.loader(), batches=5)
        break
    pruner.load_state_dict(state)
    assert pruner.position.batches == 0
    assert run(pruner) == run(made())


def test_a_state_that_map_location_moved_is_brought_to_the_cpu(tmp_path, monkeypatch):
    """The device without memory stands for a GPU: what is not brought back fails there, too."""
    policy = fp.Adaptive(8, save=0.2, rates=[1.0] * 8)
    pruner = made(policy)
    for epoch in pruner.epochs():
        train(pruner, epoch, pruner.loader())
        break
    state = pruner.state_dict()
    torch.save(state, tmp_path / "state.pt")
    moved = torch.load(tmp_path / "state.pt", map_location="meta", weights_only=True)
    values = zip(tree_leaves(moved), tree_leaves(state), strict=True)
    real = {id(there): here for there, here in values if isinstance(here, torch.Tensor)}
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: real.get(id(tensor), tensor))
    resumed = made(policy)
    resumed.load_state_dict(moved)
    assert run(resumed) == run(pruner)


def test_a_batch_whose_logits_are_refused_is_not_recorded():
    pruner = made()
    index = torch.arange(BATCH)
    for _ in pruner.epochs():
        with pytest.raises(InputError, match="got probabilities"):
            pruner.record(index, torch.ones(BATCH), torch.full((BATCH, 4), 0.25), index % 4)
        pruner.record(index, torch.ones(BATCH), torch.randn(BATCH, 4), index % 4)
        assert pruner.position.batches == 1
        break


def test_batches_that_are_recorded_before_the_epoch_are_refused():
    """Such as those of a trial, or of a validation with the same function."""
    pruner = made()
    pruner.record(torch.arange(BATCH), torch.rand(BATCH))
    with pytest.raises(InputError, match=r"before the loop .* 1 batches of epoch 0, perhaps"):
        run(pruner)


def test_numbers_within_the_batch_as_indices_are_refused_with_the_second_batch():
    pruner = made()
    batches = iter(pruner.loader())
    next(batches)
    pruner.record(torch.arange(BATCH), torch.rand(BATCH))
    with pytest.raises(InputError, match=r"each sample once in epoch 0, got sample 0 twice"):
        pruner.record(torch.arange(BATCH), torch.rand(BATCH))
