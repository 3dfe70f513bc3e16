"""``LabelWatch``: it changes no training, and finds wrong labels in one process and in several."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gloo_group import gloo_group
from resuming import refusal
from torch import nn
from torch.utils.data import DataLoader

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_logits_of_any_precision_are_taken(dtype):
    labels = made_labels()
    watch = fp.LabelWatch(N, CLASSES)
    logits = torch.randn(N, CLASSES, requires_grad=True).to(dtype)
    watch.record(range(N), logits, labels.numpy().astype(np.int32))
    expected = logits.detach().float().softmax(1)
    given, shares = watch.to_cleanlab()
    assert given.dtype == np.int64
    assert shares.dtype == np.float32
    np.testing.assert_array_equal(given, labels)
    np.testing.assert_allclose(shares, expected, rtol=3e-3, atol=1e-6)


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


def test_merge_in_one_process_changes_nothing():
    watch = fp.LabelWatch(N, CLASSES)
    record(watch, range(3), made_labels())
    before = sums(watch)
    watch.merge()
    assert same(sums(watch), before)


def ranks(rank, folder):
    with gloo_group(rank, folder, WORLD):
        torch.save(merged(rank), f"{folder}/rank{rank}.pt")


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

    resumed = loaded(state)
    readable = [tensor.tolist() for tensor in resumed.suspects()]
    record(resumed, range(100, 150), labels, rank, WORLD)
    resumed.merge()

    uneven = loaded(state)
    if not rank:  # The other rank has no batch left.
        record(uneven, range(100, 103), labels)
    uneven.merge()

    own = loaded(alone)
    record(own, range(100, 150), labels, rank, WORLD)
    own.merge()
    return {
        "early": early,
        "late": late,
        "wrong": refusal(loaded, {**alone, "rank": 1 - rank}),
        "added": refusal(unmerged(labels, rank).merge, fp.LabelWatch(N, CLASSES)),
        "added_part": refusal(loaded(watch.state_dict()).merge, unmerged(labels, rank)),
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


def loaded(state):
    watch = fp.LabelWatch(N, CLASSES)
    watch.load_state_dict(state)
    return watch


@pytest.fixture(scope="module")
def two_ranks(spawned):
    return spawned(ranks, WORLD)


def test_the_merged_evidence_of_two_ranks_is_that_of_one_process(two_ranks):
    expected, labels = fp.LabelWatch(N, CLASSES), made_labels()
    for step in range(150):
        for rank in range(WORLD):
            record(expected, [step], labels, rank, WORLD)
    expected.ranking()  # Adds what is buffered.
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
    with pytest.raises(InputError, match="got that of rank 1 of 2: call merge"):
        loaded(two_ranks[1]["alone"])


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


def test_losses_that_are_not_finite_are_reported():
    watch = fp.LabelWatch(N, CLASSES)
    logits = torch.zeros(4, CLASSES)
    logits[2] = torch.nan
    watch.record(torch.arange(4), logits, torch.tensor([0, 1, 2, 3]))
    with pytest.warns(RuntimeWarning, match="1 records with a NaN or infinite loss"):
        watch.suspects()


def empty_state():
    return fp.LabelWatch(N, CLASSES).state_dict()


def without(*keys):
    """Return a state that lacks what is at these keys."""
    state = part = empty_state()
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    return state


WHOLE = r"expected the state of a LabelWatch .* same numbers"
PART = "expected the state of a LabelWatch, got a part: '{}': load a whole state"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (dict, WHOLE),
        (list, WHOLE),
        (lambda: empty_state() | {"num_classes": 3}, WHOLE),
        (lambda: without("rank"), PART.format("rank")),
        (lambda: without("evidence", "sums"), PART.format("sums")),
        (lambda: without("evidence", "buffer"), PART.format("buffer")),
        (lambda: without("evidence", "sums", "visits"), "expected the tensors of a LabelWatch"),
    ],
)
def test_states_of_something_else_are_refused(state, message):
    with pytest.raises(InputError, match=message):
        loaded(state())


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


@pytest.mark.parametrize(("samples", "classes"), [(20, 2), (20, 3), (1, 2)])
def test_one_class_alone_has_finite_scores(samples, classes):
    watch = fp.LabelWatch(samples, classes)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(samples, classes, generator=draw)
    watch.record(torch.arange(samples), logits, torch.zeros(samples, dtype=torch.long))
    assert watch.ranking().scores.isfinite().all()
