"""ProgressiveDropout: train fewer and fewer samples, and all of them at the end."""

import math
from numbers import Real
from typing import ClassVar, Unpack

import numpy as np
import torch

from fineprune.errors import InputError
from fineprune.pruning.lowest import lowest
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.plan_options import Options, check_share
from fineprune.pruning.policies.last_losses import LastLosses

FORMS = ("difficulty", "scalar", "schedule-matched")


class ProgressiveDropout(LastLosses):
    """Progressive Data Dropout (Sathiyanarayanan et al., "Progressive Data Dropout: An
    Embarrassingly Simple Approach to Faster Training", NeurIPS 2025).

    There are three forms. In each, an epoch trains at least one optimizer step, and whole steps.

    - ``difficulty``: Each epoch trains the samples whose label is predicted with a probability
      below ``threshold``. This probability is ``exp(-loss)``, so the losses must be cross-entropies
      without label smoothing. Samples without a finite loss are trained. The losses of skipped
      samples are needed, too: see ``Pruner.to_rescore``.
    - ``scalar``: Epoch e, counted from 0, trains ``N * decay**e`` random samples. No losses are
      needed.
    - ``schedule-matched``: Each epoch trains a random subset as large as that of ``difficulty``.
      (To repeat the numbers of another run, use ``Matched``.)

    Args:
        epochs: Number of training epochs.
        form: The form: "difficulty", "scalar" or "schedule-matched".
        threshold: The predicted probability of its label, in (0, 1], below which a sample is
            trained.
        decay: The factor, in (0, 1), by which the number of samples falls per epoch.
        options: The options of every policy; see ``PlanOptions``. By default, ``anneal`` is
            ``1 / epochs``: the last epoch trains all samples.

    Raises:
        InputError: A value is out of range.
    """

    name: ClassVar[str] = "progressive-dropout"
    _setting_names = ("epochs", "form", "threshold", "decay")

    def __init__(
        self,
        epochs: float,
        form: str = "difficulty",
        *,
        threshold: float = 0.3,
        decay: float = 0.95,
        **options: Unpack[Options],
    ) -> None:
        given: Options = {**options}
        if "anneal" not in given and isinstance(epochs, Real) and epochs > 0:
            given["anneal"] = 1 / float(epochs)
        super().__init__(epochs, **given)
        if form not in FORMS:
            raise InputError(f"expected form as one of {', '.join(FORMS)}, got {form!r}")
        self.form = form
        self.threshold = check_share("threshold", threshold, "(0, 1]")
        self.decay = check_share("decay", decay, "(0, 1)")
        self.needs_losses = self.rescores = form != "scalar"

    def num_kept(self, epoch: int) -> int | None:
        """Return the number of samples of the form ``scalar``; the others depend on the losses."""
        if self.form != "scalar":
            return None
        return self._whole_steps(math.ceil(self._num_samples * self.decay**epoch))

    def select(self, epoch: int, num_kept: int | None, rng: np.random.Generator) -> EpochPlan:
        """Keep the hardest samples, or a random subset of the same size."""
        number = num_kept
        if number is None:
            easy = self.losses <= -math.log(self.threshold)  # NaN is not easy.
            number = self._whole_steps(int((~easy).sum()))
        if self.form == "difficulty":
            kept = lowest(np.where(np.isnan(self.losses), -np.inf, -self.losses), number, rng)
        else:
            kept = rng.choice(self._num_samples, number, replace=False, shuffle=False)
        return EpochPlan(epoch, torch.from_numpy(np.sort(kept)))
