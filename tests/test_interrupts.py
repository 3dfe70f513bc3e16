"""Ctrl-C in the middle of bookkeeping: a notebook runs the cell again, and nothing is lost."""

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
from fineprune.pruning.epoch_cycle import EpochCycle
from fineprune.pruning.loop_checks import LoopChecks

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
        policy = fp.Adaptive(EPOCHS, 0.35, rates=RATES, patience=2)
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
            pruner.summary()["epochs_done"],
            pruner.counts.tolist(),
            pruner.watch.passes,
            pruner.watch.scores().tolist(),
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


def run_twice(monkeypatch, owner, name, call):
    """Return an undisturbed cell, and one that was stopped in a call and run again."""
    undisturbed, cell = Cell(), Cell()
    undisturbed.run()
    with monkeypatch.context() as patched:
        calls = interrupt_in(patched, owner, name, call)
        with pytest.raises(KeyboardInterrupt):
            cell.run()
    assert len(calls) >= call
    cell.stopped_at = len(cell.trained)
    cell.run()
    return undisturbed, cell


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (recorder, "batch_sums", 5),
        (fp.Adaptive, "observe", 5),
        (fp.Adaptive, "end_epoch", 6),
        (LoopChecks, "end_epoch", 6),
        (EpochCycle, "_show", 8),
        (EpochCycle, "follow", 8),
    ],
)
def test_a_cell_that_is_stopped_between_epochs_trains_the_same(monkeypatch, owner, name, call):
    undisturbed, cell = run_twice(monkeypatch, owner, name, call)
    assert cell.result() == undisturbed.result()


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(EpochCycle, "add", 20), (LoopChecks, "see", 20)],
)
def test_a_cell_that_is_stopped_in_record_loses_one_step_only(monkeypatch, owner, name, call):
    undisturbed, cell = run_twice(monkeypatch, owner, name, call)
    at = cell.stopped_at
    assert cell.trained[:at] == undisturbed.trained[:at]
    assert cell.result()[1:3] == undisturbed.result()[1:3]
    assert cell.pruner.watch.passes == undisturbed.pruner.watch.passes
    assert list(map(len, cell.trained)) == list(map(len, undisturbed.trained))


@pytest.mark.parametrize(("name", "call"), [("_joined", 4), ("_add", 2), ("_write", 2)])
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
    assert torch.equal(watch.scores(), undisturbed.scores())


def test_a_batch_without_memory_for_its_copy_does_not_count(monkeypatch):
    watch = fp.LabelWatch(64, CLASSES)
    index, labels = torch.arange(64), torch.arange(64) % CLASSES
    logits = torch.randn(64, 2 * CLASSES)[:, :CLASSES]  # A part of a larger tensor is copied.
    watch.record(index, logits, labels)
    before = watch.passes
    with monkeypatch.context() as patched:

        def no_memory(self):
            raise torch.OutOfMemoryError("no memory for a copy")

        patched.setattr(torch.Tensor, "clone", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            watch.record(index, logits, labels)
    assert watch.passes == before
    watch.record(index, logits, labels)
    assert len(watch.suspects()[0]) == 64


def test_a_second_signal_takes_effect_at_once_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGINT)
    done = []

    def interrupted_twice():
        with uninterrupted(), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("one signal waits")
            signal.raise_signal(signal.SIGINT)
            done.append("never reached")

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert done == ["one signal waits"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_user_is_called_after_the_block():
    told = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            assert told == []
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


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
