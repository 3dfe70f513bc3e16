"""Rescoring: forward passes over samples that an epoch did not train, which some policies need."""

from fineprune.training.evaluate import evaluated_logits
from fineprune.training.network import training_losses
from fineprune.training.train_state import EpochTotals, TrainState

# Nothing is kept for a backward pass, so a batch may be larger than in training.
_TRAINING_BATCHES = 4


def rescore(state: TrainState, epoch: int, totals: EpochTotals) -> None:
    """Record the losses of the samples that the policy wants evaluated at the end of an epoch.

    The model is in evaluation mode, and the samples have the augmentation that they would have had
    in the epoch. With several ranks, each of them evaluates a part. With parameter servers, this
    process evaluates all of them with the servers' parameters, while the workers wait. It comes
    before ``Pruner.end_epoch()``, and adds the number of samples to the totals.
    """
    wanted = state.pruner.to_rescore()
    if wanted is None:
        return
    training = state.recipe.training
    size = _TRAINING_BATCHES * training.batch_size
    parts = iter(wanted.split(size))
    if state.local is not None:
        # The buffers of rank 0 are used, because a resumed run has only these.
        state.ranks.take_buffers_of_main(state.model)
        batches = (batch for _, batch in state.local.loader.batches(wanted, epoch, size))
    else:
        assert state.coordinator is not None
        state.coordinator.load_into(state.model)
        fetch = state.data.make_fetch()
        batches = (fetch(part, epoch) for part in wanted.split(size))
    device = state.recipe.run.device
    for logits, y in evaluated_logits(state.model, batches, device, state.autocast):
        state.pruner.rescore(next(parts), training_losses(logits, y, training))
    totals.rescored += len(wanted)
