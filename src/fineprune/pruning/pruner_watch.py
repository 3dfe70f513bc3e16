"""PrunerWatch: the evidence on labels that comes from the logits which a pruner records."""

from collections.abc import Callable
from typing import Any

import torch

from fineprune.errors import InputError
from fineprune.labels.batch import as_local, as_numbers
from fineprune.labels.label_watch import LabelWatch
from fineprune.pruning.label_warnings import check_given_labels, warn_of_first_batch
from fineprune.pruning.policies.policy import Policy


class PrunerWatch:
    """Makes a ``LabelWatch`` of a pruner when logits are recorded for the first time.

    Args:
        num_samples: Number of samples N in the data set.
        find_group: Returns the process group whose ranks share the evidence, or raises InputError
            if logits cannot be recorded.
        policy: The policy of the pruner.

    Attributes:
        watch: The watch; None without logits.
        is_loaded: Whether it comes from a state, and has no evidence since.
        given_labels: The labels that the first batch of this process is compared with; int64, shape
            (N,), negative where they are not known. None without any, and after this batch.
    """

    def __init__(self, num_samples: int, find_group: Callable[[], Any], policy: Policy) -> None:
        self._num_samples = num_samples
        self._find_group = find_group
        self._policy = policy
        self.watch: LabelWatch | None = None
        self.is_loaded = False
        self.given_labels: torch.Tensor | None = None

    def record(
        self, index: torch.Tensor, losses: torch.Tensor, logits: torch.Tensor | None, labels: Any
    ) -> None:
        """Record the logits and labels of a batch, as ``record`` of a pruner is given them."""
        if logits is None or labels is None:
            raise InputError(
                "expected logits and labels together, got only one of them: give record both, to "
                "watch the labels, or neither"
            )
        logits = as_local("logits", logits)
        watch = self.watch
        if watch is None:
            if logits.ndim != 2 or logits.shape[1] < 2:
                raise InputError(
                    f"expected logits of shape (B, C) for at least two classes, got "
                    f"{tuple(logits.shape)}: give record one row of logits per sample, or no "
                    f"logits and labels if this is not a classifier"
                )
            watch = self._new(logits.shape[1])
        watch.record_for_pruner(index, logits, labels)
        if self.given_labels is not None:
            check_given_labels(self.given_labels, index, as_numbers("labels", labels))
            self.given_labels = None
        first, self.watch = self.watch is None, watch
        self.is_loaded = False
        if first:
            labels = as_numbers("labels", labels)
            warn_of_first_batch(self._policy, losses, logits, labels)

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from the state of a watch; None is that of a training without logits."""
        self.watch = None
        if state is not None:
            self.watch = self._new(state["num_classes"])
            self.watch.load_state_dict(state)
        self.is_loaded = self.watch is not None

    def _new(self, num_classes: int) -> LabelWatch:
        watch = LabelWatch(self._num_samples, num_classes, process_group=self._find_group())
        watch.of_pruner = True
        return watch
