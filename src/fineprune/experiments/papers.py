"""The experiments of both papers, at their own size or at one for two CPU cores.

[P] data fine-pruning is a comparison for each network, [D] distributed training strategies one
scaling experiment. So both continue where they stopped, and every verb takes their folders.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fineprune.datasets.cifar import CIFAR10
from fineprune.errors import InputError
from fineprune.experiments.compare import compare
from fineprune.experiments.configurations import configuration
from fineprune.experiments.controls import FULL, MATCHED, SHORTER, WATCHED
from fineprune.experiments.planned_run import OnProgress, named
from fineprune.experiments.scale import scale
from fineprune.training.hardware import available_cores, resolved
from fineprune.training.recipe import Recipe, read_recipe

# The ten networks of [P] Tables 1 and 2, in their order.
NETWORKS = (
    *("lenet", "vgg13", "vgg16", "vgg19", "resnet18"),
    *("resnet34", "resnet50", "wrn10", "wrn16", "wrn22"),
)
_ARMS = (FULL, "fine-pruning", MATCHED, SHORTER)
_SEEDS = {"lenet": 3}


class _Small(NamedTuple):
    """A training for two CPU cores: the number of samples and epochs, and the learning rate."""

    samples: int
    epochs: int
    lr: float


_SMALL_ONE = {
    "digits": {"lenet": _Small(1024, 200, 0.02), "resnet18": _Small(1024, 40, 0.1)},
    "cifar10": {"lenet": _Small(10_000, 50, 0.05), "resnet18": _Small(2_000, 30, 0.1)},
}

# The configurations of [D], and those that the forecast and the other strategies need. A node has
# two workers in the small one, and four in the paper's.
SMALL_TWO = (
    *("one", "all-reduce 2", "async 1+1", "sync 2+1", "async 2+1", "async 2+2"),
    *("mixed 4+1 group=2", "mixed 4+2 group=2"),
)
FULL_TWO = (
    *("one", "all-reduce 2", "all-reduce 4", "async 1+1", "sync 16+3", "async 16+3"),
    *("mixed 8+1 group=4", "mixed 16+1 group=4", "mixed 16+3 group=4"),
    *("mixed 16+3 dedicated group=4", "mixed 32+7 group=4"),
)


def paper_one(
    folder: Path,
    changes: Sequence[str] = (),
    *,
    full: bool = False,
    seeds: int = 0,
    jobs: int = 0,
    on_progress: OnProgress = lambda line, done, total: None,
) -> Iterator[list[Path]]:
    """Train the networks of [P], each with regular training, fine-pruning and two controls.

    Args:
        folder: The folder to which the comparison of each network is written.
        changes: Changes of all recipes, as for ``read_recipe``.
        full: Whether to train all ten networks for 200 epochs on CIFAR-10.
        seeds: The number of runs of each arm; 0 for three of LeNet and one of the others.
        jobs: The number of runs at the same time; 0 for one per core (at most two) in the small
            training, and for one in the full one.
        on_progress: See ``OnProgress``.

    Yields:
        The folders of the comparisons that are finished, after each network.
    """
    finished: list[Path] = []
    for network in NETWORKS if full else _SMALL_ONE["digits"]:
        recipe = recipe_one(network, changes, full=full)
        small_jobs = min(2, available_cores()) if resolved(recipe).run.device == "cpu" else 1
        title = f"paper 1, {network}"
        for arms, number in ((_ARMS, seeds or _SEEDS.get(network, 1)), ((WATCHED,), 2)):
            if arms == _ARMS or network == "lenet":  # Figure 2 shows two runs of one network.
                compare(
                    recipe,
                    folder / network,
                    title=title,
                    seeds=number,
                    arms=arms,
                    jobs=jobs or (1 if full else small_jobs),
                    on_progress=named(network, on_progress),
                )
        finished.append(folder / network)
        yield finished


def recipe_one(network: str, changes: Sequence[str], *, full: bool) -> Recipe:
    """Return the recipe of a network of [P]; see ``paper_one``.

    If the epochs differ from the recipe's, milestones and windows change in proportion.
    """
    file = Path(f"paper/{network}")
    of_epochs = [change for change in changes if change.startswith("training.epochs=")]
    others = [change for change in changes if change not in of_epochs]
    whole = read_recipe(file, others)
    if whole.network.name not in NETWORKS or "window" not in whole.pruning.arguments:
        raise InputError(
            f"expected one of the paper's networks with fine-pruning, got {whole.network.name!r} "
            f"with {whole.pruning.policy!r}: leave out network.name and pruning.policy"
        )
    if full:
        return read_recipe(file, changes)
    name = "cifar10" if _has_cifar10(whole) else "digits"
    size = _SMALL_ONE[name][network]
    small = [f"data.name={name}", f"data.train_size={size.samples}", f"training.lr={size.lr}"]
    small += ["training.evaluate_every=5", "training.evaluate_last=3", "run.threads=1"]
    recipe = read_recipe(file, [*small, *others])
    any_epochs = [f"training.epochs={size.epochs}", *of_epochs, "training.milestones=[]"]
    epochs = read_recipe(file, any_epochs).training.epochs
    ratio = epochs / recipe.training.epochs
    window = max(2, round(recipe.pruning.arguments["window"] * ratio))
    given = {change.partition("=")[0] for change in changes}
    scaled = {"window": window, "start": window // 2}
    unset = {key: value for key, value in scaled.items() if f"pruning.{key}" not in given}
    milestones = sorted({max(1, round(old * ratio)) for old in recipe.training.milestones})
    shorter = recipe.replaced("training", epochs=epochs, milestones=tuple(milestones))
    return shorter.replaced("pruning", **unset)


def paper_two(
    folder: Path,
    changes: Sequence[str] = (),
    *,
    full: bool = False,
    seeds: int = 0,
    on_progress: OnProgress = lambda line, done, total: None,
) -> None:
    """Train the configurations of [D]; the folder is then that of a scaling experiment.

    Args:
        folder: The folder of the runs.
        changes: Changes of the recipe, as for ``read_recipe``.
        full: Whether to train ResNet-50 as in the paper, with its configurations. They need the
            data and a cluster.
        seeds: The number of runs of each configuration; 0 for three, in the full one for one.
        on_progress: See ``OnProgress``.
    """
    recipe = recipe_two(changes, full=full)
    scale(
        recipe,
        folder,
        [configuration(text) for text in (FULL_TWO if full else SMALL_TWO)],
        title="paper 2",
        seeds=seeds or (1 if full else 3),
        on_progress=on_progress,
    )


def recipe_two(changes: Sequence[str], *, full: bool) -> Recipe:
    """Return the recipe of [D]; see ``paper_two``."""
    if full:
        recipe = read_recipe(Path("paper/mvso-resnet50"), changes)
        if not recipe.data.train or not Path(recipe.data.train).exists():
            raise InputError(
                f"expected the training images in {recipe.data.train}, found none: see "
                f"docs/mvso.md, or set data.name, data.train and data.test to other data"
            )
        return recipe
    recipe = read_recipe(Path("strategies"), changes)
    if not _has_cifar10(recipe):
        return recipe
    size = ("data.train_size=10000", "training.batch_size=128", "training.lr=0.1")
    return read_recipe(Path("strategies"), ["data.name=cifar10", *size, *changes])


def _has_cifar10(recipe: Recipe) -> bool:
    folder = Path(recipe.data.dir)
    places = (CIFAR10.train[0][0], CIFAR10.folder, CIFAR10.file)
    return any((folder / place).exists() for place in places)
