"""Recipes: everything that defines a run, as frozen dataclasses and as TOML.

All validation of settings stands here, so that a wrong value fails before anything is built.
"""

import dataclasses
import difflib
import json
import math
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from fineprune.networks.registry import NETWORKS
from fineprune.pruning.policies.fine_pruning import FinePruning
from fineprune.pruning.policies.full import FullData
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.policies.random import RandomPruning
from fineprune.pruning.schedule import Schedule

_OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "rmsprop-tf")


# Settings that would do nothing with other data, and nobody would know.
_OF_SOME_DATA = {
    "download": ("cifar10", "cifar100"),
    "train_size": ("digits", "synthetic"),
    "image_size": ("synthetic",),
    "workers": ("module:attribute",),
}


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
        data = "module:attribute" if ":" in self.name else self.name
        for field in dataclasses.fields(self):
            users = _OF_SOME_DATA.get(field.name, (data,))
            given = getattr(self, field.name)
            if data not in users and given != field.default:
                raise ValueError(
                    f"expected data.{field.name} with {' or '.join(users)} only, got "
                    f"{json.dumps(given)} with data.name {self.name!r}: leave it out"
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run: data, network, training, pruning, how it is spread and how it is run."""

    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    network: NetworkSettings = dataclasses.field(default_factory=NetworkSettings)
    training: TrainingSettings = dataclasses.field(default_factory=TrainingSettings)
    pruning: PruningSettings = dataclasses.field(
        default_factory=lambda: PruningSettings(policy="full")
    )
    distributed: DistributedSettings = dataclasses.field(default_factory=DistributedSettings)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        self.policy()  # a schedule that cannot be fails here
        if self.distributed.served:
            self._check_served()

    def _check_served(self) -> None:
        """Raise ValueError where the recipe asks for what parameter servers do not do."""
        for section, name, usual, instead in (
            ("training", "accumulation", 1, "set training.batch_size and distributed.workers"),
            ("training", "drop_last", False, "the last update averages what is left"),
            ("run", "checkpoint_steps", 0, "checkpoints are made between epochs"),
        ):
            given = getattr(getattr(self, section), name)
            if given != usual:
                raise ValueError(
                    f"expected {section}.{name} = {json.dumps(usual)} with distributed.strategy "
                    f"{self.distributed.strategy!r}, got {json.dumps(given)}: {instead}"
                )
        if self.run.compile == "on":
            raise ValueError(
                f'expected run.compile = "off" with distributed.strategy '
                f'{self.distributed.strategy!r}, got "on": workers train the network as it is'
            )
        if self.run.device.partition(":")[2]:
            raise ValueError(
                f"expected run.device without a number with distributed.strategy "
                f"{self.distributed.strategy!r}, got {self.run.device!r}: a worker is given its GPU"
            )

    def policy(self) -> Policy:
        """Make the policy that the pruning section describes."""
        if self.pruning.policy == "full":
            return FullData(self.training.epochs)
        schedule = self.schedule()
        if self.pruning.policy == "random":
            return RandomPruning(schedule, self.pruning.prune)
        return FinePruning(schedule, self.pruning.prune, self.pruning.tolerance)

    def schedule(self) -> Schedule:
        """Make the schedule that the pruning section describes."""
        given = self.pruning
        rest: dict[str, Any] = {
            "attenuation": given.attenuation,
            "block": given.block,
            "count": given.count,
            "attenuate": given.attenuate,
        }
        if given.window is not None:
            assert isinstance(given.start, int)
            return Schedule(self.training.epochs, given.window, given.start, **rest)
        return Schedule.from_milestones(
            self.training.epochs,
            [m for m in self.training.milestones if m < self.training.epochs],
            given.windows_per_interval or 1,
            start=given.start,
            **rest,
        )

    def replaced(self, section: str, **values: Any) -> "Recipe":
        """Return a copy with some values of one section replaced."""
        changed = dataclasses.replace(getattr(self, section), **values)
        return dataclasses.replace(self, **{section: changed})

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the sections as plain dicts of what TOML can hold; values of None left out."""
        return {
            section: {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in values.items()
                if value is not None
            }
            for section, values in dataclasses.asdict(self).items()
        }

    def to_toml(self) -> str:
        """Write the recipe as TOML, complete."""
        lines: list[str] = []
        for section, values in self.as_dict().items():
            lines.append(f"[{section}]")
            # JSON's strings, numbers, booleans and lists of them are TOML's too.
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
            lines.append("")
        return "\n".join(lines)


def read_recipe(path: Path, changes: Iterable[str] = ()) -> Recipe:
    """Read a recipe from TOML.

    Args:
        path: the file.
        changes: ``section.key=value`` each, applied over the file's values.

    Raises:
        ValueError: the file is not there, not TOML, or holds a wrong key or value.
    """
    try:
        text = path.read_text(encoding="utf-8")
        sections = tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"expected a recipe file, cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"expected TOML in {path}: {error}") from error
    return make_recipe(sections, changes)


def make_recipe(sections: Mapping[str, Any], changes: Iterable[str] = ()) -> Recipe:
    """Make a recipe from nested mappings, with ``section.key=value`` changes over them.

    Raises:
        ValueError: a key is not known (the nearest one is named) or a value is wrong.
    """
    merged = {key: dict(_section(key, value)) for key, value in sections.items()}
    for change in changes:
        name, separator, text = change.partition("=")
        section, dot, key = name.strip().partition(".")
        if not separator or not dot:
            raise ValueError(f"expected --set section.key=value, got {change!r}")
        merged.setdefault(section, {})[key] = _parsed(text.strip())
    hints = get_type_hints(Recipe)
    made: dict[str, Any] = {}
    for section, values in merged.items():
        _known("section", section, hints)
        made[section] = _make_section(section, hints[section], values)
    return Recipe(**made)


def _section(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected [{key}] to be a section with keys, got {key} = {value!r}")
    return value


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string


def _make_section(section: str, settings: Any, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(settings)
    converted: dict[str, Any] = {}
    for key, value in values.items():
        _known(f"key in [{section}]", key, hints)
        converted[key] = _converted(f"{section}.{key}", hints[key], value)
    return settings(**converted)


def _known(kind: str, given: str, known: Mapping[str, Any]) -> None:
    if given not in known:
        near = difflib.get_close_matches(given, known, n=1, cutoff=0.0)
        raise ValueError(f"expected a known {kind}, got {given!r}: did you mean {near[0]!r}?")


def _converted(name: str, hint: Any, value: Any) -> Any:
    """Check a value against a field's type; whole numbers pass where a float is expected."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        if get_origin(option) is tuple and isinstance(value, list):
            return tuple(_converted(name, get_args(option)[0], entry) for entry in value)
        if isinstance(option, type) and type(value) is option:
            return value
    if float in options and type(value) is int:
        return float(value)
    kinds = " or ".join(
        "list" if get_origin(option) is tuple else option.__name__
        for option in options
        if option is not type(None)
    )
    raise ValueError(f"expected {name} to be {kinds}, got {value!r}")


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
