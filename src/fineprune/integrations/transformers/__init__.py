"""Pruning in the ``Trainer`` of ``transformers``.

    from fineprune.integrations.transformers import PruningTrainer

    policy = fp.Adaptive(epochs=8, save=0.3)
    trainer = PruningTrainer(model, args, train_dataset=train_set, pruning=policy)

The model's own loss is backpropagated, so a policy that skips nothing gives the same weights as the
``Trainer`` alone. The losses of the samples are computed in addition, without gradients, from the
outputs of the same forward pass.

A callback cannot change the sampler, the loss or the number of steps, so methods of the ``Trainer``
are overridden. Some of them are private; ``checks.OVERRIDDEN`` lists them.
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

from fineprune.integrations.transformers.trainer import PruningMixin, PruningTrainer

__all__ = ["PruningMixin", "PruningTrainer"]
