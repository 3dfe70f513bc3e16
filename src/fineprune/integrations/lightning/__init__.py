"""Pruning in the ``Trainer`` of Lightning 2.6, as a callback.

    from fineprune.integrations.lightning import DataPruning, record

    pruning = DataPruning(fp.Adaptive(40, save=0.35))
    trainer = lightning.Trainer(max_epochs=40, callbacks=[pruning])

In ``training_step``, ``record`` replaces the mean of the losses::

    return record(self, F.cross_entropy(self(x), y, reduction="none"))

Your loader keeps its batches: the callback replaces the sampler, and removes the indices before the
module sees a batch. Lightning reads the length of the loader again before each epoch, because the
progress bar and the time of the validation depend on it.

Lightning has no public hook for a loader that is given to ``fit``. The callback therefore uses the
private attributes ``fit_loop._data_source`` and ``fit_loop._combined_loader``, and the progress of
the loops in a checkpoint; the tests fail if a release changes these.
"""

from fineprune.errors import InputError

try:
    import lightning.pytorch  # noqa: F401 (the modules below import it)
except ImportError as error:
    raise InputError(
        f"expected the package lightning, but {error.name} is not installed: "
        f"pip install 'fineprune[lightning]'"
    ) from error

from fineprune.integrations.lightning.epochs import DataPruning
from fineprune.integrations.lightning.losses import record

__all__ = ["DataPruning", "record"]
