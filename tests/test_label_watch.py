"""``LabelWatch``: it changes no training, and finds wrong labels in one process and in several."""

import copy
import io
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gloo_group import gloo_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import fineprune as fp
from fineprune.datasets.digits import load_digits
from fineprune.datasets.label_noise import mapped_noise, symmetric_noise
from fineprune.errors import InputError

N, CLASSES, BATCH, EPOCHS, WORLD = 400, 10, 16, 5, 2


def pixels_and_labels():
    """Return pixels, float32, shape (N, 64), and true labels of the first N digits."""
    images = load_digits()[0].subset(torch.arange(N))
    return images.images[:, 0, 2::4, 2::4].float().flatten(1) / 255, images.labels


@pytest.fixture(scope="module")
def digits():
    return pixels_and_labels()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, CLASSES))


def train(x, labels, watch=None, epochs=EPOCHS, seed=0):
    """Train in a plain loop, and return the weights."""
    model = network()
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = fp.Indexed(list(zip(x, labels, strict=True)))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in range(epochs):
        for index, (inputs, targets) in loader:
            logits = model(inputs)
            F.cross_entropy(logits, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                watch.record(index, logits, targets)
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def record(watch, steps, labels, rank=0, ranks=1):
    """Record made-up logits, of which each rank takes its part."""
    for step in steps:
        order = torch.randperm(N, generator=torch.Generator().manual_seed(step))
        index = order[: ranks * BATCH][rank::ranks]
        logits = torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(step))[index]
        watch.record(index, logits + 2 * F.one_hot(labels[index], CLASSES), labels[index])


def made_labels():
    return torch.randint(0, CLASSES, (N,), generator=torch.Generator().manual_seed(9))


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def sums(watch):
    return watch.state_dict()["evidence"]["sums"]


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


# --- one process ------------------------------------------------------------------------------


def test_a_watched_training_has_the_same_weights(digits):
    x, labels = digits
    watch = fp.LabelWatch(N, CLASSES)
    assert torch.equal(train(x, labels), train(x, labels, watch))
    assert len(watch.suspects()[0]) == N


@pytest.mark.parametrize("consistent", [False, True])
def test_wrong_labels_are_found_in_a_training(digits, consistent):
    x, true = digits
    own = true.numpy().astype(np.int64)
    if consistent:
        noisy = mapped_noise(own, {3: 8, 8: 3, 1: 7}, 0.3, seed=0)
    else:
        noisy = symmetric_noise(own, CLASSES, 0.2, seed=0)
    labels, wrong = torch.from_numpy(noisy), noisy != own
    watch = fp.LabelWatch(N, CLASSES)
    train(x, labels, watch, epochs=15)
    indices, scores, suggestions = watch.suspects()
    assert sorted(indices.tolist()) == list(range(N))
    assert scores.diff().max() <= 0
    assert indices.dtype == suggestions.dtype == torch.int64
    assert scores.dtype == torch.float32
    first = indices[: wrong.sum()].numpy()
    assert wrong[first].mean() > (0.6 if consistent else 0.75)
    found = torch.from_numpy(first[wrong[first]])
    assert (suggestions[: wrong.sum()][wrong[first]] == true[found]).float().mean() > 0.85
    assert not (suggestions == labels[indices]).any()
    joint = watch.ranking().joint
    assert torch.equal(joint.sum(1), torch.bincount(labels, minlength=CLASSES))
    assert 0.5 * wrong.sum() < joint.sum() - joint.trace() < 2 * wrong.sum()


def test_samples_that_were_never_recorded_come_last():
    labels = made_labels()
    watch = fp.LabelWatch(N, CLASSES)
    for step in range(6):
        index = torch.arange(N)[torch.arange(N) % 5 > 0]
        logits = torch.randn(len(index), CLASSES, generator=torch.Generator().manual_seed(step))
        watch.record(index, logits, labels[index])
    indices, scores, suggestions = watch.suspects()
    assert (indices[-N // 5 :] % 5 == 0).all()
    assert (scores[-N // 5 :] == -math.inf).all()
    assert (suggestions[-N // 5 :] == -1).all()
    assert scores[: -N // 5].isfinite().all()
    with pytest.raises(InputError, match=f"all {N} samples, got none on {N // 5}"):
        watch.to_cleanlab()


def test_each_visit_counts_the_same_whatever_was_skipped():
    watch = fp.LabelWatch(4, 2)
    logits = torch.tensor([[4.0, 0.0]]).expand(4, 2)
    labels = torch.tensor([0, 0, 1, 1])
    watch.record(torch.arange(4), logits, labels)
    for _ in range(2):
        watch.record(torch.tensor([0, 2]), -logits[:2], labels[[0, 2]])
    _, shares = watch.to_cleanlab()
    high = torch.sigmoid(torch.tensor(4.0)).item()
    trained = (high + 2 * (1 - high)) / 3
    np.testing.assert_allclose(shares[:, 0], [trained, high, trained, high], rtol=2e-3)


def test_cleanlab_gets_labels_and_probabilities(digits):
    x, labels = digits
    watch = fp.LabelWatch(N, CLASSES)
    train(x, labels, watch)
    given, shares = watch.to_cleanlab()
    assert given.dtype == np.int64
    np.testing.assert_array_equal(given, labels)
    assert shares.shape == (N, CLASSES)
    assert shares.dtype == np.float32
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
    assert (shares.argmax(1) == given).mean() > 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_logits_of_any_precision_are_taken(dtype):
    labels = made_labels()
    watch = fp.LabelWatch(N, CLASSES)
    logits = torch.randn(N, CLASSES, requires_grad=True).to(dtype)
    watch.record(range(N), logits, labels.numpy().astype(np.int32))
    expected = logits.detach().float().softmax(1)
    np.testing.assert_allclose(watch.to_cleanlab()[1], expected, rtol=3e-3, atol=1e-6)


# Dynamo causes this warning while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_step_records(digits):
    x, labels = digits
    watch, model = fp.LabelWatch(N, CLASSES), network().eval()

    @torch.compile(backend="eager")
    def step(index, inputs, targets):
        logits = model(inputs)
        watch.record(index, logits, targets)
        return F.cross_entropy(logits, targets)

    try:
        for index in torch.arange(N).split(BATCH):
            step(index, x[index], labels[index])
    finally:
        torch._dynamo.reset()
    with torch.no_grad():
        expected = model(x).softmax(1)
    np.testing.assert_allclose(watch.to_cleanlab()[1], expected, rtol=3e-3, atol=1e-6)


@pytest.mark.parametrize("classes", [10, 200])
def test_recording_reads_nothing_back_from_the_device(classes, monkeypatch):
    """Tensors on ``meta`` have no values, so reading one is an error."""
    monkeypatch.setattr("fineprune.labels.evidence._BLOCK", 4 * classes)
    watch = fp.LabelWatch(50, classes)
    watch._evidence._begun = True  # The first batch would be checked.
    for _ in range(10):
        logits = torch.empty(3, classes, device="meta")
        watch.record(torch.arange(3), logits, torch.zeros(3, dtype=torch.int64, device="meta"))
    assert watch._evidence.visits.device.type == "meta"
    with pytest.raises(NotImplementedError):
        watch.suspects()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("classes", [10, 200])
def test_recording_on_a_gpu_never_waits_and_gives_the_same(classes, monkeypatch):
    monkeypatch.setattr("fineprune.labels.evidence._BLOCK", 40 * classes)
    here, there = fp.LabelWatch(N, classes), fp.LabelWatch(N, classes)
    labels = torch.arange(N) % classes
    for step in range(30):
        index = torch.randint(0, N, (16,), generator=torch.Generator().manual_seed(step))
        logits = torch.randn(16, classes, generator=torch.Generator().manual_seed(step))
        here.record(index, logits, labels[index])
        on_gpu = logits.cuda(), labels[index].cuda()
        if step == 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            there.record(index, *on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(here.suspects()[1], there.suspects()[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("classes", "limit"), [(10, 40), (64, 148), (1000, 100), (40_000, 120)])
def test_a_sample_takes_this_many_bytes(classes, limit):
    samples = 64
    stored = sums(fp.LabelWatch(samples, classes))
    total = sum(t.numel() * t.element_size() for name, t in stored.items() if name != "faults")
    assert total <= limit * samples


# --- states and merging -----------------------------------------------------------------------


def test_a_training_that_resumes_has_the_same_evidence_bit_for_bit():
    labels = made_labels()
    whole = fp.LabelWatch(N, CLASSES)
    record(whole, range(120), labels)
    for stop in (0, 1, 50, 120):
        first, second = fp.LabelWatch(N, CLASSES), fp.LabelWatch(N, CLASSES)
        record(first, range(stop), labels)
        second.load_state_dict(saved_and_loaded(first.state_dict()))
        record(second, range(stop, 120), labels)
        assert same(sums(second), sums(whole))
    for ours, theirs in zip(second.suspects(), whole.suspects(), strict=True):
        assert torch.equal(ours, theirs)


def test_watches_of_several_trainings_are_merged():
    labels = made_labels()
    both, one, two = (fp.LabelWatch(N, CLASSES) for _ in range(3))
    record(one, range(90), labels)
    record(two, range(90, 200), labels)
    both.merge(one)
    both.merge(two)
    assert torch.equal(sums(both)["visits"], sums_after_flush(one, two, "visits"))
    torch.testing.assert_close(sums(both)["loss"], sums_after_flush(one, two, "loss"))
    reverse = fp.LabelWatch(N, CLASSES)
    reverse.merge(two)
    reverse.merge(one)
    torch.testing.assert_close(both.suspects()[1], reverse.suspects()[1], rtol=0.01, atol=0.01)


def sums_after_flush(one, two, name):
    for watch in (one, two):
        watch.suspects()
    return sums(one)[name] + sums(two)[name]


def test_merge_in_one_process_changes_nothing():
    watch = fp.LabelWatch(N, CLASSES)
    record(watch, range(3), made_labels())
    before = sums(watch)
    watch.merge()
    assert same(sums(watch), before)


def ranks(rank, folder):
    """Train and record on two ranks."""
    with gloo_group(rank, folder, WORLD):
        result = {
            "weights": [ddp(rank, watched=watched) for watched in (False, True)],
            **merged(rank),
        }
        torch.save(result, f"{folder}/rank{rank}.pt")


def ddp(rank, *, watched):
    data = fp.Indexed(list(zip(*pixels_and_labels(), strict=True)))
    model = DistributedDataParallel(network())
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    watch = fp.LabelWatch(N, CLASSES) if watched else None
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for index, (inputs, targets) in DataLoader(data, batch_size=BATCH, sampler=sampler):
            logits = model(inputs)
            F.cross_entropy(logits, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                watch.record(index, logits, targets)
    if watch is not None:
        watch.merge()
        assert len(watch.suspects()[0]) == N
        assert torch.equal(sums(watch)["visits"], torch.full((N,), EPOCHS, dtype=torch.int32))
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def refusal(function, *arguments):
    try:
        function(*arguments)
    except InputError as error:
        return str(error)
    return "accepted"


def merged(rank):
    labels = made_labels()
    watch = fp.LabelWatch(N, CLASSES)
    record(watch, range(100), labels, rank, WORLD)
    early = refusal(watch.suspects)
    alone = watch.state_dict()
    watch.merge()
    once = sums(watch)
    watch.merge()  # Nothing was recorded in between.
    again = sums(watch)
    state = watch.state_dict()
    record(watch, range(100, 150), labels, rank, WORLD)
    late = refusal(watch.suspects)
    watch.merge()

    resumed = fp.LabelWatch(N, CLASSES)
    resumed.load_state_dict(state)
    readable = [tensor.tolist() for tensor in resumed.suspects()]
    record(resumed, range(100, 150), labels, rank, WORLD)
    resumed.merge()

    uneven = fp.LabelWatch(N, CLASSES)
    uneven.load_state_dict(state)
    if not rank:  # The other rank has no batch left.
        record(uneven, range(100, 103), labels)
    uneven.merge()

    own = fp.LabelWatch(N, CLASSES)
    own.load_state_dict(alone)
    record(own, range(100, 150), labels, rank, WORLD)
    own.merge()
    wrong = {**alone, "rank": 1 - rank}
    return {
        "early": early,
        "late": late,
        "wrong": refusal(fp.LabelWatch(N, CLASSES).load_state_dict, wrong),
        "added": refusal(unmerged(labels, rank).merge, fp.LabelWatch(N, CLASSES)),
        "added_part": refusal(again_merged(watch).merge, unmerged(labels, rank)),
        "alone": alone,
        "state": state,
        "unchanged": same(once, again),
        "readable": readable,
        "suspects": [tensor.tolist() for tensor in watch.suspects()],
        "sums": sums(watch),
        "resumed": sums(resumed),
        "own": sums(own),
        "uneven": sums(uneven),
        "sizes": refusal(fp.LabelWatch(N + rank, CLASSES).merge),
        "classes": refusal(fp.LabelWatch(N, CLASSES - rank).merge),
    }


def unmerged(labels, rank):
    watch = fp.LabelWatch(N, CLASSES)
    record(watch, range(2), labels, rank, WORLD)
    return watch


def again_merged(watch):
    made = fp.LabelWatch(N, CLASSES)
    made.load_state_dict(watch.state_dict())
    return made


@pytest.fixture(scope="module")
def two_ranks(spawned):
    return spawned(ranks, WORLD)


def one_process(steps):
    """Record in one process what two ranks record together: the same steps of twice the size."""
    labels, watch = made_labels(), fp.LabelWatch(N, CLASSES)
    for step in range(steps):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(step))
        index = order[: WORLD * BATCH]
        logits = torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(step))[index]
        watch.record(index, logits + 2 * F.one_hot(labels[index], CLASSES), labels[index])
    watch.ranking()  # Adds what is buffered.
    return watch


def test_two_ranks_train_to_the_same_weights_with_and_without_a_watch(two_ranks):
    for result in two_ranks:
        plain, watched = result["weights"]
        assert torch.equal(plain, watched)
        assert torch.equal(plain, two_ranks[0]["weights"][0])


def test_the_merged_evidence_of_two_ranks_is_that_of_one_process(two_ranks):
    expected = one_process(150)
    theirs = sums(expected)
    for result in two_ranks:
        ours = result["sums"]
        for name in ("labels", "visits", "faults"):
            assert torch.equal(ours[name], theirs[name]), name
        torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=1e-4, atol=1e-5)
        # Half precision.
        torch.testing.assert_close(
            ours["shares"].float(), theirs["shares"].float(), rtol=2e-3, atol=1e-6
        )
        assert same(ours, two_ranks[0]["sums"])
    scores = dict(zip(*map(list, two_ranks[0]["suspects"][:2]), strict=True))
    indices, expected_scores, _ = expected.suspects()
    found = torch.tensor([scores[index] for index in indices.tolist()])
    torch.testing.assert_close(found, expected_scores, rtol=0, atol=0.01)


def test_ranks_resume_bit_for_bit_from_a_merged_state_and_from_their_own(two_ranks):
    for result in two_ranks:
        assert same(result["resumed"], result["sums"])
        assert torch.equal(result["own"]["visits"], result["sums"]["visits"])
        torch.testing.assert_close(
            result["own"]["shares"].float(), result["sums"]["shares"].float(), rtol=2e-3, atol=1e-6
        )


def test_merging_twice_counts_nothing_twice(two_ranks):
    assert all(result["unchanged"] for result in two_ranks)
    assert two_ranks[0]["readable"] == two_ranks[1]["readable"]


def test_a_rank_without_a_batch_merges_nothing_twice(two_ranks):
    for result in two_ranks:
        before = result["state"]["evidence"]["sums"]["visits"]
        added = result["uneven"]["visits"] - before
        assert added.sum() == 3 * BATCH
        assert same(result["uneven"], two_ranks[0]["uneven"])


def test_watches_of_parts_of_the_data_are_refused_on_every_rank(two_ranks):
    for result in two_ranks:
        assert f"expected the same num_samples on every rank, got {N} to {N + 1}" in result["sizes"]
        assert "expected the same num_classes on every rank" in result["classes"]


def test_evidence_of_one_rank_is_refused_where_that_of_all_is_needed(two_ranks):
    for rank, result in enumerate(two_ranks):
        for refused in (result["early"], result["late"]):
            assert "expected the evidence of all 2 ranks, got that of one: call merge()" in refused
        assert f"got that of rank {1 - rank} of 2" in result["wrong"]
        for refused in (result["added"], result["added_part"]):
            assert "expected merged ranks before" in refused
    watch = fp.LabelWatch(N, CLASSES)
    with pytest.raises(InputError, match="got that of rank 1 of 2: call merge"):
        watch.load_state_dict(two_ranks[1]["alone"])


# --- wrong input ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, 10), (10, 1), (10.0, 2), (True, 2)])
def test_sizes_are_checked(sizes):
    with pytest.raises(InputError, match="whole number of at least"):
        fp.LabelWatch(*sizes)


GOOD = (torch.arange(4), torch.zeros(4, CLASSES), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.arange(3), "logits of shape"),
        (0, torch.arange(4).float(), "whole numbers"),
        (0, torch.ones(4, dtype=torch.bool), "whole numbers"),
        (1, torch.zeros(4, CLASSES + 1), "logits of shape"),
        (1, torch.zeros(4), "logits of shape"),
        (1, torch.zeros(4, 3, CLASSES), "logits of shape"),
        (1, torch.zeros(4, CLASSES, dtype=torch.int64), "floating-point logits"),
        (2, torch.zeros(4, CLASSES), r"labels\.argmax\(1\) if each row is one-hot"),
        (2, torch.zeros(4), "whole numbers"),
        (2, torch.full((4,), -1), "records out of range"),
        (0, ["a.png", "b.png", "c.png", "d.png"], "expected indices as whole numbers.*'a.png'"),
        (2, ["cat", "dog", "cat", "dog"], "expected labels as whole numbers.*numbered from 0"),
    ],
)
def test_a_wrong_batch_is_an_error(place, value, message):
    batch = list(GOOD)
    batch[place] = value
    with pytest.raises(InputError, match=message):
        fp.LabelWatch(N, CLASSES).record(*batch)


@pytest.mark.parametrize(("order", "said"), [((1, 0, 2), "first"), ((0, 2, 1), "last")])
def test_arguments_in_another_order_are_told_in_one_line(order, said):
    with pytest.raises(InputError, match=rf"record\(index, logits, labels\), got .* {said}") as e:
        fp.LabelWatch(N, CLASSES).record(*(GOOD[place] for place in order))
    assert "\n" not in str(e.value)


def test_the_error_of_a_sample_outside_a_batch_says_how_to_make_one():
    one = [values[0] for values in GOOD]
    with pytest.raises(InputError, match=r"one sample: index\[None\], logits"):
        fp.LabelWatch(N, CLASSES).record(*one)
    fp.LabelWatch(N, CLASSES).record(*(values[None] for values in one))
    with pytest.raises(InputError, match="not the number of the batch"):
        fp.LabelWatch(N, CLASSES).record(0, *GOOD[1:])


def test_one_class_per_pixel_cannot_be_watched():
    pixels = torch.zeros(4, CLASSES, 2, 2), torch.zeros(4, 2, 2, dtype=torch.int64)
    with pytest.raises(InputError, match="one class to a whole sample"):
        fp.LabelWatch(N, CLASSES).record(torch.arange(4), *pixels)


@pytest.mark.parametrize("form", ["column", "one-hot"])
def test_labels_of_two_dimensions_are_told_how_to_become_classes(form):
    index, logits, labels = *GOOD[:2], torch.tensor([2, 0, 1, 3])
    given = labels[:, None] if form == "column" else torch.eye(CLASSES)[labels].long()
    watch = fp.LabelWatch(N, CLASSES)
    with pytest.raises(InputError) as caught:
        watch.record(index, logits, given)
    (told,) = re.findall(r"labels\.\w+\(1\)", str(caught.value))
    watch.record(index, logits, eval(told, {"labels": given}))
    assert torch.equal(watch.ranking().labels[index], labels)


def test_an_index_that_means_another_sample_in_each_epoch_is_noticed():
    watch = fp.LabelWatch(4, 2)
    for labels in ([0, 1, 0, 1], [1, 0, 0, 1]):
        watch.record(torch.arange(4), torch.randn(4, 2), torch.tensor(labels))
    with pytest.raises(InputError, match="label"):
        watch.suspects()


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_a_network_with_one_logit_is_told_how_it_can_be_watched(shape):
    z, labels = torch.tensor([-1.0, 2.0, 0.5, -3.0]), torch.tensor([0, 1, 0, 1])
    watch = fp.LabelWatch(4, 2)
    with pytest.raises(InputError) as caught:
        watch.record(torch.arange(4), z.reshape(shape), labels)
    (told,) = re.findall(r"torch\.stack\(.*?, 1\)", str(caught.value))
    watch.record(torch.arange(4), eval(told), labels)
    assert set(watch.suspects()[0][:2].tolist()) == {2, 3}  # 0.5 and -3 contradict 0 and 1


def test_suspects_need_records():
    watch = fp.LabelWatch(N, CLASSES)
    with pytest.raises(InputError, match="got no record"):
        watch.suspects()
    watch.record(torch.arange(N), torch.full((N, CLASSES), torch.nan), torch.zeros(N).long())
    with pytest.raises(InputError, match=f"got {N} records, whose losses are all NaN"):
        watch.suspects()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_batch_is_not_recorded_again_when_its_forward_pass_is_repeated(use_reentrant):
    watch, labels = fp.LabelWatch(4, 3), torch.tensor([0, 1, 2, 0])
    weight = torch.randn(3, 3, requires_grad=True)

    def step(x):
        logits = x @ weight
        watch.record(torch.arange(4), logits, labels)
        return F.cross_entropy(logits, labels)

    x = torch.randn(4, 3, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(step, x, use_reentrant=use_reentrant)
    with pytest.raises(InputError, match="outside of checkpointed functions"):
        loss.backward()
    assert watch.ranking().visits == 1


@pytest.mark.parametrize("state", [{}, [], {"version": 1, "num_samples": N, "num_classes": 3}])
def test_states_of_something_else_are_refused(state):
    watch = fp.LabelWatch(N, CLASSES)
    with pytest.raises(InputError, match=r"expected the state of a LabelWatch .* same numbers"):
        watch.load_state_dict(state)


@pytest.mark.parametrize("missing", [("rank",), ("evidence", "sums"), ("evidence", "buffer")])
def test_a_part_of_a_state_is_refused(missing):
    state = part = fp.LabelWatch(4, 2).state_dict()
    for key in missing[:-1]:
        part = part[key]
    del part[missing[-1]]
    with pytest.raises(InputError, match=f"got a part: '{missing[-1]}': load a whole state"):
        fp.LabelWatch(4, 2).load_state_dict(state)


def test_a_state_with_other_tensors_is_refused():
    state = fp.LabelWatch(N, CLASSES).state_dict()
    del state["evidence"]["sums"]["visits"]
    with pytest.raises(InputError, match="expected the tensors of a LabelWatch"):
        fp.LabelWatch(N, CLASSES).load_state_dict(state)


def test_labels_must_be_those_of_the_other_watch():
    one, two = fp.LabelWatch(N, CLASSES), fp.LabelWatch(N, CLASSES)
    record(one, range(3), made_labels())
    record(two, range(3), (made_labels() + 1) % CLASSES)
    with pytest.raises(InputError, match="expected the same labels in all parts"):
        one.merge(two)


def test_losses_that_are_not_finite_are_reported():
    watch = fp.LabelWatch(N, CLASSES)
    logits = torch.zeros(4, CLASSES)
    logits[2] = torch.nan
    watch.record(torch.arange(4), logits, torch.tensor([0, 1, 2, 3]))
    with pytest.warns(RuntimeWarning, match="1 records with a NaN or infinite loss"):
        watch.suspects()


def test_a_launcher_without_a_group_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        fp.LabelWatch(N, CLASSES).record(*GOOD)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_probabilities_are_refused_and_their_logarithms_are_logits(precision):
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(32, 10, generator=draw)
    index, labels = torch.arange(32), torch.randint(0, 10, (32,), generator=draw)
    with pytest.raises(InputError, match="expected logits, got probabilities"):
        fp.LabelWatch(32, 10).record(index, logits.softmax(1).to(precision), labels)
    with pytest.raises(InputError, match=r"a torch\.Tensor, got ndarray"):
        fp.LabelWatch(32, 10).record(index, logits.numpy(), labels)  # type: ignore[arg-type]
    watches = [fp.LabelWatch(32, 10) for _ in range(2)]
    for watch, given in zip(watches, (logits, logits.log_softmax(1)), strict=True):
        watch.record(index, given, labels)
    assert torch.equal(*(watch.suspects()[0] for watch in watches))


def test_refused_probabilities_are_not_recorded():
    index, logits, labels = GOOD
    watch, corrected = (fp.LabelWatch(N, CLASSES) for _ in range(2))
    with pytest.raises(InputError, match="got probabilities"):
        corrected.record(index, logits.softmax(1), labels)
    for made in (watch, corrected):
        made.record(*GOOD)
    assert same(sums(watch), sums(corrected))


@pytest.mark.parametrize(("samples", "classes"), [(20, 2), (20, 3), (1, 2)])
def test_one_class_alone_has_finite_scores(samples, classes):
    watch = fp.LabelWatch(samples, classes)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(samples, classes, generator=draw)
    watch.record(torch.arange(samples), logits, torch.zeros(samples, dtype=torch.long))
    assert watch.ranking().scores.isfinite().all()


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.filterwarnings("ignore:.*NaN or infinite")
def test_a_sample_with_nothing_but_nan_is_no_suspect(classes):
    watch = fp.LabelWatch(50, classes)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(50, classes, generator=draw)
    logits[7] = torch.nan
    for _ in range(3):
        watch.record(torch.arange(50), logits, torch.arange(50) % classes)
    indices, scores, suggestions = watch.suspects()
    last = [float(part[-1]) for part in (indices, scores, suggestions)]
    assert last == [7, -torch.inf, -1]
    with pytest.raises(InputError, match="expected"):
        watch.to_cleanlab()


@pytest.mark.parametrize("classes", [10, 100])
def test_a_copy_and_a_pickled_watch_go_on_alike(classes):
    """Launchers that spawn their ranks pickle what the ranks train with."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 50, classes, generator=draw)
    labels = torch.arange(50) % classes
    watch = fp.LabelWatch(50, classes)
    watch.record(torch.arange(50), logits[0], labels)
    copies = [copy.deepcopy(watch), pickle.loads(pickle.dumps(watch))]
    for each in (watch, *copies):
        each.record(torch.arange(50), logits[1], labels)
    for each in copies:
        assert all(map(torch.equal, each.suspects(), watch.suspects()))
