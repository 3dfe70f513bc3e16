"""WatchingMixin: watches the labels in any training of a ``Trainer``, and changes nothing."""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from fineprune.integrations.transformers.indexed_batches import IndexedBatches
from fineprune.labels.label_watch import LabelWatch

STATE_FILE = "label_watch.pt"


class WatchingMixin(IndexedBatches):
    """Watches the labels of a classifier: ``class Watching(WatchingMixin, MyTrainer)``.

    Checkpoints contain the evidence. At the end of ``train``, each process has that of all.

    Args:
        args: Positional arguments of the trainer.
        watch: The ``LabelWatch`` of the samples of ``train_dataset``.
        kwargs: Keyword arguments of the trainer.
    """

    def __init__(self, *args: Any, watch: LabelWatch, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch = watch

    def _record(self, index: Any, loss: Any, outputs: Any, inputs: Any, num_items: Any) -> Any:
        by_name = isinstance(outputs, dict)
        logits = outputs["logits"] if by_name else next(part for part in outputs if part.ndim == 2)
        self.watch.record(index, logits, self._labels(inputs))
        return loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, and give every process the evidence of all."""
        result = super().train(*args, **kwargs)
        self.watch.merge()
        return result

    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.watch.merge()
        if self.args.should_save:
            torch.save(self.watch.state_dict(), Path(output_dir, STATE_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.watch.load_state_dict(torch.load(Path(checkpoint, STATE_FILE), weights_only=True))


class WatchingTrainer(WatchingMixin, Trainer):
    """The ``Trainer`` of ``transformers`` with a watch; see ``WatchingMixin`` for the arguments."""
