"""LabelWatch: records what a training says about its labels, and changes nothing."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
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
from fineprune.labels.class_shares import KEEP_ALL, STRONGEST
from fineprune.labels.dataset_attributes import (
    as_keys,
    classes_of,
    completed_labels,
    keys_of,
    same_random_numbers,
    unambiguous,
)
from fineprune.labels.dataset_items import DatasetItems
from fineprune.labels.evidence import Evidence
from fineprune.labels.facts import facts_of
from fineprune.labels.process_group import exchange_device, rank_and_size
from fineprune.labels.ranking import Ranking, rank
from fineprune.labels.review_page import Samples, review_document, review_section, write_page
from fineprune.labels.untraced import Untraced

STATE_VERSION = 2

# The names of the classes, in their order or by their numbers.
Names = Sequence[Any] | Mapping[Any, str]


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

    Nothing is skipped, and the weights of the network are bit for bit those of a training without
    the watch.

    The evidence on a sample is a sum over its visits: of its softmax, of its loss, and their number
    (``Evidence``). ``ranking.py`` states the one rule that makes suspects of it. The watch does not
    need to know where epochs begin, and a skipped sample keeps its evidence. A training that
    resumes from ``state_dict`` continues where it stopped. With several ranks, each rank records
    its own batches, and ``merge`` adds the evidence of all; it also adds that of other trainings on
    the same labels.

    The watch takes 12 bytes per sample and two more per class. With more than 64 classes, it stores
    only the probabilities of the label and of the 16 strongest other classes, in 78 bytes per
    sample (110 with more than 32,767 classes). This memory is on the device of the logits. There,
    ranking takes another 12 bytes per pair of classes (1.2 GB with 10,000 classes) and about 60
    bytes per sample.

    Args:
        num_samples: Number of samples N in the data set; indices are 0..N - 1.
        num_classes: Number of classes C; labels are 0..C - 1.
        process_group: The ``torch.distributed`` group whose ranks share the samples. By default,
            ``torch.distributed.group.WORLD``.

    Raises:
        InputError: ``num_samples`` is below 1 or ``num_classes`` below 2.
    """

    of_pruner = False  # Whether a pruner records it.

    def __init__(self, num_samples: int, num_classes: int, *, process_group: Any = None) -> None:
        check_whole_number("num_samples", num_samples, 1)
        check_whole_number("num_classes", num_classes, 2)
        super().__init__()
        self._evidence = Evidence(
            num_samples, num_classes, None if num_classes <= KEEP_ALL else STRONGEST
        )
        self._group = process_group
        self._place: tuple[int, int] | None = None  # This rank and their number, once known.
        # Whether this is the evidence of all ranks. It then belongs to rank 0, and the other ranks
        # have a copy, which they give up when they record again.
        self._merged = False

    @property
    def num_samples(self) -> int:
        """The number of samples N."""
        return self._evidence.num_samples

    @property
    def num_classes(self) -> int:
        """The number of classes C."""
        return self._evidence.num_classes

    def record(self, index: Any, logits: Tensor, labels: Any) -> None:
        """Record a batch of the training.

        Everything is copied, so the batch may be changed afterwards. Only the first call waits for
        the device, to check its batch. Errors in later batches are raised some batches later or, on
        a GPU, when the evidence is used. Records whose loss is NaN or infinite are left out.

        Args:
            index: The indices of the samples; integers, shape (B,).
            logits: The output of the network for them, before a softmax; floating point, shape
                (B, C). With a margin at the label, as in CosFace and ArcFace, record them without
                the margin, which makes right labels look wrong.
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
                f"expected logits as a torch.Tensor, got {type(logits).__name__}: give record the "
                f"output of the network"
            )
        logits = as_local("logits", logits)
        index, labels = as_numbers("indices", index), as_numbers("labels", labels)
        if torch.compiler.is_compiling():
            self._record_untraced(self, index, logits.detach(), labels)
        else:  # Outside a compiled step, the call above takes longer.
            check_not_recomputed()
            self._record(index, logits.detach(), labels)

    def suspects(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all samples, the most suspicious first.

        Returns:
            The indices of the samples, int64; their scores, float32; and suggestions, int64: the
            class that contradicts each label most. All have the shape (N,) and are on the CPU.
            Samples with a score above 0 are suspects, and their number is the estimated number of
            wrong labels (``ranking.py`` has the rule). Samples that were never recorded come last,
            with the score -inf and the suggestion -1.

        Raises:
            InputError: Nothing was recorded, something wrong was recorded, or the evidence of the
                ranks has not been merged.
        """
        return self.ranking().suspects()

    def ranking(self) -> Ranking:
        """Return the scores and suggestions in the order of the samples, and what follows of them.

        They are on the device of the evidence if that is a CPU or a CUDA GPU, otherwise on the CPU.

        Raises:
            InputError: As for ``suspects``.
        """
        return rank(self._usable())

    def ranking_so_far(self) -> Ranking | None:
        """Return ``ranking`` in the middle of a training; None if nothing finite was recorded.

        With several ranks, it covers all ranks only right after ``merge``.
        """
        self._evidence.flush()
        return rank(self._evidence) if self._evidence.visits.any() else None

    def labels(self) -> Tensor:
        """Return the labels of ``ranking`` without ranking, which takes long; on the CPU.

        Raises:
            InputError: As for ``suspects``.
        """
        return self._usable().labels.long().cpu()

    def without_suspects(self) -> list[int]:
        """Return the samples that are no suspects, for a second training without the others::

            clean = torch.utils.data.Subset(train_set, watch.without_suspects())

        Returns:
            Indices in ascending order, of the type that ``Subset`` takes. A sample that was never
            recorded is no suspect.

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
        """Say in plain words what the evidence says, one sentence each.

        The sentences say how many labels contradict what the network learned, how much it learned,
        how far to trust this, which classes are confused, and which were not learned. The evidence
        is not changed, so recording can go on.

        Args:
            names: The name of each class. By default, its number.

        Raises:
            InputError: As for ``suspects``, or there are fewer or more names than classes.
        """
        return facts_of(rank(self._usable(copied=True)), self._class_names(names))

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

        The page loads nothing from elsewhere, and can be read without JavaScript. With JavaScript,
        the keys a, k and d accept a suggestion, keep a label or drop a sample; u undoes, and n and
        p go on and back. Progress stays in the browser. A button writes ``labels.csv``, a table of
        all samples with the columns ``key``, ``index`` and ``label``, where the label ``drop``
        leaves a sample out. Samples whose label was not recorded and is not given by the data set
        are left out, too.

        Args:
            path: The HTML file to write. An existing file is replaced.
            dataset: The data set whose samples are shown: ``dataset[index]`` for each suspect.
                Without it, the page has no pictures and texts.
            names: The name of each class, as a sequence or a dict by class number. By default,
                those of the data set or of the one that it wraps (``class_to_idx``, ``classes``, or
                Hugging Face's column ``label``); without these, the class numbers.
            keys: A name for each sample, such as its path; shape (N,): a list, an array, a column
                of pandas (in its order, whatever its index), or a dict by sample number. By
                default, the attribute ``keys`` of the data set or the paths of torchvision's
                ``ImageFolder``; without these, the indices.
            show: A function that turns ``dataset[index]`` into an image (a Pillow image, a tensor
                or an array) or a text. By default, the first part of the item is shown if it is one
                of these.
            most: How many samples to list, the most suspicious first. By default, all suspects, at
                most 500.

        Raises:
            InputError: As for ``suspects``; there are fewer or more names than classes; the number
                of keys, or of samples in the data set, is not N; two samples have the same key; or
                the data set contradicts itself about its labels.
        """
        if most is not None:
            most = check_whole_number("most", most, 0)
        ranking = self.ranking()
        recorded = ranking.labels.cpu().numpy()
        if names is None:
            names = classes_of(dataset, self.num_classes)
        classes = unambiguous(self._class_names(names))
        if keys is not None:
            keys = as_keys(keys)
        else:
            found = keys_of(dataset)  # The attribute may be of another kind, such as of columns.
            own = found is not None and len(found) == len(set(found)) == self.num_samples
            keys = found if own else None
        for what, given in (("data set", dataset), ("list of keys", keys)):
            number = len(given) if hasattr(given, "__len__") else "unknown"
            if given is not None and number != self.num_samples:
                raise InputError(
                    f"expected a {what} of {self.num_samples} samples, got one of {number}: give "
                    f"that of the samples whose indices were recorded"
                )
        labels = completed_labels(recorded, self.num_classes, dataset)
        index = np.arange(self.num_samples)
        items = None if dataset is None else DatasetItems(dataset, recorded, show)
        samples = Samples(classes, labels, keys, index, items)
        section = self.review(ranking, samples, most)
        if items is not None:
            items.warn()
        write_page(Path(path), review_document(section))

    def review(
        self,
        ranking: Ranking,
        samples: Samples,
        most: int | None = None,
        notes: Sequence[str] = (),
    ) -> str:
        """Return the section of a page that lists the suspects, as HTML.

        Args:
            ranking: What ``ranking`` returned, since which nothing was recorded.
            samples: What the page knows of the samples besides the evidence.
            most: The largest number of samples to list; None for all suspects up to 500.
            notes: Further sentences above the cards.
        """
        with same_random_numbers():  # A page may be written in the middle of a training.
            return review_section(self._evidence, ranking, samples, most, notes)

    def _class_names(self, names: Names | None) -> list[str]:
        if names is None:
            names = range(self.num_classes)
        if isinstance(names, str | set | frozenset):  # The keys of a dict have an order.
            raise InputError(
                f"expected the names of the classes as a list in class order, got a "
                f"{type(names).__name__}"
            )
        # A dict is such as id2label of Hugging Face, also as read from JSON.
        pairs = names.items() if isinstance(names, Mapping) else enumerate(names)
        named = {str(number): str(name) for number, name in pairs}
        numbers = [str(number) for number in range(self.num_classes)]
        if set(named) != set(numbers):
            raise InputError(
                f"expected the names of {self.num_classes} classes, numbered from 0, got "
                f"{len(named)}, the first for class {next(iter(named), 'none')}: name every class "
                f"once, or leave names out"
            )
        return [named[number] for number in numbers]

    def to_cleanlab(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the arguments ``labels`` and ``pred_probs`` of cleanlab's functions.

        The probabilities are **in-sample**, means over the training, during most of which wrong
        labels have not been learned yet; cleanlab's documentation asks for out-of-sample ones,
        which take several trainings. docs/results/labels.md compares the two.

        Returns:
            The labels, int64, shape (N,), and the mean softmax of each sample, float32, shape
            (N, C), whose rows sum to one. This takes about 10 bytes per class and sample.

        Raises:
            InputError: As for ``suspects``, or a sample was never recorded.
        """
        evidence = self._usable()
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

    def merge(self, other: "LabelWatch | Mapping[str, Any] | None" = None) -> None:
        """Add the evidence of another watch, or of all ranks, to this one.

        Without ``other``, all ranks must call this, and each then has the evidence of all. This may
        be repeated: if recording goes on, rank 0 keeps the merged evidence, and the other ranks
        start again from nothing, so that nothing is counted twice. A single process has nothing to
        merge.

        Args:
            other: The watch, or its state dict, of another training on the same labels, for example
                with another seed. Its evidence must not be in this watch already.

        Raises:
            InputError: The number of samples, the number of classes or the labels differ; something
                wrong was recorded; or ``other`` is a state dict that cannot be read.
        """
        rank, ranks = self._rank_and_ranks()
        if other is None:
            if ranks > 1:
                self._merge_ranks(rank)
            return
        if ranks > 1 and not self._merged:
            raise InputError(
                "expected merged ranks before the evidence of another training is added, got ranks "
                "with evidence of their own: call merge() on every rank first, or the other "
                "training counts once per rank"
            )
        complete = True
        if isinstance(other, LabelWatch):
            complete = other.is_complete
        else:
            state, other = other, LabelWatch(self.num_samples, self.num_classes)
            complete = other._restore(state)[1] == 1
        if ranks > 1 and not complete:
            raise InputError(
                "expected the evidence of all ranks of the other training, got that of one: call "
                "merge() on the other watch on every rank first"
            )
        self._evidence.add(other._evidence)

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence as tensors, numbers and lists, which ``torch.save`` can write.

        This does not communicate. With several ranks, either call ``merge`` on every rank, save the
        state of rank 0 and load it on every rank; or save the state of each rank and load it on the
        same rank.
        """
        rank, ranks = self._rank_and_ranks()
        return {
            "version": STATE_VERSION,
            "num_samples": self.num_samples,
            "num_classes": self.num_classes,
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
        rank, ranks = self._rank_and_ranks()
        saved = self._restore(state)
        if saved not in ((0, 1), (rank, ranks)):
            raise InputError(
                f"expected a state with the evidence of all ranks, got that of rank {saved[0]} of "
                f"{saved[1]}: call merge() on every rank before state_dict(), or load each rank's "
                f"own state"
            )
        self._merged = saved == (0, 1) and ranks > 1

    def _record(self, index: Tensor, logits: Tensor, labels: Tensor) -> None:
        check_classified(index, logits, labels, self.num_classes)
        rank, _ = self._rank_and_ranks()
        if self._merged:
            self._merged = False
            if rank:
                self._evidence.clear()
        self._evidence.record(index, logits, labels)

    @uninterrupted()
    def _merge_ranks(self, rank: int) -> None:
        device = exchange_device(self._group) or "cpu"
        sizes = [self.num_samples, self.num_classes]
        least = torch.tensor([int(self._merged), *sizes, *(-n for n in sizes)], device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        merged, samples, classes, most_samples, most_classes = least.abs().tolist()
        for name, fewest, most in (
            ("num_samples", samples, most_samples),
            ("num_classes", classes, most_classes),
        ):
            if fewest != most:
                raise InputError(
                    f"expected the same {name} on every rank, got {fewest} to {most}: make the "
                    f"LabelWatch for the whole data set on every rank, not for a part of it"
                )
        if merged:
            return
        if self._merged and rank:  # What this rank has belongs to rank 0.
            self._evidence.clear()
        self._merged = False
        self._evidence.add_over_ranks(self._group)
        self._merged = True

    def _usable(self, *, copied: bool = False) -> Evidence:
        """Return the evidence, or a copy, after checking that it is complete and right.

        Without a copy, the buffer is added to the sums, which rounds them earlier than recording.
        """
        _, ranks = self._rank_and_ranks()
        evidence = copy.deepcopy(self._evidence) if copied else self._evidence
        if ranks > 1 and not self._merged:
            raise InputError(
                f"expected the evidence of all {ranks} ranks, got that of one: call merge() on "
                f"every rank first"
            )
        evidence.flush()
        if not evidence.visits.any():
            found = "no record: call record(index, logits, labels) in each step"
            if evidence.nonfinite:
                found = f"{evidence.nonfinite} records, whose losses are all NaN or infinite"
            raise InputError(f"expected a recorded training, got {found}")
        if evidence.nonfinite:
            warn_user(
                f"{evidence.nonfinite} records with a NaN or infinite loss were left out",
            )
        return evidence

    def _restore(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Replace the evidence by a saved one, and return the rank and the ranks it is of."""
        expected = {
            "version": STATE_VERSION,
            "num_samples": self.num_samples,
            "num_classes": self.num_classes,
        }
        given = {name: state.get(name) for name in expected} if isinstance(state, Mapping) else {}
        if given != expected:
            raise InputError(
                f"expected the state of a LabelWatch with {expected}, got {given or type(state)}: "
                f"load what state_dict() returned into a LabelWatch with the same numbers"
            )
        advice = ": load a whole state, as its state_dict() returned it"
        with explaining("expected the state of a LabelWatch, got a part", KeyError, advice):
            place = state["rank"], state["ranks"]
            self._evidence.load_state_dict(state["evidence"])
        return place

    def _rank_and_ranks(self) -> tuple[int, int]:
        """Return the rank of this process, and the number of ranks that share the samples."""
        if self._place is None:
            self._place = rank_and_size(self._group, "the first record")
        return self._place
