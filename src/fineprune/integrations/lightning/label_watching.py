"""LabelWatching: watches the labels in any training of Lightning, and changes nothing."""

from typing import Any

import lightning.pytorch as pl

from fineprune.errors import InputError
from fineprune.labels.label_watch import LabelWatch

_NEEDED = ("index", "logits", "labels")


class LabelWatching(pl.Callback):
    """Watches the labels in ``Trainer.fit``, with any loader, strategy and setting.

    ``training_step`` returns what is recorded beside the loss. The indices come from a loader over
    ``fp.Indexed(train_set)``, whose batches are ``(index, batch)``::

        index, (x, y) = batch
        logits = self.network(x)
        return {"loss": F.cross_entropy(logits, y), "index": index, "logits": logits, "labels": y}

    A step that returns None is left out. Checkpoints contain the evidence. At the end of ``fit``,
    each rank has that of all.

    Args:
        watch: The ``LabelWatch`` that receives the evidence.
    """

    def __init__(self, watch: LabelWatch) -> None:
        self.watch = watch

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Record a batch."""
        if not outputs:
            return
        missing = [name for name in _NEEDED if name not in outputs]
        if missing:
            raise InputError(
                f"expected training_step to return a dict with 'loss', 'index', 'logits' and "
                f"'labels', got no {missing[0]!r}: return them, with the index of each sample from "
                f"a loader over fp.Indexed(train_set)"
            )
        self.watch.record(*(outputs[name] for name in _NEEDED))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give every rank the evidence of all."""
        self.watch.merge()

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence of all ranks, for a checkpoint."""
        self.watch.merge()
        return self.watch.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the evidence of a checkpoint."""
        self.watch.load_state_dict(state_dict)
