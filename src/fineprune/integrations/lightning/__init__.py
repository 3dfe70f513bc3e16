"""Watching labels and pruning in the ``Trainer`` of Lightning 2.6, as callbacks.

``LabelWatching`` uses public hooks only. ``DataPruning`` replaces the sampler of the loader that
``fit`` is given, for which Lightning has no public hook: it uses ``fit_loop._data_source`` and
``fit_loop._combined_loader``, and the progress of the loops in a checkpoint. The tests fail if a
release changes these.
"""

from fineprune.errors import InputError

try:
    import lightning.pytorch  # noqa: F401 (the modules below import it)
except ImportError as error:
    raise InputError(
        f"expected the package lightning, but {error.name} is not installed: "
        f"pip install 'fineprune[lightning]'"
    ) from error

from fineprune.integrations.lightning.label_watching import LabelWatching
from fineprune.integrations.lightning.pruning import DataPruning, record

__all__ = ["DataPruning", "LabelWatching", "record"]
