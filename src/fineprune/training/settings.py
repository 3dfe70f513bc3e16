"""The settings of a run, a frozen dataclass a section of a recipe.

A wrong value fails here, before anything is built.
"""

import dataclasses

from fineprune.errors import InputError, check_above, check_at_least, check_between, check_one_of
from fineprune.networks.registry import NETWORKS
from fineprune.pruning.policies.registry import POLICIES

OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "rmsprop-tf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which images, and how they are varied while training.

    Attributes:
        name: ``digits`` (embedded), ``cifar10``, ``cifar100``, ``synthetic`` (images made up, for
            measuring), or ``module:attribute``, a function of your own that returns a training and
            a test data set (map-style, items (x, y)).
        dir: folder of the CIFAR files.
        download: fetch the CIFAR archive if it is not there.
        train_size: images of digits to train on, the rest are for testing; of synthetic, to make.
        image_size: height and width of synthetic images.
        validation: images held back from the training set; evaluation then uses these and leaves
            the test set alone.
        crop_padding: pixels of padding for the random crop; None takes the data set's usual one.
        flip: mirror at random; None takes the data set's usual choice.
        workers: loader processes, for data sets of your own.
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
        if ":" not in self.name:
            check_one_of("data.name", self.name, ("digits", "cifar10", "cifar100", "synthetic"))
        check_at_least("data.train_size", self.train_size, 1)
        check_at_least("data.image_size", self.image_size, 1)
        check_at_least("data.validation", self.validation, 0)
        check_at_least("data.workers", self.workers, 0)
        if self.crop_padding is not None:
            check_at_least("data.crop_padding", self.crop_padding, 0)
        if self.name in ("cifar10", "cifar100") and self.train_size != DataSettings.train_size:
            raise InputError(
                f"expected data.train_size with digits or synthetic only, got {self.train_size} "
                f"with {self.name}: data.validation holds images back"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """Which network.

    Attributes:
        name: a name from ``fineprune.networks``; ``timm:NAME`` or ``torchvision:NAME``; or
            ``module:attribute``, a class or function of your own that is called with the keywords
            ``classes`` and ``channels``.
        classes: number of classes; None asks the data set.
    """

    name: str = "lenet"
    classes: int | None = None

    def __post_init__(self) -> None:
        if ":" not in self.name:
            check_one_of("network.name", self.name, tuple(NETWORKS))
        if self.classes is not None:
            check_at_least("network.classes", self.classes, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How the network is trained.

    Attributes:
        epochs: length of the training.
        batch_size: samples in a batch.
        accumulation: batches in an optimizer step.
        drop_last: leave out an incomplete last batch.
        optimizer: ``sgd``, ``adam``, ``adamw``, ``rmsprop`` or ``rmsprop-tf``.
        lr: the base learning rate.
        schedule: ``milestones``, ``cosine``, ``one-cycle`` or ``constant``.
        milestones: epochs, from 1, after which the rate is multiplied by gamma.
        gamma: that factor.
        warmup: epochs over which the rate rises from 0; for one-cycle, of its rise.
        momentum: of SGD and RMSProp.
        nesterov: of SGD.
        decay: of RMSProp's mean square.
        epsilon: of RMSProp; None takes 1e-8 for torch's form and 1 for TensorFlow's.
        weight_decay: L2, decoupled for AdamW.
        label_smoothing: of the cross-entropy.
        evaluate_every: evaluate after each so many epochs ...
        evaluate_last: ... and after each of the last so many.
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
        rising = list(self.milestones) == sorted(set(self.milestones))
        if not rising or not all(1 <= m <= self.epochs for m in self.milestones):
            raise InputError(
                f"expected training.milestones that rise within 1..{self.epochs}, "
                f"got {list(self.milestones)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruningSettings:
    """What is skipped, and when ([P] Algorithms 1 and 2).

    Windows are of one length (``window``, with ``start`` in epochs), or made from the rate's
    milestones (``windows_per_interval``, with ``start`` a share of each window).

    Attributes:
        policy: ``fine-pruning``, ``random`` or ``full``.
        window, start, attenuation, attenuate, block, count: as in ``Schedule``.
        windows_per_interval: windows between two milestones, in place of ``window``.
        prune: share of the samples to skip, or their number.
        tolerance: share of the mean that a loss may exceed it by without a mark.
    """

    policy: str = "fine-pruning"
    window: int | None = None
    windows_per_interval: int | None = None
    start: int | float = 0
    attenuation: float = 1.0
    attenuate: str = "window"
    block: int = 1
    count: int = 1
    prune: int | float = 0.0
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        check_one_of("pruning.policy", self.policy, tuple(POLICIES))
        if self.policy != "full" and (self.window is None) == (self.windows_per_interval is None):
            raise InputError(
                "expected either pruning.window (epochs) or pruning.windows_per_interval, "
                f"got window={self.window} and windows_per_interval={self.windows_per_interval}"
            )
        if self.window is not None and not isinstance(self.start, int):
            raise InputError(
                f"expected pruning.start in whole epochs beside pruning.window, got {self.start}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where and how the run is carried out; none of it changes the method.

    Attributes:
        seed: of weights, order, ties and augmentation.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps``.
        precision: ``auto``, ``float32`` or ``bfloat16`` (autocast).
        compile: ``auto``, ``on`` or ``off``: train the network through ``torch.compile``, on a GPU
            with CUDA graphs.
        threads: CPU threads of torch; 0 takes the machine's cores.
        checkpoint_every: epochs between checkpoints.
        checkpoint_steps: also after each so many batches inside an epoch; 0 for never.
        watch: training samples whose loss is recorded at each evaluation (Figure 2).
    """

    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    compile: str = "auto"
    threads: int = 0
    checkpoint_every: int = 1
    checkpoint_steps: int = 0
    watch: int = 16

    def __post_init__(self) -> None:
        check_one_of("run.precision", self.precision, ("auto", "float32", "bfloat16"))
        check_one_of("run.compile", self.compile, ("auto", "on", "off"))
        check_at_least("run.checkpoint_every", self.checkpoint_every, 1)
        for name in ("seed", "threads", "checkpoint_steps", "watch"):
            check_at_least(f"run.{name}", getattr(self, name), 0)
