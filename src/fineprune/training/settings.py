"""The settings of a run, a frozen dataclass a section of a recipe.

A wrong value fails here, before anything is built.
"""

import dataclasses
import difflib
import math

from fineprune.networks.registry import NETWORKS

_OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "rmsprop-tf")


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
            _one_of("data.name", self.name, ("digits", "cifar10", "cifar100", "synthetic"))
        _at_least("data.train_size", self.train_size, 1)
        _at_least("data.image_size", self.image_size, 1)
        _at_least("data.validation", self.validation, 0)
        _at_least("data.workers", self.workers, 0)
        if self.crop_padding is not None:
            _at_least("data.crop_padding", self.crop_padding, 0)
        if self.name in ("cifar10", "cifar100") and self.train_size != DataSettings.train_size:
            raise ValueError(
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
            _one_of("network.name", self.name, tuple(NETWORKS))
        if self.classes is not None:
            _at_least("network.classes", self.classes, 1)


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
            _at_least(f"training.{name}", getattr(self, name), 1)
        _one_of("training.optimizer", self.optimizer, _OPTIMIZERS)
        _one_of(
            "training.schedule", self.schedule, ("milestones", "cosine", "one-cycle", "constant")
        )
        _above("training.lr", self.lr, 0)
        _above("training.gamma", self.gamma, 0)
        _between("training.momentum", self.momentum, 0, 1)
        _between("training.decay", self.decay, 0, 1)
        if self.epsilon is not None:
            _above("training.epsilon", self.epsilon, 0)
        _between("training.label_smoothing", self.label_smoothing, 0, 1)
        _at_least("training.weight_decay", self.weight_decay, 0)
        _between("training.warmup", self.warmup, 0, self.epochs)
        if self.nesterov and self.momentum == 0:
            raise ValueError("expected training.momentum above 0 with training.nesterov, got 0")
        rising = list(self.milestones) == sorted(set(self.milestones))
        if not rising or not all(1 <= m <= self.epochs for m in self.milestones):
            raise ValueError(
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
        _one_of("pruning.policy", self.policy, ("fine-pruning", "random", "full"))
        if self.policy != "full" and (self.window is None) == (self.windows_per_interval is None):
            raise ValueError(
                "expected either pruning.window (epochs) or pruning.windows_per_interval, "
                f"got window={self.window} and windows_per_interval={self.windows_per_interval}"
            )
        if self.window is not None and not isinstance(self.start, int):
            raise ValueError(
                f"expected pruning.start in whole epochs beside pruning.window, got {self.start}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedSettings:
    """How the training is spread. Under ``torchrun`` it is by all-reduce, with nothing to set.

    With parameter servers ``training.batch_size`` is each worker's.

    Attributes:
        strategy: ``none``, or with parameter servers ``sync``, ``async`` or ``mixed``.
        workers: replicas of the model.
        group: replicas that average their gradients before one of them pushes; ``mixed`` only.
        backup: of the workers, how many a synchronous update does not wait for.
        servers: parameter servers, each with an equal part of the parameters.
        placement: ``shared``, servers on the workers' nodes, or ``dedicated``.
        staleness_bound: updates that an asynchronous gradient may be behind; None for any.
        rate_by_staleness: divide the rate of an asynchronous update by its staleness.
        gradients: ``float32`` or ``bfloat16``, as they travel.
        simulate: asynchronous workers to simulate in one process; 0 for none.
    """

    strategy: str = "none"
    workers: int = 2
    group: int = 1
    backup: int = 0
    servers: int = 1
    placement: str = "shared"
    staleness_bound: int | None = None
    rate_by_staleness: bool = False
    gradients: str = "float32"
    simulate: int = 0

    def __post_init__(self) -> None:
        _one_of("distributed.strategy", self.strategy, ("none", "sync", "async", "mixed"))
        _one_of("distributed.placement", self.placement, ("shared", "dedicated"))
        _one_of("distributed.gradients", self.gradients, ("float32", "bfloat16"))
        for name in ("workers", "group", "servers"):
            _at_least(f"distributed.{name}", getattr(self, name), 1)
        for name in ("backup", "simulate"):
            _at_least(f"distributed.{name}", getattr(self, name), 0)
        if self.staleness_bound is not None:
            _at_least("distributed.staleness_bound", self.staleness_bound, 0)
        if self.backup >= self.workers:
            raise ValueError(
                f"expected distributed.backup below distributed.workers, got {self.backup} of "
                f"{self.workers}"
            )
        if self.workers % self.group:
            raise ValueError(
                f"expected distributed.workers to be a multiple of distributed.group, got "
                f"{self.workers} and {self.group}"
            )
        only = {
            "group": (self.group > 1, ("mixed",)),
            "backup": (self.backup > 0, ("sync",)),
            "staleness_bound": (self.staleness_bound is not None, ("async", "mixed")),
            "rate_by_staleness": (self.rate_by_staleness, ("async", "mixed")),
            "simulate": (self.simulate > 0, ("none",)),
        }
        for name, (given, strategies) in only.items():
            if given and self.strategy not in strategies:
                raise ValueError(
                    f"expected distributed.{name} with strategy {' or '.join(strategies)} only, "
                    f"got it with {self.strategy!r}"
                )

    @property
    def served(self) -> bool:
        """Whether the training is spread over parameter servers."""
        return self.strategy != "none"

    @property
    def batches_an_update(self) -> int:
        """Workers' batches whose mean gradient makes one update of the parameter servers."""
        if self.strategy == "sync":
            return self.workers - self.backup
        return self.group


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
        _one_of("run.precision", self.precision, ("auto", "float32", "bfloat16"))
        _one_of("run.compile", self.compile, ("auto", "on", "off"))
        _at_least("run.checkpoint_every", self.checkpoint_every, 1)
        for name in ("seed", "threads", "checkpoint_steps", "watch"):
            _at_least(f"run.{name}", getattr(self, name), 0)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1, cutoff=0.0)
        raise ValueError(
            f"expected {name} to be one of {', '.join(known)}, got {value!r}: "
            f"did you mean {near[0]!r}?"
        )


def _at_least(name: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"expected {name} to be at least {least}, got {value}")


def _above(name: str, value: float, bound: float) -> None:
    if not (math.isfinite(value) and value > bound):
        raise ValueError(f"expected {name} to be above {bound}, got {value}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"expected {name} in [{low}, {high}], got {value}")
