"""LabelWatch: records what a training says about its labels, and changes nothing."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from fineprune.errors import InputError, check_whole_number, explaining, warn_user
from fineprune.interrupts import uninterrupted
from fineprune.labels.batch import (
    as_local,
    as_numbers,
    check_classified,
    check_not_recomputed,
)
from fineprune.labels.dataset_attributes import same_random_numbers
from fineprune.labels.dataset_samples import DatasetItems, Names, class_names, dataset_samples
from fineprune.labels.evidence import Evidence
from fineprune.labels.facts import facts_of
from fineprune.labels.process_group import exchange_device, rank_and_size
from fineprune.labels.ranking import Ranking, rank
from fineprune.labels.review_page import review_document, review_section, write_page
from fineprune.labels.untraced import Untraced

STATE_VERSION = 2


class LabelWatch(Untraced):
    """Watches any training of a classifier, and finds the labels that are probably wrong::

        watch = fp.LabelWatch(len(train_set), num_classes)
        for epoch in range(epochs):
            for index, (x, y) in loader:  # any loader over fp.Indexed(train_set)
                logits = model(x)
                F.cross_entropy(logits, y).backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.record(index, logits, y)
        indices, scores, suggestions = watch.suspects()

    Nothing is skipped, and the weights are bit for bit those of a training without the watch.
    ``Evidence`` says what is kept, and ``ranking.py`` by which rule suspects are found. Each of
    several ranks records its own batches, and ``merge`` adds the evidence of all.

    The watch takes 12 bytes per sample and two more per class; with more than 64 classes, 78 bytes
    per sample (110 with more than 32,767 classes), on the device of the logits. There, ranking
    takes another 12 bytes per pair of classes and about 60 per sample.

    Args:
        num_samples: Number of samples N in the data set; indices are 0..N - 1.
        num_classes: Number of classes C; labels are 0..C - 1.
        process_group: The ``torch.distributed`` group whose ranks share the samples. By default,
            ``torch.distributed.group.WORLD``.

    Attributes:
        num_samples, num_classes: N and C.

    Raises:
        InputError: ``num_samples`` is below 1 or ``num_classes`` below 2.
    """

    of_pruner = False  # Whether a pruner records it.

    def __init__(self, num_samples: int, num_classes: int, *, process_group: Any = None) -> None:
        check_whole_number("num_samples", num_samples, 1)
        check_whole_number("num_classes", num_classes, 2)
        super().__init__()
        self.num_samples, self.num_classes = num_samples, num_classes
        self._evidence = Evidence(num_samples, num_classes)
        self._group = process_group
        self._place: tuple[int, int] | None = None  # This rank and their number, once known.
        # Whether this is the evidence of all ranks. It then belongs to rank 0, and the other ranks
        # have a copy, which they give up when they record again.
        self._merged = False

    def record(self, index: Any, logits: Tensor, labels: Any) -> None:
        """Record a batch of the training.

        Everything is copied. Only the first call waits for the device, to check its batch. Errors
        in later batches are raised some batches later or, on a GPU, when the evidence is used.
        Records whose loss is NaN or infinite are left out.

        Args:
            index: The indices of the samples; integers, shape (B,).
            logits: The output of the network for them, before a softmax, and without the margin of
                losses such as CosFace and ArcFace; floating point, shape (B, C).
            labels: Their labels, the same in each epoch; integers, shape (B,). Records with the
                label -100, which torch's losses ignore, are left out.

        Raises:
            InputError: A shape or a type is wrong, the logits are probabilities, an index or a
                label is out of range, or the label of a sample has changed; a pruner records into
                this watch; or this is called in a backward pass, as by ``torch.utils.checkpoint``.
            RuntimeError: A launcher has set ``WORLD_SIZE`` above 1, but no group is initialised.
        """
        if self.of_pruner:
            raise InputError(
                "expected each batch once, got a record of the watch of a pruner: give the logits "
                "and the labels to pruner.record() alone, or make a LabelWatch of your own"
            )
        self.record_for_pruner(index, logits, labels)

    def record_for_pruner(self, index: Any, logits: Tensor, labels: Any) -> None:
        """Do what ``record`` does, for the pruner that this watch belongs to."""
        if not isinstance(logits, Tensor):
            raise InputError(
                f"expected logits as a torch.Tensor, got {type(logits).__name__}: call "
                f"record(index, logits, labels) with the output of the network"
            )
        logits = as_local("logits", logits)
        index, labels = as_numbers("indices", index), as_numbers("labels", labels)
        if torch.compiler.is_compiling():
            self._record_untraced(self, index, logits.detach(), labels)
        else:  # Outside a compiled step, the call above takes longer.
            check_not_recomputed()
            self._record(index, logits.detach(), labels)

    def _record(self, index: Tensor, logits: Tensor, labels: Tensor) -> None:
        check_classified(index, logits, labels, self.num_classes)
        rank, _ = self._rank_and_ranks()
        if self._merged:
            self._merged = False
            if rank:
                self._evidence.clear()
        self._evidence.record(index, logits, labels)

    def suspects(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all samples, the most suspicious first.

        Returns:
            The indices of the samples, int64; their scores, float32; and suggestions, int64: the
            class that contradicts each label most. All have the shape (N,) and are on the CPU.
            Suspects are those with a score above 0; their number is the estimated number of wrong
            labels. Samples that were never recorded come last, with -inf and -1.

        Raises:
            InputError: Nothing was recorded, something wrong was recorded, or the evidence of the
                ranks has not been merged.
        """
        return self.ranking().suspects()

    def ranking(self) -> Ranking:
        """Return the scores and suggestions in the order of the samples, and what follows of them.

        Raises:
            InputError: As for ``suspects``.
        """
        return rank(self.evidence())

    def ranking_so_far(self) -> Ranking | None:
        """Return ``ranking`` in the middle of a training; None if nothing finite was recorded.

        With several ranks, it covers all ranks only right after ``merge``.
        """
        self._evidence.flush()
        return rank(self._evidence) if self._evidence.visits.any() else None

    def evidence(self) -> Evidence:
        """Return the sums, after checking that they are those of all ranks, and right.

        Raises:
            InputError: As for ``suspects``.
        """
        evidence = self._evidence
        if not self.is_complete:
            raise InputError(
                f"expected the evidence of all {self._rank_and_ranks()[1]} ranks, got that of one: "
                f"call merge() on every rank first"
            )
        evidence.flush()
        nonfinite = int(evidence.faults[2])
        if not evidence.visits.any():
            found = "no record: call record(index, logits, labels) in each step"
            if nonfinite:
                found = f"{nonfinite} records, whose losses are all NaN or infinite"
            raise InputError(f"expected a recorded training, got {found}")
        if nonfinite:
            warn_user(f"{nonfinite} records with a NaN or infinite loss were left out")
        return evidence

    def without_suspects(self) -> list[int]:
        """Return the samples that are no suspects, for a second training without the others::

            clean = torch.utils.data.Subset(train_set, watch.without_suspects())

        Returns:
            Indices in ascending order. A sample that was never recorded is no suspect.

        Raises:
            InputError: As for ``suspects``, or all samples are suspects.
        """
        left = (self.ranking().scores <= 0).nonzero()[:, 0].tolist()
        if not left:
            raise InputError(
                f"expected samples without suspicion, got {self.num_samples} suspects: watch a "
                f"longer training"
            )
        return left

    def facts(self, names: Names | None = None) -> list[str]:
        """Say how many labels contradict what was learned, how much was learned, and what was not.

        Args:
            names: The name of each class. By default, its number.

        Raises:
            InputError: As for ``suspects``, or there are fewer or more names than classes.
        """
        return facts_of(self.ranking(), class_names(names, self.num_classes))

    def page(
        self,
        path: str | os.PathLike[str],
        dataset: Any = None,
        *,
        names: Names | None = None,
        keys: Any = None,
        show: Callable[[Any], Any] | None = None,
        most: int | None = None,
    ) -> None:
        """Write a page on which a person reviews the suspects, as one HTML file.

        The page loads nothing, and can be read without JavaScript. With it, keys accept a
        suggestion, keep a label or drop a sample, and a button writes ``labels.csv``, a table of
        all samples with the columns ``key``, ``index`` and ``label``, where the label ``drop``
        leaves a sample out, as one whose label is not known.

        Args:
            path: The HTML file to write. An existing file is replaced.
            dataset: The data set whose samples are shown: ``dataset[index]`` for each suspect. None
                to show none.
            names: The name of each class, as a sequence or a dict by class number. By default,
                those of the data set (``class_to_idx``, ``classes``, or Hugging Face's column
                ``label``), or else the class numbers.
            keys: A name for each sample, such as its path; shape (N,): a list, an array or a column
                of pandas, in its order. By default, the attribute ``keys`` of the data set or the
                paths of torchvision's ``ImageFolder``, or else the indices.
            show: Turns ``dataset[index]`` into an image (a Pillow image, a tensor or an array) or a
                text. By default, the first part of the item is shown.
            most: How many samples to list. By default, all suspects, at most 500.

        Raises:
            InputError: As for ``suspects``; there are fewer or more names than classes; the number
                of keys, or of samples in the data set, is not N; two samples have the same key; or
                the data set contradicts itself about its labels.
        """
        if most is not None:
            most = check_whole_number("most", most, 0)
        ranking = self.ranking()
        recorded = ranking.labels.cpu().numpy()
        items = None if dataset is None else DatasetItems(dataset, recorded, show)
        samples = dataset_samples(recorded, self.num_classes, dataset, names, keys, items)
        with same_random_numbers():  # A page may be written in the middle of a training.
            section = review_section(self._evidence, ranking, samples, most)
        if items is not None:
            items.warn()
        write_page(Path(path), review_document(section))

    def to_cleanlab(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the arguments ``labels`` and ``pred_probs`` of cleanlab's functions.

        The probabilities are **in-sample**, means over the training; cleanlab's documentation asks
        for out-of-sample ones, which take several trainings.

        Returns:
            The labels, int64, shape (N,), and the mean softmax of each sample, float32, shape
            (N, C), whose rows sum to one. This takes about 10 bytes per class and sample.

        Raises:
            InputError: As for ``suspects``, or a sample was never recorded.
        """
        evidence = self.evidence()
        missing = int((evidence.labels < 0).sum())
        if missing:
            raise InputError(
                f"expected evidence on all {self.num_samples} samples, got none on {missing}: "
                f"cleanlab needs probabilities for every sample, so train one epoch on all of them "
                f"or, if some have no label, number only the labelled ones"
            )
        parts = []
        for chunk in evidence.chunks():  # One at a time, since float64 takes twice the memory.
            part = chunk.shares.cpu().double()
            parts.append((part / part.sum(1, keepdim=True)).float())
        return evidence.labels.cpu().long().numpy(), torch.cat(parts).numpy()

    @property
    def is_complete(self) -> bool:
        """Whether this is the evidence of all ranks, so that any rank may save it."""
        return self._merged or self._rank_and_ranks()[1] == 1

    def merge(self, other: "LabelWatch | None" = None) -> None:
        """Add the evidence of another watch, or of all ranks, to this one.

        Without ``other``, all ranks must call this, and each then has the evidence of all. If
        recording goes on, this may be repeated, and nothing is counted twice. A single process has
        nothing to merge.

        Args:
            other: The watch of another training on the same labels, for example with another seed.

        Raises:
            InputError: The number of samples, the number of classes or the labels differ; something
                wrong was recorded; or the ranks of one of two watches have not been merged.
        """
        if other is None:
            if self._rank_and_ranks()[1] > 1:
                self._merge_ranks()
        elif self.is_complete and other.is_complete:
            self._evidence.add(other._evidence)
        else:
            raise InputError(
                "expected merged ranks before the evidence of another training is added, got ranks "
                "with evidence of their own: call merge() of both watches on every rank first, or "
                "a training counts once per rank"
            )

    @uninterrupted()
    def _merge_ranks(self) -> None:
        device = exchange_device(self._group) or "cpu"
        sizes = [self.num_samples, self.num_classes]
        least = torch.tensor([int(self._merged), *sizes, *(-n for n in sizes)], device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        merged, *fewest, most_samples, most_classes = least.abs().tolist()
        names, most = ("num_samples", "num_classes"), (most_samples, most_classes)
        for name, low, high in zip(names, fewest, most, strict=True):
            if low != high:
                raise InputError(
                    f"expected the same {name} on every rank, got {low} to {high}: make the "
                    f"LabelWatch for the whole data set on every rank, not for a part of it"
                )
        if merged:
            return
        if self._merged and self._rank_and_ranks()[0]:  # What this rank has belongs to rank 0.
            self._evidence.clear()
        self._merged = False
        self._evidence.add_over_ranks(self._group)
        self._merged = True

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence as tensors, numbers and lists, which ``torch.save`` can write.

        This does not communicate. With several ranks, either call ``merge`` on every rank, save the
        state of rank 0 and load it on every rank; or save the state of each rank and load it on the
        same rank.
        """
        rank, ranks = self._rank_and_ranks()
        return {
            **self._form(),
            "rank": 0 if self._merged else rank,
            "ranks": 1 if self._merged else ranks,
            "evidence": self._evidence.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which replaces what was recorded so far.

        If the same batches follow, the evidence is bit for bit that of an uninterrupted training.

        Raises:
            InputError: The state does not come from ``state_dict``, has another number of samples
                or classes, or belongs to another rank.
        """
        expected, rank_and_ranks = self._form(), self._rank_and_ranks()
        given = {name: state.get(name) for name in expected} if isinstance(state, Mapping) else {}
        if given != expected:
            raise InputError(
                f"expected the state of a LabelWatch with {expected}, got {given or type(state)}: "
                f"load what state_dict() returned into a LabelWatch with the same numbers"
            )
        advice = ": load a whole state, as its state_dict() returned it"
        with explaining("expected the state of a LabelWatch, got a part", KeyError, advice):
            saved = state["rank"], state["ranks"]
            if saved not in ((0, 1), rank_and_ranks):
                raise InputError(
                    f"expected a state with the evidence of all ranks, got that of rank {saved[0]} "
                    f"of {saved[1]}: call merge() on every rank before state_dict(), or load each "
                    f"rank's own state"
                )
            self._evidence.load_state_dict(state["evidence"])
        self._merged = saved == (0, 1) and rank_and_ranks[1] > 1

    def _form(self) -> dict[str, int]:
        sizes = {"num_samples": self.num_samples, "num_classes": self.num_classes}
        return {"version": STATE_VERSION, **sizes}

    def _rank_and_ranks(self) -> tuple[int, int]:
        """Return the rank of this process, and the number of ranks that share the samples."""
        if self._place is None:
            self._place = rank_and_size(self._group, "the first record")
        return self._place
