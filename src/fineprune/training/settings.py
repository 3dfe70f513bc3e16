"""The settings of a run: one frozen dataclass per section of a recipe.

A wrong value raises an error here, before anything is built.
"""

import dataclasses
import json
import math
import re
from typing import Any, cast

from fineprune.errors import InputError, check_above, check_at_least, check_between, check_one_of
from fineprune.importing import check_import_name
from fineprune.networks.registry import NETWORKS
from fineprune.pruning.plan_options import NAMES, Options, PlanOptions
from fineprune.pruning.policies.registry import POLICIES

_USER_DEFINED = "user-defined data"
_IMAGE_SETS = ("digits", "synthetic", "cifar10", "cifar100")

# The data that a setting applies to. With other data, the setting would be ignored silently. The
# settings ``dir`` and ``download`` are always allowed.
_APPLIES_TO: dict[str, tuple[str, ...]] = {
    "train_size": ("digits", "synthetic"),
    "image_size": ("synthetic",),
    "crop_padding": _IMAGE_SETS,
    "flip": _IMAGE_SETS,
    "workers": (_USER_DEFINED,),
}

# The settings that one policy has and all others would ignore.
OF_ONE_POLICY = {
    "replacement": "rs2",
    "confidence": "kakurenbo",
    "smoothing": "ucb",
    "exploration": "ucb",
    "period": "ucb",
    "form": "progressive-dropout",
    "threshold": "progressive-dropout",
    "decay": "progressive-dropout",
}

# The defaults of the settings that are None, for policies without those of the others.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "kakurenbo": {"prune": 0.3, "confidence": 0.7, "rescale": True},
    "progressive-dropout": {"form": "difficulty", "threshold": 0.3, "decay": 0.95},
    "rs2": {"save": 0.35},
    "ucb": {"save": 0.35, "smoothing": 0.8, "exploration": 1.0, "period": 1},
}

# A schedule is planned epoch by epoch before the training, which takes seconds for this number.
_MOST_EPOCHS = 100_000

# TOML's integers are signed and have 64 bits, and an epoch's order is drawn from seed + epoch.
_LARGEST_SEED = 2**63 - 1

_DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]+)?|mps")

OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "rmsprop-tf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The dataset, and how its images are augmented during training.

    Attributes:
        name: The dataset: ``digits`` (embedded), ``cifar10``, ``cifar100``, ``synthetic``
            (generated images, for benchmarks), or ``module:attribute``, a user-defined function
            that returns a training and a test dataset (map-style, with items ``(x, y)``). It may
            also return the training samples without random transforms as a third dataset.
        dir: The folder of the CIFAR files.
        download: Whether to download the CIFAR archive if it is not in ``dir``.
        train_size: The number of training images; with ``digits``, all other images are for
            testing, and with ``synthetic``, this many are generated.
        image_size: The height and width of synthetic images, in pixels.
        validation: The number of training images to hold out. If it is above 0, evaluation uses
            these images instead of the test set.
        crop_padding: The padding of the random crop, in pixels; None for the dataset's default.
        flip: Whether to mirror images at random; None for the dataset's default.
        workers: The number of loader processes, for user-defined datasets.
    """

    name: str = "digits"
    dir: str = "data"
    download: bool = False
    train_size: int = 1024
    image_size: int = 32
    validation: int = 0
    crop_padding: int | None = None
    flip: bool | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        if ":" in self.name:
            check_import_name("data.name", self.name)
        else:
            check_one_of("data.name", self.name, _IMAGE_SETS)
        check_at_least("data.train_size", self.train_size, 1)
        check_at_least("data.image_size", self.image_size, 1)
        check_at_least("data.validation", self.validation, 0)
        check_at_least("data.workers", self.workers, 0)
        if self.crop_padding is not None:
            check_at_least("data.crop_padding", self.crop_padding, 0)
        data = _USER_DEFINED if ":" in self.name else self.name
        for field in dataclasses.fields(self):
            names = _APPLIES_TO.get(field.name, (data,))
            given = getattr(self, field.name)
            if data not in names and given != field.default:
                raise InputError(
                    f"expected data.{field.name} with {' or '.join(names)} only, got "
                    f"{json.dumps(given)} with {self.name!r}: remove this setting"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The network.

    Attributes:
        name: A name from ``fineprune.networks``; ``timm:NAME`` or ``torchvision:NAME``; or
            ``module:attribute``, a user-defined class or function that is called with the keyword
            arguments ``classes`` and ``channels``.
        classes: The number of classes; None for that of the dataset.
    """

    name: str = "lenet"
    classes: int | None = None

    def __post_init__(self) -> None:
        library, colon, model = self.name.partition(":")
        if not colon:
            check_one_of("network.name", self.name, tuple(NETWORKS))
        elif library not in ("timm", "torchvision") or not model:
            check_import_name("network.name", self.name)
        if self.classes is not None:
            check_at_least("network.classes", self.classes, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How the network is trained.

    Attributes:
        epochs: The length of the training.
        batch_size: The number of samples per batch, on each rank or worker.
        accumulation: The number of batches per optimizer step.
        drop_last: Whether to leave out an incomplete last batch.
        optimizer: The optimizer: ``sgd``, ``adam``, ``adamw``, ``rmsprop`` or ``rmsprop-tf``.
        lr: The base learning rate.
        schedule: The learning rate schedule: ``milestones``, ``cosine``, ``one-cycle`` or
            ``constant``.
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
        evaluate_every: The number of epochs from one evaluation to the next.
        evaluate_last: The number of last epochs that are all evaluated.
    """

    epochs: int = 200
    batch_size: int = 128
    accumulation: int = 1
    drop_last: bool = False
    optimizer: str = "sgd"
    lr: float = 0.1
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
        check_one_of(
            "training.schedule", self.schedule, ("milestones", "cosine", "one-cycle", "constant")
        )
        check_above("training.lr", self.lr, 0)
        check_above("training.gamma", self.gamma, 0)
        check_between("training.momentum", self.momentum, 0, 1)
        check_between("training.decay", self.decay, 0, 1)
        if self.epsilon is not None:
            check_above("training.epsilon", self.epsilon, 0)
        check_between("training.label_smoothing", self.label_smoothing, 0, 1)
        check_at_least("training.weight_decay", self.weight_decay, 0)
        check_between("training.warmup", self.warmup, 0, self.epochs)
        if self.nesterov and self.momentum == 0:
            raise InputError("expected training.momentum above 0 with training.nesterov, got 0")
        increasing = list(self.milestones) == sorted(set(self.milestones))
        if not increasing or not all(1 <= m <= self.epochs for m in self.milestones):
            raise InputError(
                f"expected training.milestones to be strictly increasing within 1..{self.epochs}, "
                f"got {list(self.milestones)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruningSettings:
    """Which samples are skipped, and in which epochs ([P] Algorithms 1 and 2).

    Either all windows have the same length (``window``, with ``start`` in epochs), or they are made
    from the learning rate's milestones (``windows_per_interval``, with ``start`` as a fraction of
    each window).

    The settings of a schedule, and ``prune``, ``tolerance``, ``save``, ``patience`` and
    ``returning``, may be there although the policy has no use for them, so that one recipe can be
    trained with several policies. With ``full``, this holds for all settings.

    Attributes:
        policy: The policy: ``adaptive``, ``fine-pruning``, ``infobatch``, ``kakurenbo``,
            ``progressive-dropout``, ``random``, ``rs2``, ``ucb``, ``matched`` or ``full``; or
            ``module:Class``, a policy of the user's own, which is called with the number of epochs
            and with ``arguments``.
        save: The share to save: an argument of ``Adaptive``, ``InfoBatch``, ``RS2`` and ``UCB``.
        patience, returning: The arguments of ``Adaptive``.
        replacement: An argument of ``RS2``.
        confidence: An argument of ``Kakurenbo``.
        smoothing, exploration, period: The arguments of ``UCB``.
        form, threshold, decay: The arguments of ``ProgressiveDropout``.
        anneal, rescale, keep_per_class, max_skips: The options of every policy (``PlanOptions``);
            None for the default of the policy.
        arguments: The keyword arguments of a policy of the user's own: a table of numbers, strings,
            booleans, lists and tables.
        window, start, attenuation, attenuate, block, count: The arguments of ``Schedule``.
        windows_per_interval: The number of windows between two milestones, instead of ``window``.
        prune: The samples that a pruning epoch skips: a fraction in [0, 1), or their number. With
            ``infobatch``, it is a probability, and 0 stands for none if ``save`` is given. With
            ``kakurenbo``, it is the largest fraction or number.
        tolerance: The fraction of the batch's mean loss by which a sample's loss may exceed this
            mean without being marked.
        numbers, mean_weights: The arguments of ``Matched``, one number for each epoch;
            ``fineprune compare`` takes them from the run that the control matches.
    """

    policy: str = "fine-pruning"
    save: float | None = None
    patience: int = 5
    returning: float = 0.1
    replacement: bool | None = None
    confidence: float | None = None
    smoothing: float | None = None
    exploration: float | None = None
    period: int | None = None
    form: str | None = None
    threshold: float | None = None
    decay: float | None = None
    anneal: float | None = None
    rescale: bool | None = None
    keep_per_class: float | None = None
    max_skips: int | None = None
    arguments: dict[str, Any] | None = None
    window: int | None = None
    windows_per_interval: int | None = None
    start: int | float = 0
    attenuation: float = 1.0
    attenuate: str = "window"
    block: int = 1
    count: int = 1
    prune: int | float | None = None
    tolerance: float = 0.0
    # None is not written to a run's recipe, so that checkpoints without these settings still load.
    numbers: tuple[int, ...] | None = None
    mean_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.own:
            check_import_name("pruning.policy", self.policy)
        else:
            check_one_of("pruning.policy", self.policy, tuple(POLICIES))
        if self.arguments is not None:
            _check_arguments("pruning.arguments", self.arguments)
        self._check_applies()
        self._complete()
        PlanOptions(**self.options())
        for name in ("numbers", "mean_weights"):
            if self.policy != "matched" and getattr(self, name) is not None:
                raise InputError(
                    f'expected pruning.{name} with policy = "matched" only, got it with '
                    f"{self.policy!r}: remove this setting"
                )
        if self.policy == "matched" and self.numbers is None:
            raise InputError(
                'expected pruning.numbers, the samples of each epoch, with policy = "matched", got '
                "none: the arm 'matched' of fineprune compare takes them from a finished run"
            )
        scheduled = self.policy in ("fine-pruning", "random")
        if scheduled and (self.window is None) == (self.windows_per_interval is None):
            raise InputError(
                "expected either pruning.window (epochs) or pruning.windows_per_interval, "
                f"got window={self.window} and windows_per_interval={self.windows_per_interval}"
            )
        if self.window is not None and not isinstance(self.start, int):
            raise InputError(
                f"expected pruning.start in whole epochs with pruning.window, got {self.start}"
            )

    @property
    def own(self) -> bool:
        """Whether the policy is the user's own. Making it runs the user's code."""
        return ":" in self.policy

    def options(self) -> Options:
        """Return the options that are set."""
        return cast(Options, self.given(*NAMES))

    def given(self, *names: str) -> dict[str, Any]:
        """Return those of the named settings that are not None."""
        values = {name: getattr(self, name) for name in names}
        return {key: value for key, value in values.items() if value is not None}

    def _check_applies(self) -> None:
        """Raise InputError if a setting would be ignored silently."""
        if self.policy == "full":
            return
        for name, policy in OF_ONE_POLICY.items():
            if getattr(self, name) is not None and self.policy != policy:
                raise InputError(
                    f'expected pruning.{name} with pruning.policy = "{policy}" only, got it with '
                    f"{self.policy!r}: remove it"
                )
        if self.arguments is not None and not self.own:
            raise InputError(
                f"expected pruning.arguments with a policy of your own (module:Class) only, got "
                f"them with {self.policy!r}: remove them"
            )
        if self.policy in ("rs2", "ucb") and self.prune and self.save is None:
            raise InputError(
                f'expected pruning.save with pruning.policy = "{self.policy}", got pruning.prune = '
                f"{self.prune} only: set pruning.save"
            )
        if self.policy == "infobatch" and self.prune and self.save:
            raise InputError(
                f'expected either pruning.prune or pruning.save with pruning.policy = "infobatch", '
                f"got prune = {self.prune} and save = {self.save}: set one of them to 0"
            )
        for name in ("save", "prune"):
            if self.own and getattr(self, name):
                raise InputError(
                    f"expected pruning.arguments with a policy of your own, got pruning.{name} = "
                    f"{getattr(self, name)}: put it into pruning.arguments, or set it to 0"
                )

    def _complete(self) -> None:
        """Replace None by the default of the policy, so that a run's recipe is complete."""
        values: dict[str, Any] = {}
        if self.policy == "infobatch":
            values = {"anneal": 0.125, "rescale": True}
            if self.save:
                object.__setattr__(self, "prune", None)
            else:
                object.__setattr__(self, "save", None)
                values["prune"] = 0.5
        elif self.policy in _DEFAULTS:
            values = _DEFAULTS[self.policy]
        elif not self.own:
            values = {"save": 0.35, "prune": 0.0}
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)  # The dataclass is frozen for its users.


def _check_arguments(name: str, value: object) -> None:
    """Raise InputError unless a value can be written as TOML and as JSON."""
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_arguments(f"{name}.{key}", entry)
    elif isinstance(value, list):
        for entry in value:
            _check_arguments(name, entry)
    elif not isinstance(value, bool | int | float | str):
        raise InputError(
            f"expected {name} as a number, a string, a boolean, a list or a table, got {value!r}"
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"expected {name} as a finite number, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where and how the run is carried out. None of these settings changes the method.

    Attributes:
        seed: Seeds the initial weights, the sample order, the breaking of ties and the
            augmentation.
        device: The device: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` or ``mps``, for example.
        precision: The precision: ``auto``, ``float32`` or ``bfloat16`` (autocast).
        compile: Whether to train the network through ``torch.compile``, on a GPU with CUDA graphs:
            ``auto``, ``on`` or ``off``.
        threads: The number of CPU threads of each process; 0 divides the machine's cores among the
            processes.
        checkpoint_every: The number of epochs from one checkpoint to the next.
        checkpoint_steps: The number of batches from one checkpoint inside an epoch to the next; 0
            for no checkpoints inside an epoch.
        watch: The number of training samples whose losses are recorded at each evaluation ([P]
            Figure 2).
        arm: The name of the run's arm in a comparison; None for the name of the policy.
    """

    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    compile: str = "auto"
    threads: int = 0
    checkpoint_every: int = 1
    checkpoint_steps: int = 0
    watch: int = 16
    arm: str | None = None

    def __post_init__(self) -> None:
        if not _DEVICES.fullmatch(self.device):
            raise InputError(
                f"expected run.device to be auto, cpu, cuda, cuda:N or mps, got {self.device!r}"
            )
        check_one_of("run.precision", self.precision, ("auto", "float32", "bfloat16"))
        check_one_of("run.compile", self.compile, ("auto", "on", "off"))
        check_at_least("run.checkpoint_every", self.checkpoint_every, 1)
        for name in ("seed", "threads", "checkpoint_steps", "watch"):
            check_at_least(f"run.{name}", getattr(self, name), 0)
        if self.seed > _LARGEST_SEED:
            raise InputError(f"expected run.seed to be at most 2^63 - 1, got {self.seed}")
