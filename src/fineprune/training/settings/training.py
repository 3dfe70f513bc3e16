"""The training section of a recipe."""

import dataclasses
from typing import Annotated, Literal, get_args

from msgspec import Meta

from fineprune.errors import InputError
from fineprune.training.convert import Count, OnlyWith, Positive, Share, Whole, complete

# A schedule is planned epoch by epoch before the training, which takes seconds for this number.
_MOST_EPOCHS = 100_000

OptimizerName = Literal["sgd", "adam", "adamw", "rmsprop", "rmsprop-tf"]
ScheduleName = Literal["milestones", "cosine", "linear", "constant", "rates"]

_RMSPROP = ("rmsprop", "rmsprop-tf")
_SGD_LIKE = ("sgd", *_RMSPROP)
_WITHOUT_RATES = [name for name in get_args(ScheduleName) if name != "rates"]
_ONLY_WITH: OnlyWith = {
    "momentum": ("optimizer", dict.fromkeys(_SGD_LIKE, 0.9)),
    "nesterov": ("optimizer", {"sgd": False}),
    "decay": ("optimizer", dict.fromkeys(_RMSPROP, 0.9)),
    "epsilon": ("optimizer", dict.fromkeys(_RMSPROP)),
    "milestones": ("schedule", {"milestones": ()}),
    "gamma": ("schedule", {"milestones": 0.2}),
    "rates": ("schedule", {"rates": ()}),
    "warmup": ("schedule", dict.fromkeys(_WITHOUT_RATES, 0)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How the network is trained.

    A setting that the optimizer or the schedule does not have must stay unset.

    Attributes:
        epochs: The number of training epochs.
        batch_size: The number of samples per batch, on each rank or worker.
        accumulation: The number of batches per optimizer step.
        drop_last: Whether to leave out an incomplete last batch.
        optimizer: The optimizer: ``sgd``, ``adam``, ``adamw``, ``rmsprop`` or ``rmsprop-tf``.
        lr: The base learning rate.
        schedule: The learning rate schedule: ``milestones``, ``cosine``, ``linear`` (to 0),
            ``constant``, or ``rates``.
        milestones: With ``milestones``, the epochs, counted from 1, after which the learning rate
            is multiplied by ``gamma``.
        gamma: With ``milestones``, the factor that is applied at each of them; 0.2 if it is unset.
        rates: With ``rates``, the learning rate of each epoch as a multiple of ``lr``.
        warmup: The number of epochs over which the learning rate rises from 0.
        momentum: The momentum of SGD and RMSProp; 0.9 if it is unset.
        nesterov: Whether SGD uses Nesterov momentum.
        decay: The decay of RMSProp's mean square; 0.9 if it is unset.
        epsilon: The epsilon of RMSProp; unset for 1e-8 with ``rmsprop`` and 1 with ``rmsprop-tf``.
        weight_decay: The factor of the L2 penalty, which AdamW applies in its decoupled form.
        label_smoothing: The label smoothing of the cross-entropy, in [0, 1].
        ema: The decay of a moving average of the weights, in (0, 1), which is evaluated in place of
            the weights; None for no average.
        evaluate_every: The number of epochs between two evaluations.
        evaluate_last: The number of epochs at the end of the training that are all evaluated.
    """

    epochs: Annotated[int, Meta(ge=1, le=_MOST_EPOCHS)] = 200
    batch_size: Count = 128
    accumulation: Count = 1
    drop_last: bool = False
    optimizer: OptimizerName = "sgd"
    lr: Positive = 0.1
    schedule: ScheduleName = "milestones"
    milestones: tuple[int, ...] = ()
    gamma: Positive | None = None
    rates: tuple[Annotated[float, Meta(ge=0)], ...] = ()
    warmup: Whole = 0
    momentum: Share | None = None
    nesterov: bool = False
    decay: Share | None = None
    epsilon: Positive | None = None
    weight_decay: Annotated[float, Meta(ge=0)] = 5e-4
    label_smoothing: Share = 0.0
    ema: Annotated[float, Meta(gt=0, lt=1)] | None = None
    evaluate_every: Count = 1
    evaluate_last: Count = 3

    def __post_init__(self) -> None:
        complete("training", self, _ONLY_WITH)
        if self.warmup > self.epochs:
            raise InputError(
                f"expected training.warmup in [0, {self.epochs}], got {self.warmup}: it cannot be "
                f"longer than the training"
            )
        if self.nesterov and self.momentum == 0:
            raise InputError("expected training.momentum above 0 with training.nesterov, got 0")
        if self.schedule == "rates" and len(self.rates) != self.epochs:
            raise InputError(
                f"expected training.rates to have one number for each of {self.epochs} epochs, got "
                f"{len(self.rates)}"
            )
        increasing = list(self.milestones) == sorted(set(self.milestones))
        if not increasing or not all(1 <= m <= self.epochs for m in self.milestones):
            raise InputError(
                f"expected training.milestones to be strictly increasing within 1..{self.epochs}, "
                f"got {list(self.milestones)}"
            )
