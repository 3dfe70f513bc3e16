"""Ctrl-C in the middle of bookkeeping: a notebook runs the cell again, and nothing is lost."""

import copy
import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import fineprune as fp
from fineprune.interrupts import uninterrupted
from fineprune.labels.evidence import Evidence
from fineprune.pruning import recorder
from fineprune.pruning.epoch import Epoch
from fineprune.pruning.loop_warnings import LoopWarnings

SAMPLES, CLASSES, EPOCHS = 256, 4, 10
RATES = [0.1] * 6 + [0.01] * 4


@pytest.fixture(autouse=True)
def keyboard_interrupts():
    """Let SIGINT raise KeyboardInterrupt, also in processes that a test runner has started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Cell:
    """A cell of a notebook, with the objects that an earlier cell made."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, 8, generator=generator)
        y = (x[:, :CLASSES].argmax(1) + (torch.rand(SAMPLES, generator=generator) < 0.3)) % CLASSES
        policy = fp.Adaptive(EPOCHS, 0.35, rates=RATES, first_epoch=2)
        self.pruner = fp.Pruner(TensorDataset(x, y), policy, batch_size=32)
        self.model = nn.Linear(8, CLASSES, bias=False)
        with torch.no_grad():
            self.model.weight.copy_(torch.randn(CLASSES, 8, generator=generator))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.trained: list[list[int]] = []
        self.stopped_at = 0

    def run(self):
        for _ in self.pruner.epochs():
            for index, (x, y) in self.pruner.loader():
                self.trained.append(index.tolist())
                logits = self.model(x)
                losses = functional.cross_entropy(logits, y, reduction="none")
                self.pruner.record(index, losses, logits, y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    def result(self):
        pruner = self.pruner
        return (
            self.trained,
            pruner.steps_done,
            repr(pruner),
            pruner.policy.state_dict()["chosen"].tolist(),
            pruner.watch.ranking().visits,
            pruner.watch.ranking().scores.tolist(),
        )


def interrupt_in(monkeypatch, owner, name, call):
    """Let the given call of a function be followed by Ctrl-C."""
    original, calls = getattr(owner, name), []

    def interrupted(*given, **named):
        result = original(*given, **named)
        calls.append(name)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, name, interrupted)
    return calls


@pytest.fixture(scope="module")
def undisturbed():
    """A cell that was never stopped."""
    cell = Cell()
    cell.run()
    return cell


def run_twice(monkeypatch, owner, name, call):
    """Return a cell that was stopped in a call and run again."""
    cell = Cell()
    with monkeypatch.context() as patched:
        calls = interrupt_in(patched, owner, name, call)
        with pytest.raises(KeyboardInterrupt):
            cell.run()
    assert len(calls) >= call
    cell.stopped_at = len(cell.trained)
    cell.run()
    return cell


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (recorder, "batch_sums", 5),
        (fp.Adaptive, "learn", 6),
        (LoopWarnings, "of_epoch", 6),
        (fp.Pruner, "_show", 8),
    ],
)
def test_a_cell_that_is_stopped_between_epochs_trains_the_same(
    undisturbed, monkeypatch, owner, name, call
):
    cell = run_twice(monkeypatch, owner, name, call)
    assert cell.result() == undisturbed.result()


@pytest.mark.parametrize(
    ("owner", "name", "call", "repeated"),
    [
        (Epoch, "check", 20, 1),
        (recorder.Recorder, "add", 20, 0),  # It has counted the batch.
        (Evidence, "_write", 4, 0),
    ],
)
def test_a_cell_that_is_stopped_in_record_loses_or_repeats_one_step_only(
    undisturbed, monkeypatch, owner, name, call, repeated
):
    cell = run_twice(monkeypatch, owner, name, call)
    at = cell.stopped_at
    assert cell.trained[:at] == undisturbed.trained[:at]
    assert cell.result()[1:3] == undisturbed.result()[1:3]
    assert len(cell.trained) == len(undisturbed.trained) + repeated
    if repeated:
        assert cell.trained[at] == cell.trained[at - 1]


def test_losses_that_a_state_waits_for_are_not_lost(monkeypatch):
    undisturbed, cell = Cell(), Cell()
    for one in (undisturbed, cell):
        for _ in one.pruner.epochs():
            for index, _ in one.pruner.loader():
                one.pruner.record(index, torch.arange(len(index)) / len(index))
            break
    with monkeypatch.context() as patched:
        interrupt_in(patched, recorder, "batch_sums", 1)
        with pytest.raises(KeyboardInterrupt):
            cell.pruner.state_dict()
    undisturbed.pruner.state_dict()
    for one in (undisturbed, cell):
        one.pruner.end_epoch()
    counts = [one.pruner.policy.state_dict()["lengths"] for one in (undisturbed, cell)]
    assert any(counts[0])
    assert counts[0] == counts[1]


def test_evidence_that_is_being_added_is_added_once(monkeypatch):
    monkeypatch.setattr("fineprune.labels.evidence._CHUNK", 40)  # Several parts, one by one.
    index, labels = torch.arange(64), torch.arange(64) % CLASSES
    watch, other = (fp.LabelWatch(64, CLASSES) for _ in range(2))
    for one in (watch, other):
        one.record(index, torch.randn(64, CLASSES), labels)
    whole = copy.deepcopy(watch)
    whole.merge(other)
    with monkeypatch.context() as patched:
        interrupt_in(patched, Evidence, "_write", 1)
        with pytest.raises(KeyboardInterrupt):
            watch.merge(other)
    assert torch.equal(watch.ranking().scores, whole.ranking().scores)


@pytest.mark.parametrize(("name", "call"), [("_add", 2), ("_write", 2)])
def test_a_watch_that_is_stopped_has_counted_the_batch(monkeypatch, name, call):
    index, labels = torch.arange(64), torch.arange(64) % CLASSES
    batches = torch.randn(200, 64, CLASSES)
    undisturbed, watch = (fp.LabelWatch(64, CLASSES) for _ in range(2))
    for logits in batches:
        undisturbed.record(index, logits, labels)
    interrupts = 0
    with monkeypatch.context() as patched:
        interrupt_in(patched, Evidence, name, call)
        for logits in batches:
            try:
                watch.record(index, logits, labels)
            except KeyboardInterrupt:
                interrupts += 1
    assert interrupts == 1
    assert torch.equal(watch.ranking().scores, undisturbed.ranking().scores)


def test_a_batch_without_memory_for_its_copy_does_not_count(monkeypatch):
    watch = fp.LabelWatch(64, CLASSES)
    index, labels = torch.arange(64), torch.arange(64) % CLASSES
    logits = torch.randn(64, 2 * CLASSES)[:, :CLASSES]  # A part of a larger tensor is copied.
    watch.record(index, logits, labels)
    with monkeypatch.context() as patched:

        def no_memory(self):
            raise torch.OutOfMemoryError("no memory for a copy")

        patched.setattr(torch.Tensor, "clone", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            watch.record(index, logits, labels)
    watch.record(index, logits, labels)
    assert len(watch.suspects()[0]) == 64
    assert watch.ranking().visits == 2


def test_a_signal_waits_for_the_outer_block_and_a_second_one_does_not():
    before = signal.getsignal(signal.SIGINT)
    done = []

    def interrupted(again):
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
            done.append(again)
            if again:
                signal.raise_signal(signal.SIGINT)
                done.append("never reached")

    for again in (False, True):
        with pytest.raises(KeyboardInterrupt):
            interrupted(again)
        assert signal.getsignal(signal.SIGINT) is before
    assert done == [False, True]


@pytest.fixture
def told():
    """The signals in the order in which handlers of the program were told of them."""
    numbers: list[int] = []

    def tell(number, frame):
        numbers.append(number)

    before = [signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)]
    yield numbers
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)


def test_signals_take_effect_in_their_order(told):
    with uninterrupted():
        signal.raise_signal(signal.SIGTERM)
        assert told == []
        signal.raise_signal(signal.SIGINT)
        assert told == [signal.SIGTERM, signal.SIGINT]


def test_a_handler_that_is_set_inside_of_the_block_stays(told):
    with uninterrupted():
        own = signal.signal(signal.SIGTERM, lambda number, frame: told.append(-number))
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert told == [-signal.SIGTERM] * 2
    signal.signal(signal.SIGTERM, own)


def test_a_signal_without_a_handler_is_left_alone():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with uninterrupted():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


def test_a_signal_that_comes_while_handlers_are_put_back_disables_nothing(told, monkeypatch):
    put_back = signal.signal

    def stopped(number, handler):
        raise KeyboardInterrupt

    def interrupted():
        with uninterrupted():
            monkeypatch.setattr(signal, "signal", stopped)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    monkeypatch.setattr(signal, "signal", put_back)
    signal.raise_signal(signal.SIGTERM)
    assert told == [signal.SIGTERM]
    with uninterrupted():
        signal.raise_signal(signal.SIGTERM)
        assert told == [signal.SIGTERM]
    assert told == [signal.SIGTERM] * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_process_that_is_forked_in_a_block_has_the_handlers_of_before():
    with uninterrupted():
        child = os.fork()
        if not child:
            handler = signal.getsignal(signal.SIGINT)
            os._exit(0 if handler is signal.default_int_handler else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_other_threads_have_nothing_to_hold_back():
    found = []

    def look():
        with uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
