"""The sums behind ``LabelWatch``, beside a slow implementation of what they mean."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fineprune.errors import InputError
from fineprune.labels.evidence import KEEP_ALL, STRONGEST, Evidence

# Half precision: the relative error of a number, and the absolute error of a small one.
RELATIVE, ABSOLUTE = 2.0**-11, 2.0**-24


def labels_of(samples, classes):
    return torch.arange(samples) * 7 % classes


def logits_of(step, samples, classes):
    generator = torch.Generator().manual_seed(step)
    return 3 * torch.randn(samples, classes, generator=generator)


def shares_of(evidence):
    evidence.flush()
    return torch.cat([chunk.shares for chunk in evidence.chunks()])


def record_and_flush(evidence, index, logits, labels):
    evidence.record(index, logits, labels)
    evidence.flush()


def brute_force(batches, samples, classes, labels):
    """Return the sums over (index, logits), sample by sample in double precision."""
    loss, visits = np.zeros(samples), np.zeros(samples, int)
    shares = np.zeros((samples, classes))
    for index, logits in batches:
        for sample, row in zip(index.tolist(), logits.double().numpy(), strict=True):
            e = np.exp(row - row.max())
            softmax = e / e.sum()
            loss[sample] -= np.log(softmax[labels[sample]])
            shares[sample] += softmax
            visits[sample] += 1
    return loss, visits, shares / np.maximum(visits, 1)[:, None]


def random_batches(data, samples, classes):
    sizes = data.draw(st.lists(st.integers(1, 2 * samples), min_size=1, max_size=12))
    for step, size in enumerate(sizes):
        # With replacement: a sample may occur several times in a batch, or in none.
        generator = torch.Generator().manual_seed(1000 + step)
        index = torch.randint(0, samples, (size,), generator=generator)
        yield index, logits_of(step, size, classes)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(2, 12))
def test_the_sums_are_those_of_a_slow_implementation(data, samples, classes):
    labels = labels_of(samples, classes)
    batches = list(random_batches(data, samples, classes))
    evidence = Evidence(samples, classes)
    for index, logits in batches:
        evidence.record(index, logits, labels[index])
    loss, visits, shares = brute_force(batches, samples, classes, labels)
    found = shares_of(evidence)
    np.testing.assert_allclose(evidence.loss, loss, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(evidence.visits, visits)
    # The buffer is added in two steps, because the first batch is added at once.
    np.testing.assert_allclose(found, shares, rtol=3 * RELATIVE, atol=3 * ABSOLUTE)
    seen = torch.from_numpy(visits > 0)
    assert torch.equal(evidence.labels >= 0, seen)
    assert torch.equal(evidence.labels[seen].long(), labels[seen])


def test_a_buffer_is_added_when_it_is_full(monkeypatch):
    monkeypatch.setattr("fineprune.labels.evidence._BLOCK", 10)
    evidence = Evidence(6, 2)
    index = torch.tensor([1, 4])
    visits = []
    for step in range(8):
        evidence.record(index, logits_of(step, 2, 2), labels_of(6, 2)[index])
        visits.append(int(evidence.visits[1]))
    # Four logits per batch: the first batch is added at once, then three batches together.
    assert visits == [1, 1, 1, 4, 4, 4, 7, 7]


class WithoutIndexCopy(TorchDispatchMode):
    """Has no ``index_copy``, like MPS with torch 2.6."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "index_copy" in str(func):
            raise NotImplementedError(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["all", "strongest"])
def storage(request, monkeypatch):
    """Store all classes, or the label and the two strongest others."""
    if request.param == "strongest":
        monkeypatch.setattr("fineprune.labels.evidence.KEEP_ALL", 2)
        monkeypatch.setattr("fineprune.labels.evidence.STRONGEST", 2)


@pytest.mark.usefixtures("storage")
def test_the_sums_need_no_operation_that_mps_lacks():
    evidence = Evidence(8, 4)
    with WithoutIndexCopy():
        record_and_flush(evidence, torch.arange(8), logits_of(0, 8, 4), labels_of(8, 4))
    assert evidence.visits.tolist() == [1] * 8


def test_rounding_does_not_accumulate_over_a_thousand_epochs():
    evidence = Evidence(64, 5)
    evidence_labels, index = labels_of(64, 5), torch.arange(64)
    total = torch.zeros(64, 5, dtype=torch.float64)
    for epoch in range(1, 1001):
        logits = logits_of(epoch, 64, 5)
        evidence.record(index, logits, evidence_labels)
        evidence.flush()
        total += logits.double().softmax(1)
    torch.testing.assert_close(shares_of(evidence).double(), total / 1000, rtol=0.02, atol=0)


@pytest.mark.parametrize("changed", ["torch", "numpy", "index", "labels", "inference"])
def test_a_batch_may_be_changed_after_it_was_recorded(changed):
    """Also through NumPy, which torch does not notice."""
    evidence, expected = Evidence(4, 2), Evidence(4, 2)
    for step in range(3):
        with torch.inference_mode(changed == "inference"):
            batch = torch.arange(4), logits_of(step, 4, 2), torch.tensor([0, 1, 0, 1])
            expected.record(*(part.clone() for part in batch))
            evidence.record(*batch)
            if changed == "numpy":
                batch[1].numpy().sort(axis=1)
            else:
                batch[{"index": 0, "labels": 2}.get(changed, 1)].fill_(0)
    assert torch.equal(shares_of(evidence), shares_of(expected))
    assert torch.equal(evidence.labels, expected.labels)


def test_records_that_are_not_finite_are_left_out_and_counted():
    evidence = Evidence(4, 3)
    logits = logits_of(0, 4, 3)
    logits[1, 2] = torch.nan
    logits[2, 0] = torch.inf
    logits[3, 0] = -torch.inf  # Sample 3 has the label 0, so its loss is infinite.
    evidence.record(torch.arange(4), logits, labels_of(4, 3))
    assert evidence.faults[2] == 3
    assert evidence.visits.tolist() == [1, 0, 0, 0]
    assert shares_of(evidence).isfinite().all()
    evidence.record(torch.arange(4), logits_of(1, 4, 3), labels_of(4, 3))
    torch.testing.assert_close(
        shares_of(evidence)[1:], logits_of(1, 4, 3).softmax(1)[1:], rtol=RELATIVE, atol=0
    )


@pytest.mark.parametrize(("index", "label"), [(-1, 0), (4, -100), (0, -1), (0, 3)])
@pytest.mark.parametrize("batch", [0, 1])
def test_numbers_out_of_range_are_an_error(index, label, batch, monkeypatch):
    monkeypatch.setattr("fineprune.labels.evidence._BLOCK", 1)
    evidence = Evidence(4, 3)
    for _ in range(batch):
        evidence.record(torch.arange(4), logits_of(0, 4, 3), labels_of(4, 3))
    wrong = torch.tensor([index]), logits_of(0, 1, 3), torch.tensor([label])
    with pytest.raises(InputError, match=r"indices in 0\.\.3 and labels in 0\.\.2, got 1 records"):
        evidence.record(*wrong)


@pytest.mark.usefixtures("storage")
@pytest.mark.parametrize("first", [False, True])
def test_records_without_a_label_are_left_out(first):
    evidence, expected = Evidence(4, 3), Evidence(4, 3)
    labelled = torch.tensor([1, 3]), logits_of(0, 2, 3), torch.tensor([2, 1])
    if not first:
        evidence.record(*labelled)
        expected.record(*labelled)
    logits = logits_of(1, 4, 3)
    evidence.record(torch.arange(4), logits, torch.tensor([-100, 2, -100, 1]))
    evidence.flush()
    expected.record(torch.tensor([1, 3]), logits[[1, 3]], torch.tensor([2, 1]))
    expected.flush()
    assert evidence.labels.tolist() == [-1, 2, -1, 1]
    for name in ("labels", "loss", "visits"):
        assert torch.equal(getattr(evidence, name), getattr(expected, name)), name
    shares = shares_of(evidence)[[1, 3]], shares_of(expected)[[1, 3]]
    torch.testing.assert_close(*shares, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("labels", [[2, -100], [-100, 2], [2, -100, 2], [2, 2, -100, -100]])
@pytest.mark.parametrize("apart", [False, True])
def test_some_records_of_a_sample_may_have_no_label(labels, apart):
    evidence = Evidence(4, 3)
    evidence.record(torch.tensor([0]), logits_of(0, 1, 3), torch.tensor([1]))
    batches = torch.tensor(labels).split(1 if apart else len(labels))
    for batch in batches:
        index = torch.full_like(batch, 3)
        evidence.record(index, logits_of(1, len(batch), 3), batch)
    evidence.flush()
    assert evidence.labels.tolist() == [1, -1, -1, 2]
    assert evidence.visits.tolist() == [1, 0, 0, labels.count(2)]


@pytest.mark.parametrize("together", [True, False])
def test_a_label_that_changes_is_an_error(together):
    evidence = Evidence(4, 3)
    if together:
        index, labels = torch.tensor([1, 1]), torch.tensor([0, 2])
    else:
        evidence.record(torch.tensor([1]), logits_of(0, 1, 3), torch.tensor([0]))
        index, labels = torch.tensor([1]), torch.tensor([2])
    with pytest.raises(InputError, match="the same label for a sample each time"):
        record_and_flush(evidence, index, logits_of(0, len(index), 3), labels)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(st.integers(KEEP_ALL + 1, 200), st.integers(0, 10**6))
def test_of_many_classes_the_label_and_the_strongest_others_are_kept(classes, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, classes, generator=generator).mul(2).softmax(1)
    labels = torch.randint(0, classes, (5,), generator=generator)
    evidence = Evidence(8, classes)
    index = torch.tensor([7, 2, 5, 0, 1])
    record_and_flush(evidence, index, rows.log(), labels)
    found = evidence.shares_of(index, labels)
    torch.testing.assert_close(found.sum(1), torch.ones(5), rtol=0, atol=1e-2)
    for row, read, label in zip(rows, found, labels.tolist(), strict=True):
        others = row.clone()
        others[label] = -1
        kept = [label, *others.topk(STRONGEST).indices.tolist()]
        torch.testing.assert_close(read[kept], row[kept], rtol=RELATIVE, atol=ABSOLUTE)
        rest = np.setdiff1d(np.arange(classes), kept)
        assert len(read[rest].unique()) <= 1  # What is left is spread evenly.


def test_classes_above_32_767_are_kept_as_well():
    classes = (1 << 15) + 2
    logits = torch.full((1, classes), -torch.inf)
    logits[0, [5, classes - 1]] = torch.tensor([0.25, 0.75]).log()
    evidence = Evidence(1, classes)
    index, labels = torch.tensor([0]), torch.tensor([5])
    record_and_flush(evidence, index, logits, labels)
    torch.testing.assert_close(evidence.shares_of(index, labels), logits.exp(), rtol=1e-3, atol=0)


def test_of_many_classes_the_shares_stay_close_to_those_of_all(monkeypatch):
    samples, classes = 50, KEEP_ALL + 36
    labels = labels_of(samples, classes)
    centre = logits_of(0, samples, classes)
    few = Evidence(samples, classes)
    monkeypatch.setattr("fineprune.labels.evidence.KEEP_ALL", classes)
    every = Evidence(samples, classes)
    for epoch in range(1, 11):
        logits = epoch * centre / 4 + logits_of(epoch, samples, classes) / 3
        for evidence in (few, every):
            evidence.record(torch.arange(samples), logits, labels)
    found, right = shares_of(few), shares_of(every)
    own = right.gather(1, labels[:, None])
    torch.testing.assert_close(found.gather(1, labels[:, None]), own, rtol=0.01, atol=0)
    strongest = right.topk(5).indices
    torch.testing.assert_close(
        found.gather(1, strongest), right.gather(1, strongest), rtol=0.15, atol=1e-3
    )


def test_evidence_is_added():
    samples, classes = 30, 4
    labels = labels_of(samples, classes)
    parts = [Evidence(samples, classes) for _ in range(3)]
    whole = Evidence(samples, classes)
    for step in range(60):
        index = torch.randint(0, samples, (10,), generator=torch.Generator().manual_seed(step))
        logits = logits_of(step, 10, classes)
        whole.record(index, logits, labels[index])
        parts[step % 3].record(index, logits, labels[index])
    parts[0].add(parts[1])
    parts[0].add(parts[2])
    whole.flush()
    assert torch.equal(parts[0].visits, whole.visits)
    assert torch.equal(parts[0].labels, whole.labels)
    torch.testing.assert_close(parts[0].loss, whole.loss)
    torch.testing.assert_close(
        shares_of(parts[0]), shares_of(whole), rtol=8 * RELATIVE, atol=8 * ABSOLUTE
    )


def test_evidence_of_another_data_set_is_not_added():
    evidence = Evidence(4, 3)
    evidence.record(torch.arange(4), logits_of(0, 4, 3), labels_of(4, 3))
    with pytest.raises(InputError, match="4 samples and 3 classes, got 5 and 3"):
        evidence.add(Evidence(5, 3))
    other = Evidence(4, 3)
    other.record(torch.arange(4), logits_of(0, 4, 3), (labels_of(4, 3) + 1) % 3)
    with pytest.raises(InputError, match="got different ones for 4 samples"):
        evidence.add(other)


@pytest.mark.parametrize("classes", [3, KEEP_ALL + 40])
def test_a_restored_evidence_continues_bit_for_bit(classes, monkeypatch):
    monkeypatch.setattr("fineprune.labels.evidence._BLOCK", 50 * classes)
    samples = 20
    labels = labels_of(samples, classes)

    def record(evidence, steps):
        for step in steps:
            index = torch.randint(0, samples, (8,), generator=torch.Generator().manual_seed(step))
            evidence.record(index, logits_of(step, 8, classes), labels[index])

    undisturbed = Evidence(samples, classes)
    record(undisturbed, range(40))
    for stop in (0, 1, 5, 17, 40):
        saved = Evidence(samples, classes)
        record(saved, range(stop))
        state = saved.state_dict()
        record(saved, range(stop, 40))
        resumed = Evidence(samples, classes)
        resumed.load_state_dict(state)
        record(resumed, range(stop, 40))
        for evidence in (saved, resumed):
            ours, theirs = evidence.state_dict(), undisturbed.state_dict()
            assert ours["sums"].keys() == theirs["sums"].keys()
            for name, tensor in ours["sums"].items():
                assert torch.equal(tensor, theirs["sums"][name]), (stop, name)
