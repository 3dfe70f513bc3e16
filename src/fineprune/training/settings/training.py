"""The training section of a recipe."""

import dataclasses

from fineprune.errors import InputError, check_at_least, check_between, check_one_of, check_positive

# A schedule is planned epoch by epoch before the training, which takes seconds for this number.
_MOST_EPOCHS = 100_000

SCHEDULES = ("milestones", "cosine", "linear", "quadratic", "one-cycle", "constant", "cooldown")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "rmsprop-tf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How the network is trained.

    Attributes:
        epochs: The number of training epochs.
        batch_size: The number of samples per batch, on each rank or worker.
        accumulation: The number of batches per optimizer step.
        drop_last: Whether to leave out an incomplete last batch.
        optimizer: The optimizer: ``sgd``, ``adam``, ``adamw``, ``rmsprop`` or ``rmsprop-tf``.
        lr: The base learning rate.
        lr_scale: Factors by which the learning rate of some parameters is multiplied, by prefixes
            of their names, such as ``{fc = 10.0, layer1 = 0.1}``. The longest prefix counts; None
            for one learning rate.
        schedule: The learning rate schedule: ``milestones``, ``cosine``, ``linear`` (falls linearly
            to 0), ``quadratic`` (falls as 1 - u^2, where u rises from 0 to 1), ``one-cycle``,
            ``constant``, or ``cooldown`` (constant, and falls as 1 - sqrt(u) in the last fifth of
            the epochs).
        milestones: The epochs, counted from 1, after which the learning rate is multiplied by
            ``gamma``.
        gamma: The factor that is applied at each milestone.
        warmup: The number of epochs over which the learning rate rises from 0; with ``one-cycle``,
            the length of its rise, or 0 for 30 % of the training.
        momentum: The momentum of SGD and RMSProp.
        nesterov: Whether SGD uses Nesterov momentum.
        decay: The decay of RMSProp's mean square.
        epsilon: The epsilon of RMSProp; None for 1e-8 with ``rmsprop`` and 1 with ``rmsprop-tf``.
        weight_decay: The factor of the L2 penalty, which AdamW applies in its decoupled form.
        label_smoothing: The label smoothing of the cross-entropy, in [0, 1].
        ema: The decay of a moving average of the weights, in (0, 1), which is evaluated in place of
            the weights; None for no average.
        evaluate_every: The number of epochs between two evaluations.
        evaluate_last: The number of epochs at the end of the training that are all evaluated.
    """

    epochs: int = 200
    batch_size: int = 128
    accumulation: int = 1
    drop_last: bool = False
    optimizer: str = "sgd"
    lr: float = 0.1
    lr_scale: dict[str, float] | None = None
    schedule: str = "milestones"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.2
    warmup: int = 0
    momentum: float = 0.9
    nesterov: bool = False
    decay: float = 0.9
    epsilon: float | None = None
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    ema: float | None = None
    evaluate_every: int = 1
    evaluate_last: int = 3

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulation", "evaluate_every", "evaluate_last"):
            check_at_least(f"training.{name}", getattr(self, name), 1)
        if self.epochs > _MOST_EPOCHS:
            raise InputError(
                f"expected training.epochs to be at most {_MOST_EPOCHS}, got {self.epochs}"
            )
        check_one_of("training.optimizer", self.optimizer, OPTIMIZERS)
        check_one_of("training.schedule", self.schedule, SCHEDULES)
        check_positive("training.lr", self.lr)
        for prefix, factor in (self.lr_scale or {}).items():
            if isinstance(factor, bool) or not isinstance(factor, int | float):
                raise InputError(
                    f"expected training.lr_scale.{prefix} to be a number, got {factor!r}"
                )
            check_positive(f"training.lr_scale.{prefix}", factor)
        check_positive("training.gamma", self.gamma)
        check_between("training.momentum", self.momentum, 0, 1)
        check_between("training.decay", self.decay, 0, 1)
        if self.epsilon is not None:
            check_positive("training.epsilon", self.epsilon)
        check_between("training.label_smoothing", self.label_smoothing, 0, 1)
        if self.ema is not None and not 0 < self.ema < 1:
            raise InputError(f"expected training.ema above 0 and below 1, got {self.ema}")
        check_at_least("training.weight_decay", self.weight_decay, 0)
        check_between("training.warmup", self.warmup, 0, self.epochs)
        if self.nesterov and self.optimizer != "sgd":
            raise InputError(
                f'expected training.nesterov with training.optimizer = "sgd" only, got it with '
                f"{self.optimizer!r}: set training.nesterov = false"
            )
        if self.epsilon is not None and self.optimizer not in ("rmsprop", "rmsprop-tf"):
            raise InputError(
                f"expected training.epsilon with rmsprop or rmsprop-tf only, got it with "
                f"{self.optimizer!r}: remove it"
            )
        if self.nesterov and self.momentum == 0:
            raise InputError("expected training.momentum above 0 with training.nesterov, got 0")
        increasing = list(self.milestones) == sorted(set(self.milestones))
        if not increasing or not all(1 <= m <= self.epochs for m in self.milestones):
            raise InputError(
                f"expected training.milestones to be strictly increasing within 1..{self.epochs}, "
                f"got {list(self.milestones)}"
            )
