"""Evidence: what a training says about the label of each sample, as sums that can be added."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fineprune.errors import InputError
from fineprune.interrupts import uninterrupted
from fineprune.labels.batch import NO_LABEL, copy_of
from fineprune.labels.class_shares import ClassShares
from fineprune.labels.process_group import exchange_device

# So many logits are buffered before they are added to the sums.
_BLOCK = 1 << 17

# At most so many batches are buffered, because a state with thousands of small tensors is slow.
_MOST_BATCHES = 128

# So many probabilities are read from the sums at once (4 MB).
_CHUNK = 1 << 20

# Rows of this many samples that all sum to 1, but for rounding in half precision, are no accident.
_ENOUGH_ROWS = 4
_ROUNDING = 0.02


@dataclass(frozen=True, eq=False)
class Chunk:
    """The evidence on some consecutive samples.

    Attributes:
        index: The samples; int64, shape (n,).
        labels: Their labels; int64, shape (n,). -1 for a sample that was never recorded.
        shares: The mean softmax of each sample; float32, shape (n, C).
    """

    index: Tensor
    labels: Tensor
    shares: Tensor


class _Sums(NamedTuple):
    """Sums over visits, of n samples: their number, the softmax and the loss."""

    visits: Tensor
    shares: Tensor
    loss: Tensor

    def plus(self, other: "_Sums") -> "_Sums":
        return _Sums(*(a + b.to(a.device) for a, b in zip(self, other, strict=True)))


class _Batch(NamedTuple):
    """A copy of a batch in the buffer: samples (B,), logits (B, C), labels (B,)."""

    samples: Tensor
    logits: Tensor
    labels: Tensor


class Evidence:
    """Sums over the visits of each sample: of its softmax, of its loss, and their number.

    Evidences are added by adding these sums, so the order of the visits, and the rank, the worker
    or the training that recorded each, make no difference but for the rounding: the sum of the
    softmax is stored as the mean in half precision, which the number of visits turns into the sum.

    All tensors lie on the device of the first recorded logits. Recording copies a batch into a
    buffer, and a full buffer is added to the sums by operations that do not wait for the device,
    because an operation on a small tensor takes almost as long as one on a large tensor.

    Args:
        num_samples: Number of samples N.
        num_classes: Number of classes C.
        strongest: How many classes besides the label are stored; None for all.

    Attributes:
        labels: The label of each sample; int32, shape (N,). -1 for one that was never recorded.
        visits: The number of its visits; int32, shape (N,).
        loss: The sum of its cross-entropies in nats; float32, shape (N,).
        shares: The mean of its softmax.
    """

    def __init__(self, num_samples: int, num_classes: int, strongest: int | None) -> None:
        self.num_samples = num_samples
        self.num_classes = num_classes
        self._strongest = strongest
        self._device = torch.device("cpu")
        self._begun = self._located = False
        self.clear()

    def clear(self) -> None:
        """Set the sums to zero and forget the labels."""

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self._device)

        number = self.num_samples
        self.labels = zeros(number, torch.int32).fill_(-1)
        self.visits = zeros(number, torch.int32)
        self.loss = zeros(number, torch.float32)
        self.shares = ClassShares(number, self.num_classes, self._strongest, self._device)
        # How many records were out of range, had another label than before, or were not finite.
        self._faults = zeros(3, torch.int64)
        self._empty_buffer()

    def _empty_buffer(self) -> None:
        self._buffer: list[_Batch] = []
        self._buffered = 0

    def record(self, index: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Copy one batch into the buffer, and add the buffer to the sums if it is full.

        The first batch is checked at once. On a GPU, errors in later batches are found when the
        evidence is used.

        Args:
            index: The samples; integers, shape (B,).
            logits: Their logits, without a gradient; floating point, shape (B, C).
            labels: Their labels; integers, shape (B,).
        """
        is_first = not self._begun
        if not self._located:  # Restored evidence lies on the CPU at first.
            self._to(logits.device)
            self._located = True
        if is_first:
            _check_no_probabilities(logits)
        self._buffer.append(_Batch(index.clone(), copy_of(logits), labels.clone()))
        self._buffered += logits.numel()
        self._begun = True
        if is_first:
            try:
                self.flush()
            except InputError:  # Nothing of it counts, so that it can be recorded again.
                self.clear()
                self._begun = False
                raise
        elif self._buffered >= _BLOCK or len(self._buffer) >= _MOST_BATCHES:
            self._add_buffer()

    def flush(self) -> None:
        """Add everything that was recorded to the sums, and check it."""
        self._add_buffer()
        # Nothing is known of a sample all of whose losses were NaN or infinite.
        self.labels.masked_fill_(self.visits == 0, -1)
        self.check()

    def check(self) -> None:
        """Raise InputError if something wrong was recorded. This waits for the device."""
        out_of_range, changed, _ = self._faults.tolist()
        if out_of_range:
            raise InputError(
                f"expected indices in 0..{self.num_samples - 1} and labels in "
                f"0..{self.num_classes - 1}, got {out_of_range} records out of range: give "
                f"LabelWatch the numbers of samples and classes of the data set, and label samples "
                f"without a label as {NO_LABEL}"
            )
        if changed:
            raise InputError(
                f"expected the same label for a sample each time, got {changed} records of samples "
                f"with two labels: give record the indices that belong to the labels and no "
                f"validation batches, and start a new LabelWatch when labels are corrected"
            )

    @property
    def nonfinite(self) -> int:
        """The number of records whose loss was NaN or infinite. They were left out."""
        return int(self._faults[2])

    def chunks(self) -> Iterator[Chunk]:
        """Yield the evidence on all samples, in their order. It must have been flushed."""
        rows = max(1, _CHUNK // self.num_classes)
        for start in range(0, self.num_samples, rows):
            stop = min(start + rows, self.num_samples)
            index = torch.arange(start, stop, device=self._device)
            labels = self.labels[start:stop].long()
            yield Chunk(index, labels, self.shares.read(index, labels.clamp(min=0)))

    def on_cpu(self) -> "Evidence":
        """Return a copy on the CPU."""
        made = copy.deepcopy(self)
        made._to(torch.device("cpu"))
        return made

    @uninterrupted()
    def add(self, other: "Evidence") -> None:
        """Add the sums of another evidence on the same samples."""
        sizes = [(one.num_samples, one.num_classes) for one in (self, other)]
        if sizes[0] != sizes[1]:
            raise InputError(
                "expected evidence on {} samples and {} classes, got {} and {}: merge the evidence "
                "of trainings on the same data set".format(*sizes[0], *sizes[1])
            )
        self.flush()
        other.flush()
        theirs = other.labels.to(self._device)
        both = (self.labels >= 0) & (theirs >= 0)
        _check_equal(int((both & (self.labels != theirs)).sum()))
        labels = torch.maximum(self.labels, theirs)
        for part in other.chunks():
            index = part.index.to(self._device)
            sums = self._sums(index, self.labels[index].long())
            sums = sums.plus(other._sums(part.index, part.labels))
            self._write(index, labels[index].long(), sums)
        self.labels = labels
        self._begun |= other._begun
        self._faults += other._faults.to(self._device)

    def add_over_ranks(self, group: Any) -> None:
        """Add the sums of all ranks, which then all have the result. This is collective.

        Args:
            group: A ``torch.distributed`` group; None for the world. Each rank exchanges four bytes
                per class and sample.
        """
        device = exchange_device(group)
        if device is not None:
            self._to(device)
        self._add_buffer(check=False)
        dist.all_reduce(self._faults, group=group)
        self.check()
        labels = self.labels.clone()
        dist.all_reduce(labels, op=dist.ReduceOp.MAX, group=group)
        different = ((self.labels >= 0) & (self.labels != labels)).sum()
        dist.all_reduce(different, group=group)
        _check_equal(int(different))
        for part in self.chunks():
            sums = self._sums(part.index, part.labels)
            for tensor in sums:
                dist.all_reduce(tensor, group=group)
            self._write(part.index, labels[part.index].long(), sums)
        self.labels = labels

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the sums and of the buffer, on the CPU."""
        return {
            "begun": self._begun,
            "sums": {name: tensor.to("cpu", copy=True) for name, tensor in self._stored().items()},
            "buffer": [
                [part.to("cpu", copy=True) for part in parts]
                for parts in zip(*self._buffer, strict=True)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned for evidence of the same size."""
        stored = self._stored()
        form = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}
        given = {name: (tensor.shape, tensor.dtype) for name, tensor in state["sums"].items()}
        if form != given:
            raise InputError(
                "expected the tensors of a LabelWatch of this version, got others: load the state "
                "with the version that saved it"
            )
        buffer = [
            _Batch(*(part.clone() for part in parts))
            for parts in zip(*state["buffer"], strict=True)
        ]
        self._begun = state["begun"]
        for name, tensor in stored.items():
            tensor.copy_(state["sums"][name])
        self._buffer = buffer
        self._buffered = sum(batch.logits.numel() for batch in buffer)

    def _stored(self) -> dict[str, Tensor]:
        sums = {
            "labels": self.labels,
            "visits": self.visits,
            "loss": self.loss,
            "faults": self._faults,
            "shares": self.shares.shares,
        }
        return sums if self.shares.others is None else {**sums, "others": self.shares.others}

    @uninterrupted()
    def _add_buffer(self, *, check: bool = True) -> None:
        """Add the buffer to the sums. On a CPU, the records are checked unless told otherwise."""
        if not self._buffer:
            return
        index, logits, labels = map(self._joined, zip(*self._buffer, strict=True))
        self._empty_buffer()
        self._add(index.long(), logits.float(), labels.long())
        if check and self._device.type == "cpu":
            self.check()

    def _add(self, index: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add visits, in which a sample may occur several times, without waiting for the device."""
        in_range = (index >= 0) & (index < self.num_samples)
        known = in_range & (labels >= 0) & (labels < self.num_classes)
        unlabelled = in_range & (labels == NO_LABEL)
        index = index.clamp(0, self.num_samples - 1)
        before = self.labels.index_select(0, index)
        given = torch.where(known, labels, -1).int()
        # Of several records of a sample, some may have no label.
        self.labels.scatter_reduce_(0, index, given, "amax")
        now = self.labels.index_select(0, index)
        # The second comparison finds two labels of one sample among these visits.
        changed = ((before >= 0) & (before != given)) | (now != given)
        labels = now.long().clamp(min=0)
        # On a CPU, a softmax over rows of few classes takes ten times as long as over columns.
        logs = logits.t().contiguous().log_softmax(0)
        own = logs.gather(0, labels[None])[0]
        finite = own.isfinite()
        usable = known & finite
        self._faults += torch.stack([~known & ~unlabelled, known & changed, known & ~finite]).sum(1)
        new = _Sums(
            usable.int(),
            logs.exp_().mul_(usable).nan_to_num_(0.0).t().contiguous(),
            torch.where(usable, -own, 0),
        )
        self._write(index, labels, self._sums(index, labels).plus(self._of_samples(index, new)))

    def _of_samples(self, index: Tensor, visits: _Sums) -> _Sums:
        """Give each visit the sum over all visits of its sample.

        So it does not matter which of the equal rows of a sample is written last.
        """
        numbers = torch.arange(len(index), dtype=torch.int32, device=self._device)
        place = torch.empty(self.num_samples, dtype=torch.int32, device=self._device)
        place[index] = numbers  # With torch 2.6, MPS has no ``index_copy_``.
        place = place.index_select(0, index)
        if self._device.type == "cpu" and torch.equal(place, numbers):
            return visits  # Each sample occurs once, which is known here without waiting.
        return _Sums(
            *(
                torch.zeros_like(part).index_add_(0, place, part).index_select(0, place)
                for part in visits
            )
        )

    def _sums(self, index: Tensor, labels: Tensor) -> _Sums:
        """Return the sums of some samples with these labels; int64, -1 if unknown."""
        visits = self.visits.index_select(0, index)
        return _Sums(
            visits,
            self.shares.read(index, labels.clamp(min=0)) * visits[:, None],
            self.loss.index_select(0, index),
        )

    def _write(self, index: Tensor, labels: Tensor, sums: _Sums) -> None:
        """Replace the sums of some samples. If one occurs twice, both must have the same sums."""
        self.visits[index] = sums.visits
        self.loss[index] = sums.loss
        means = sums.shares / sums.visits.clamp(min=1)[:, None]
        self.shares.write(index, labels.clamp(min=0), means)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.to(self._device, non_blocking=True) for part in parts])

    def _to(self, device: torch.device) -> None:
        """Move all tensors to a device."""
        self._device = device
        self.labels, self.visits = self.labels.to(device), self.visits.to(device)
        self.loss, self._faults = self.loss.to(device), self._faults.to(device)
        self.shares.to(device)


def _check_equal(different: int) -> None:
    """Raise InputError unless the number of samples with different labels is 0."""
    if different:
        raise InputError(
            f"expected the same labels in all parts, got different ones for {different} samples: "
            f"merge the evidence of trainings on the same samples, with the same indices and "
            f"labels on every rank"
        )


def _check_no_probabilities(logits: Tensor) -> None:
    """Raise InputError if the rows are probabilities, whose softmax would be almost flat."""
    rows = logits.float()
    sums_to_one = ((rows.sum(1) - 1).abs() < _ROUNDING) & (rows >= 0).all(1)
    if len(rows) >= _ENOUGH_ROWS and bool(sums_to_one.all()):
        raise InputError(
            "expected logits, got probabilities, since each row sums to 1: give record the output "
            "of the network before the softmax, or the logarithm of the probabilities"
        )
