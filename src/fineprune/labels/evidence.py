"""Evidence: what a training says about the label of each sample, as sums that can be added."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fineprune.errors import InputError
from fineprune.interrupts import uninterrupted
from fineprune.labels.batch import NO_LABEL, copy_of
from fineprune.labels.process_group import exchange_device

# With at most so many classes, the probabilities of all of them are kept, in two bytes each.
KEEP_ALL = 64

# With more, only those of the label and of so many others are, in two bytes, and in four.
STRONGEST = 16

# So many logits are buffered before they are added to the sums.
_BLOCK = 1 << 17

# At most so many batches are buffered, because a state with thousands of small tensors is slow.
_MOST_BATCHES = 128

# So many probabilities are read from the sums at once (4 MB).
_CHUNK = 1 << 20

# Rows of this many samples that all sum to 1, but for rounding in half precision, are no accident.
_ENOUGH_ROWS = 4
_ROUNDING = 0.02

# The tensors of an ``Evidence``.
_STORED = ("labels", "visits", "loss", "faults", "shares", "others")


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


class Evidence:
    """Sums over the visits of each sample: of its softmax, of its loss, and their number.

    So the order of the visits, and the rank, the worker or the training that recorded each, make no
    difference but for rounding: the sum of the softmax is stored as its mean in half precision (a
    relative error of at most 0.05 % down to 0.00006). Above ``KEEP_ALL`` classes, only the
    probabilities of the label and of the strongest others are; what is left is spread evenly.

    All tensors lie on the device of the logits. Batches are buffered, because an operation on a
    small tensor takes almost as long as one on a large tensor; adding them does not wait.

    Args:
        num_samples: Number of samples N.
        num_classes: Number of classes C.

    Attributes:
        labels: The label of each sample; int32, shape (N,). -1 for one that was never recorded.
        visits: The number of its visits; int32, shape (N,).
        loss: The sum of its cross-entropies in nats; float32, shape (N,).
        faults: How many records were out of range, had another label than before, or were not
            finite; int64, shape (3,).
        shares: The stored part of the mean of its softmax; float16, shape (N, C) or (N, 1 + k).
        others: Which classes these are, besides the label in the first column; shape (N, k). None
            if all classes are stored.
    """

    labels: Tensor
    visits: Tensor
    loss: Tensor
    faults: Tensor
    shares: Tensor
    others: Tensor | None

    def __init__(self, num_samples: int, num_classes: int) -> None:
        self.num_samples = num_samples
        self.num_classes = num_classes
        self._device = torch.device("cpu")
        self.clear()

    def clear(self) -> None:
        """Set the sums to zero and forget the labels."""
        number, device = self.num_samples, self._device
        few = self.num_classes <= KEEP_ALL
        columns = self.num_classes if few else STRONGEST + 1
        self.labels = torch.full((number,), -1, dtype=torch.int32, device=device)
        self.visits = torch.zeros(number, dtype=torch.int32, device=device)
        self.loss = torch.zeros(number, device=device)
        self.faults = torch.zeros(3, dtype=torch.int64, device=device)
        self.shares = torch.zeros(number, columns, dtype=torch.float16, device=device)
        self.others = None
        if not few:
            kind = torch.int16 if self.num_classes < 1 << 15 else torch.int32
            # The classes of a row must differ, because each is read into a column of its own.
            strongest = torch.arange(STRONGEST, dtype=kind, device=device)
            self.others = strongest.repeat(number, 1)
        self._begun = False
        self._empty_buffer()

    def _empty_buffer(self) -> None:
        # Copies of batches: samples (B,), logits (B, C) and labels (B,).
        self._buffer: list[tuple[Tensor, ...]] = []
        self._buffered = 0

    def record(self, index: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Copy a batch, as ``LabelWatch.record`` takes it, into the buffer; add a full buffer."""
        is_first = not self._begun
        self._to(logits.device)
        if is_first:
            _check_no_probabilities(logits)
        self._buffer.append((index.clone(), copy_of(logits), labels.clone()))
        self._buffered += logits.numel()
        self._begun = True
        if is_first:
            try:
                self.flush()
            except InputError:  # Nothing of it counts, so that it can be recorded again.
                self.clear()
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
        out_of_range, changed, _ = self.faults.tolist()
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

    def chunks(self) -> Iterator[Chunk]:
        """Yield the evidence on all samples, in their order. It must have been flushed."""
        rows = max(1, _CHUNK // self.num_classes)
        for index in torch.arange(self.num_samples, device=self._device).split(rows):
            labels = self.labels[index].long()
            yield Chunk(index, labels, self.shares_of(index, labels))

    def shares_of(self, index: Tensor, labels: Tensor) -> Tensor:
        """Return the mean softmax of some samples; float32, shape (n, C).

        The samples, and the labels that they were recorded with or -1, are int64, of shape (n,).
        """
        stored = self.shares.index_select(0, index).float()
        if self.others is None:
            return stored
        rest = (1 - stored.sum(1)).clamp_(min=0) / (self.num_classes - stored.shape[1])
        rows = rest[:, None].repeat(1, self.num_classes)
        rows.scatter_(1, self.others.index_select(0, index).long(), stored[:, 1:])
        return rows.scatter_(1, labels.clamp(min=0)[:, None], stored[:, :1])

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
        _check_equal(both & (self.labels != theirs))
        labels = torch.maximum(self.labels, theirs)
        for part in other.chunks():
            index = part.index.to(self._device)
            sums = [of.to(self._device) for of in other._sums(part.index, part.labels)]
            self._add_sums(index, self.labels[index].long(), labels[index].long(), sums)
        self.labels = labels
        self._begun |= other._begun
        self.faults += other.faults.to(self._device)

    def add_over_ranks(self, group: Any) -> None:
        """Add the sums of all ranks of a group, or of the world, which then all have the result.

        This is collective: each rank exchanges four bytes per class and sample.
        """
        device = exchange_device(group)
        if device is not None:
            self._to(device)
        self._add_buffer(check=False)
        dist.all_reduce(self.faults, group=group)
        self.check()
        labels = self.labels.clone()
        dist.all_reduce(labels, op=dist.ReduceOp.MAX, group=group)
        different = ((self.labels >= 0) & (self.labels != labels)).sum()
        dist.all_reduce(different, group=group)
        _check_equal(different)
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
        buffer = [tuple(map(torch.clone, parts)) for parts in zip(*state["buffer"], strict=True)]
        self._begun = state["begun"]
        for name, tensor in stored.items():
            tensor.copy_(state["sums"][name])
        self._buffer = buffer
        self._buffered = sum(logits.numel() for _, logits, _ in buffer)

    def _stored(self) -> dict[str, Tensor]:
        tensors = {name: getattr(self, name) for name in _STORED}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def _to(self, device: torch.device) -> None:
        """Move all tensors to a device."""
        if device != self._device:
            self._device = device
            for name, tensor in self._stored().items():
                setattr(self, name, tensor.to(device))

    @uninterrupted()
    def _add_buffer(self, *, check: bool = True) -> None:
        """Add the buffer to the sums. On a CPU, the records are checked unless told otherwise."""
        if not self._buffer:
            return
        index, logits, labels = (
            torch.cat([part.to(self._device, non_blocking=True) for part in parts])
            for parts in zip(*self._buffer, strict=True)
        )
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
        self.faults += torch.stack([~known & ~unlabelled, known & changed, known & ~finite]).sum(1)
        softmax = logs.exp_().mul_(usable).nan_to_num_(0.0).t().contiguous()
        visits = [usable.int(), softmax, torch.where(usable, -own, 0)]
        self._add_sums(index, labels, labels, self._of_samples(index, visits))

    def _of_samples(self, index: Tensor, visits: list[Tensor]) -> list[Tensor]:
        """Give each visit the sum over all visits of its sample.

        So it does not matter which of the equal rows of a sample is written last.
        """
        numbers = torch.arange(len(index), dtype=torch.int32, device=self._device)
        place = torch.empty(self.num_samples, dtype=torch.int32, device=self._device)
        place[index] = numbers  # With torch 2.6, MPS has no ``index_copy_``.
        place = place.index_select(0, index)
        if self._device.type == "cpu" and torch.equal(place, numbers):
            return visits  # Each sample occurs once, which is known here without waiting.
        return [
            torch.zeros_like(part).index_add_(0, place, part).index_select(0, place)
            for part in visits
        ]

    def _sums(self, index: Tensor, labels: Tensor) -> list[Tensor]:
        """Return the visits, the softmax and the loss of samples recorded with these labels."""
        visits = self.visits.index_select(0, index)
        shares = self.shares_of(index, labels) * visits[:, None]
        return [visits, shares, self.loss.index_select(0, index)]

    def _add_sums(
        self, index: Tensor, before: Tensor, labels: Tensor, sums: Sequence[Tensor]
    ) -> None:
        """Add to the sums of samples, whose labels may have been unknown (-1) before."""
        own = self._sums(index, before)
        self._write(index, labels, [one + other for one, other in zip(own, sums, strict=True)])

    def _write(self, index: Tensor, labels: Tensor, sums: Sequence[Tensor]) -> None:
        """Replace the sums of some samples. If one occurs twice, both must have the same sums."""
        visits, shares, loss = sums
        self.visits[index] = visits
        self.loss[index] = loss
        rows = shares / visits.clamp(min=1)[:, None]
        if self.others is None:
            self.shares[index] = rows.half()
            return
        column = labels.clamp(min=0)[:, None]
        own = rows.gather(1, column)
        strongest, others = rows.scatter_(1, column, -1.0).topk(self.others.shape[1], dim=1)
        self.shares[index] = torch.cat([own, strongest], 1).half()
        self.others[index] = others.to(self.others.dtype)


def _check_equal(different: Tensor) -> None:
    """Raise InputError unless no sample has another label; bool, shape (N,), or their number."""
    if number := int(different.sum()):
        raise InputError(
            f"expected the same labels in all parts, got different ones for {number} samples: "
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
