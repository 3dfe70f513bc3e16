"""Pruning in the trainers of TRL.

    from fineprune.integrations.trl import PruningSFTTrainer

    trainer = PruningSFTTrainer(model, args=args, train_dataset=texts, pruning=policy)

They take the same arguments as those of ``fineprune.integrations.transformers``.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fineprune.errors import InputError
from fineprune.integrations.transformers.losses import ForwardPasses
from fineprune.integrations.transformers.model_losses import FUSED, SampleLosses
from fineprune.integrations.transformers.trainer import PruningMixin

try:
    from trl import DPOTrainer, SFTTrainer
except ImportError as error:
    raise InputError(
        f"expected the package trl, but {error.name} is not installed: pip install 'fineprune[trl]'"
    ) from error


class PruningSFTTrainer(PruningMixin, SFTTrainer):
    """Supervised fine-tuning with pruning. A text's loss is the mean over its labelled tokens."""


class PruningDPOTrainer(PruningMixin, DPOTrainer):
    """Direct preference optimization with pruning. The loss of a pair of answers is its DPO loss.

    If you give ``sample_losses``, its inputs contain the log-probabilities of the answers under the
    reference model: ``ref_chosen_logps`` and ``ref_rejected_logps``, shape (B,).

    Raises:
        InputError: The loss is not DPO's own (``loss_type="sigmoid"`` and the defaults of the other
            options), and no ``sample_losses`` is given.
    """

    def _models(self, model: Any) -> list[Any]:
        # A model with an adapter is its own reference.
        return [model, self.model if self.ref_model is None else self.ref_model]

    def _known_sample_losses(self) -> SampleLosses:
        options = {
            "loss_type": (self.loss_types, ["sigmoid"]),
            "f_divergence_type": (self.f_divergence_type, "reverse_kl"),
            "ld_alpha": (self.ld_alpha, None),
            "use_weighting": (self.use_weighting, False),
        }
        for name, (given, usual) in options.items():
            if given != usual:
                raise InputError(
                    f"expected {name}={usual!r}, for which the losses of pairs are known, got "
                    f"{given!r}: give the trainer sample_losses=function(outputs, inputs) that "
                    f"returns one loss per pair"
                )
        return lambda outputs, inputs: pair_losses(outputs, inputs, self.beta)

    def _losses_of_samples(self, passes: ForwardPasses, inputs: Any) -> torch.Tensor:
        if "ref_chosen_logps" not in inputs:
            chosen, rejected = _answers(passes.reference)
            inputs = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return super()._losses_of_samples(passes, inputs)


def pair_losses(outputs: Any, inputs: Mapping[str, Any], beta: float) -> torch.Tensor:
    """Return the DPO loss of each pair of answers, float32, shape (B,).

    Args:
        outputs: Those of the model for the B chosen answers, followed by the B rejected ones.
        inputs: The log-probabilities of the answers under the reference model, as
            ``ref_chosen_logps`` and ``ref_rejected_logps``, shape (B,).
        beta: The factor of the difference between the model and the reference.
    """
    chosen, rejected = _answers(outputs)
    chosen = chosen - inputs["ref_chosen_logps"]
    rejected = rejected - inputs["ref_rejected_logps"]
    return -F.logsigmoid(beta * (chosen - rejected).float())


def _answers(outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the chosen and of the rejected answers, shape (B,) each."""
    chosen, rejected = outputs[FUSED].sum(1).chunk(2)
    return chosen, rejected
