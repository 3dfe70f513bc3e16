"""``Pruner.record`` with logits: it watches the labels and changes nothing else."""

import copy
import io
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from gloo_group import gloo_group
from resuming import saved
from torch import nn
from torch.utils.data import TensorDataset

import fineprune as fp
from fineprune.errors import InputError

N, CLASSES, BATCH, EPOCHS, WORLD = 96, 4, 8, 6, 2


def data():
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(0, CLASSES, (N,), generator=draw)
    x = torch.randn(N, 8, generator=draw) + 2 * F.one_hot(labels, 8)
    return TensorDataset(x, torch.where(torch.rand(N, generator=draw) < 0.1, 0, labels))


def pruner_of(policy=None, **options):
    policy = policy or fp.Adaptive(EPOCHS, save=0.3, rates=[0.1] * EPOCHS)
    return fp.Pruner(data(), policy, batch_size=BATCH, **options)


def train(pruner, *, watched=True, separate=None, until=None):
    """Train in the usual loop, or until so many steps are done; return the weights and a state."""
    torch.manual_seed(0)
    model = nn.Linear(8, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in pruner.epochs():
        for index, (x, y) in pruner.loader():
            logits = model(x)
            losses = F.cross_entropy(logits, y, reduction="none")
            pruner.record(index, losses, *((logits, y) if watched else ())).backward()
            optimizer.step()
            optimizer.zero_grad()
            if separate is not None:
                separate.record(index, logits, y)
            if pruner.steps_done == until:
                return model, pruner.state_dict()
    return model, pruner.state_dict()


def record_all(pruner):
    """Record the inputs as if they were logits."""
    for _ in pruner.epochs():
        for index, (x, y) in pruner.loader():
            logits = x[:, :CLASSES]
            pruner.record(index, F.cross_entropy(logits, y, reduction="none"), logits, y)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(ours, theirs):
    for one, other in zip(ours.suspects(), theirs.suspects(), strict=True):
        assert torch.equal(one, other)


def test_the_weights_and_the_samples_are_those_without_logits():
    (model, state), (other, unwatched) = (
        train(pruner_of(fp.InfoBatch(EPOCHS)), watched=watched) for watched in (True, False)
    )
    assert torch.equal(model.weight, other.weight)
    assert state.pop("watch") is not None
    assert unwatched.pop("watch") is None
    assert state["totals"] == unwatched["totals"]
    assert str(state["learned"]) == str(unwatched["learned"])


def test_the_evidence_is_that_of_a_watch_beside_the_pruner():
    pruner, beside = pruner_of(fp.InfoBatch(EPOCHS)), fp.LabelWatch(N, CLASSES)
    assert pruner.watch is None
    train(pruner, separate=beside)
    assert_same(pruner.watch, beside)


def test_a_batch_that_is_also_given_to_the_watch_is_refused():
    pruner = pruner_of(fp.FullData(EPOCHS))
    index, logits, y = torch.arange(8), torch.randn(8, 4), data()[:8][1]
    pruner.record(index, F.cross_entropy(logits, y, reduction="none"), logits, y)
    resumed = pruner_of(fp.FullData(EPOCHS))
    resumed.load_state_dict(pruner.state_dict())
    for each in (pruner, resumed, copy.deepcopy(pruner)):
        assert each.watch is not None
        with pytest.raises(InputError, match=r"each batch once, .* to pruner.record\(\) alone"):
            each.watch.record(index, logits, y)
        assert each.watch.ranking().labels.ge(0).sum() == 8


def test_a_resumed_training_has_the_same_evidence():
    stopped, resumed = pruner_of(fp.FullData(EPOCHS)), pruner_of(fp.FullData(EPOCHS))
    made_up(stopped, 0, until=7)
    resumed.load_state_dict(saved_and_loaded(stopped.state_dict()))
    assert_same(made_up(resumed, 7), made_up(pruner_of(fp.FullData(EPOCHS)), 0))


def made_up(pruner, step, until=None):
    for _ in pruner.epochs():
        for index, (_, y) in pruner.loader():
            logits = torch.randn(len(index), CLASSES, generator=torch.Generator().manual_seed(step))
            pruner.record(index, F.cross_entropy(logits, y, reduction="none"), logits, y)
            step += 1
            if step == until:
                return pruner.watch
    return pruner.watch


def test_the_first_batch_may_have_no_label_at_all():
    pruner = pruner_of(fp.InfoBatch(EPOCHS))
    logits = torch.randn(BATCH, CLASSES, generator=torch.Generator().manual_seed(0))
    without = torch.full((BATCH,), -100)
    pruner.record(torch.arange(BATCH), torch.zeros(BATCH), logits, without)
    assert pruner.position.samples == BATCH


# Dynamo causes this warning while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("recorded", ["losses", "losses and logits", "logits alone"])
def test_a_compiled_step_records_the_same(recorded):
    def recorded_by(compiling):
        pruner, watch = pruner_of(fp.InfoBatch(2)), fp.LabelWatch(N, CLASSES)
        scale = torch.tensor(2.0, requires_grad=True)

        def step(index, x, y):
            logits = scale * x[:, :CLASSES]
            losses = F.cross_entropy(logits, y, reduction="none")
            if recorded == "logits alone":
                watch.record(index, logits, y)
                return losses.mean()
            return pruner.record(index, losses, *((logits, y) if "logits" in recorded else ()))

        run: Any = torch.compile(step, backend="eager") if compiling else step
        for index, (x, y) in pruner.loader():
            run(index, x, y).backward()
        return saved(pruner), saved(watch)

    try:
        assert recorded_by(True) == recorded_by(False)
    finally:
        torch._dynamo.reset()


def test_the_buffer_keeps_few_tensors_and_nothing_else_alive():
    """Each tensor of a loader's process keeps a file open, and a slice all of its logits."""
    watch = fp.LabelWatch(4, 2)
    index, labels = torch.arange(4), torch.tensor([0, 1, 0, 1])
    kept: weakref.WeakSet[Any] = weakref.WeakSet()
    for _ in range(200):
        outputs = torch.zeros(4, 100)
        parts = [index.clone(), outputs[:, :2], labels.clone()]
        kept.update([outputs.untyped_storage(), *parts])
        watch.record(*parts)
    del outputs, parts
    assert len(kept) == 0
    assert len(watch.state_dict()["evidence"]["buffer"][0]) < 128


def test_logits_need_labels():
    pruner = pruner_of(fp.FullData(EPOCHS))
    for given in ((torch.zeros(8, CLASSES), None), (None, torch.zeros(8))):
        with pytest.raises(InputError, match="logits and labels together"):
            pruner.record(torch.arange(8), torch.ones(8), *given)
    for output in (torch.zeros(8), torch.zeros(8, 1)):  # The latter is that of a regression.
        with pytest.raises(InputError, match=r"at least two classes, .* one row of logits"):
            pruner.record(torch.arange(8), torch.ones(8), output, torch.zeros(8))


# --- two ranks --------------------------------------------------------------------------------


def ranks(rank, folder):
    with gloo_group(rank, folder, WORLD):
        pruner = pruner_of(fp.FullData(3))
        for epoch in pruner.epochs():
            for index, (x, y) in pruner.loader():
                losses = F.cross_entropy(x[:, :CLASSES], y, reduction="none")
                pruner.record(index, losses, x[:, :CLASSES], y)
            pruner.end_epoch()
            if epoch == 1:
                with pytest.raises(InputError, match="synchronize"):
                    pruner.state_dict()
                pruner.synchronize()
                state = pruner.state_dict()
        resumed = pruner_of(fp.FullData(3))
        resumed.load_state_dict(state)
        record_all(resumed)
        # A copy exchanges with the ranks of its original, here with none.
        group = [dist.new_group([one]) for one in range(WORLD)][rank]
        alone = pruner_of(fp.FullData(3), process_group=group)
        own = torch.arange(3 * rank, 3 * rank + 3)
        alone.record(own, torch.ones(3), torch.zeros(3, CLASSES), data().tensors[1][own])
        copied = copy.deepcopy(alone)
        copied.synchronize()
        assert copied.watch.ranking().labels.ge(0).nonzero().flatten().equal(own)
        suspects = []
        for one in (pruner, resumed):
            one.synchronize()
            suspects.append([part.clone() for part in one.watch.suspects()])
        told = {"suspects": suspects, "kept": kept_of(by_labels())}
        torch.save(told, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def two_ranks(spawned):
    return spawned(ranks, WORLD)


def test_ranks_merge_their_evidence_when_they_synchronize(two_ranks):
    pruner = pruner_of(fp.FullData(3))
    record_all(pruner)
    alone = dict(zip(*(part.tolist() for part in pruner.watch.suspects()[:2]), strict=True))
    for result in two_ranks:
        (index, scores, _), resumed = result["suspects"]
        assert torch.equal(scores, resumed[1])
        assert all(
            abs(alone[sample] - score) < 0.02
            for sample, score in zip(index.tolist(), scores.tolist(), strict=True)
        )


# --- skipping by the labels ---------------------------------------------------------------------


def mistaken():
    """Return the logits and labels of 400 samples, 40 of which have the class 0 and the label 1."""
    true = torch.arange(400) % CLASSES
    wrong = (true == 0) & (torch.arange(400) % 20 < 8)
    labels = torch.where(wrong, 1, true)
    noise = torch.randn(400, CLASSES, generator=torch.Generator().manual_seed(0))
    return 3.6 * F.one_hot(true, CLASSES) + 0.5 * noise, labels, wrong


def kept_of(pruner, stop=None):
    """Record the mistakes; return what each epoch kept, or the state in the middle of one."""
    logits, labels, _ = mistaken()
    losses = F.cross_entropy(logits, labels, reduction="none")
    kept = []
    for epoch in pruner.epochs():
        for number, index in enumerate(torch.tensor(list(pruner.sampler)).split(20)):
            if (epoch, number) == stop:
                pruner.synchronize()
                return pruner.state_dict()
            pruner.record(index, losses[index], logits[index], labels[index])
        kept.append(pruner.plan.kept)
    return kept


def by_labels():
    policy = fp.Adaptive(6, save=0.1, rates=[1] * 6, first_epoch=3, returning=0.0)
    return fp.Pruner(400, policy, batch_size=20)


@pytest.mark.parametrize("stop", [(3, 0), (4, 7)])
def test_a_resumed_training_skips_the_same_labels(stop):
    stopped = by_labels()
    state = saved_and_loaded(kept_of(stopped, stop=stop))
    resumed = by_labels()
    resumed.load_state_dict(state)
    assert resumed.watch.ranking().num_suspects >= 25
    expected = kept_of(by_labels())[stop[0] + (stop[1] > 0) :]
    found = kept_of(resumed)[stop[1] > 0 :]
    assert [kept.tolist() for kept in found] == [kept.tolist() for kept in expected]


def test_ranks_skip_the_same_labels(two_ranks):
    first, second = (result["kept"] for result in two_ranks)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert mistaken()[2][first[-1]].sum() < 15
