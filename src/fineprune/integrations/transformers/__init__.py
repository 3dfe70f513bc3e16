"""Watching labels and pruning in the ``Trainer`` of ``transformers``, and in those derived from it.

The model's own loss is backpropagated, so a training that skips nothing has the same weights as one
with the ``Trainer`` alone. Some of the methods that are overridden are private;
``checks.OVERRIDDEN`` lists them.
"""

from fineprune.errors import InputError

try:
    import accelerate  # noqa: F401 (the Trainer needs it)
    import transformers  # noqa: F401
except ImportError as error:
    raise InputError(
        f"expected the packages transformers and accelerate, but {error.name} is not installed: "
        f"pip install 'fineprune[transformers]'"
    ) from error

from fineprune.integrations.transformers.label_watching import WatchingMixin, WatchingTrainer
from fineprune.integrations.transformers.pruning import PruningMixin, PruningTrainer

__all__ = ["PruningMixin", "PruningTrainer", "WatchingMixin", "WatchingTrainer"]
