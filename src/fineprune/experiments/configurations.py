"""Parses configurations of workers and servers such as ``async 4+3 dedicated`` ([D] Table 1)."""

import dataclasses
import re
import sys
from typing import Any

from fineprune.distributed.strategy import OF_ANY_SERVERS, Strategy
from fineprune.errors import InputError
from fineprune.experiments.controls import with_epochs
from fineprune.launch.slurm import torchrun_in_job
from fineprune.training.recipe import Recipe

ONE, ALL_REDUCE = "one", "all-reduce"
_MOST_SEEDS = 100
_SERVED = ("sync", "async", "mixed")
_OPTION_WORDS = r"((?: [a-z]+=[0-9.e-]{1,12})*)"
_FORM = re.compile(
    rf"({'|'.join(_SERVED)}) (\d{{1,4}})\+(\d{{1,4}})( dedicated| shared)?{_OPTION_WORDS}"
)
_ALONE = re.compile(rf"{ONE}{_OPTION_WORDS}")
_REDUCED = re.compile(rf"{ALL_REDUCE} (\d{{1,4}}){_OPTION_WORDS}")
# The options that are settings of ``distributed``, which only the text of a configuration changes.
OF_SERVERS = {"group": "group", "backup": "backup", "bound": "staleness_bound"}
# Settings of ``distributed`` that a recipe chooses for the asynchronous configurations, besides
# those of any servers. The text of a configuration says all others.
_OF_ASYNCHRONOUS = ("rate_by_staleness",)
# The options that every form has.
_OF_TRAINING = ("lr", "epochs", "seeds")
_EXAMPLES = "'one', 'all-reduce 2' or 'async 4+3 dedicated'"
_SYNTAX = (
    "write sync, async or mixed, then workers+servers, and optionally shared or dedicated, and "
    "group=, backup=, bound=, lr=, epochs= or seeds="
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The workers and servers that train a recipe.

    Attributes:
        text: The configuration as text, in its normal form.
        strategy: The strategy: ``one`` (a single process), ``all-reduce``, ``sync``, ``async`` or
            ``mixed``.
        workers: The number of replicas of the model.
        distributed: The ``distributed`` section of a recipe with these workers and servers.
        group: The number of workers per node: those of a group, whose gradients are averaged there.
        training: The settings of the recipe's ``training`` section that differ: ``lr`` and
            ``epochs``.
        seeds: The number of runs, each with another seed.
    """

    text: str
    strategy: str
    workers: int
    distributed: Strategy
    group: int = 1
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    seeds: int = 1

    @property
    def servers(self) -> int:
        """The number of parameter servers."""
        return self.distributed.servers if self.distributed.served else 0

    @property
    def dedicated(self) -> bool:
        """Whether the servers have nodes of their own."""
        return self.distributed.placement == "dedicated"

    @property
    def averaged(self) -> int:
        """The number of workers whose gradients an update averages."""
        reduced = self.strategy == ALL_REDUCE
        return self.workers if reduced else self.distributed.batches_per_update

    @property
    def nodes(self) -> int:
        """The number of nodes: a worker with its group, or a dedicated server, is a node."""
        return self.nodes_with(self.group)

    def nodes_with(self, workers: int) -> int:
        """Return the number of nodes, each with so many workers or a dedicated server."""
        return -(-self.workers // workers) + (self.servers if self.dedicated else 0)

    @property
    def accelerators(self) -> int:
        """The number of accelerators that the nodes have, if all have as many as a worker's."""
        return self.nodes * self.group

    @property
    def folder(self) -> str:
        """The name of the folder of the configuration's first run."""
        return re.sub(r"[^a-z0-9]+", "-", self.text)


def configuration(text: str) -> Configuration:
    """Parse a configuration.

    Args:
        text: The text: ``one``; ``all-reduce N`` for N processes; or ``sync``, ``async`` or
            ``mixed``, followed by ``N+S`` for N workers and S servers, and optionally by ``shared``
            or ``dedicated`` for the placement of the servers. Options follow, each with a number:
            ``group=`` (the workers per node: all of them with ``all-reduce``, one of ``mixed``),
            ``backup=`` and ``bound=`` with servers, and always ``lr=``, ``epochs=``, ``seeds=``.
    """
    words = " ".join(text.split())
    if found := _ALONE.fullmatch(words):
        _, training, seeds = _options(found[1], (), text)
        return Configuration(words, ONE, 1, Strategy(), 1, training, seeds)
    if found := _REDUCED.fullmatch(words):
        workers = int(found[1])
        if workers < 2:
            raise InputError(f"expected at least two processes for all-reduce, got {text!r}")
        own, training, seeds = _options(found[2], ("group",), text)
        group = own.get("group", workers)  # Without group=, all of them are on one node.
        if group < 1 or workers % group:
            raise InputError(f"expected group= to divide the {workers} processes, got {text!r}")
        return Configuration(words, ALL_REDUCE, workers, Strategy(), group, training, seeds)
    found = _FORM.fullmatch(words)
    if found is None:
        raise InputError(f"expected a configuration such as {_EXAMPLES}, got {text!r}: {_SYNTAX}")
    own, training, seeds = _options(found[5], tuple(OF_SERVERS), text)
    made = Strategy(
        strategy=found[1],
        workers=int(found[2]),
        servers=int(found[3]),
        placement=(found[4] or "shared").strip(),
        **{OF_SERVERS[name]: value for name, value in own.items()},
    )
    words = words.replace(" shared", "")
    return Configuration(words, made.strategy, made.workers, made, made.group, training, seeds)


def _options(
    words: str, own: tuple[str, ...], text: str
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the options of a form, the settings of the training, and the number of seeds."""
    found: dict[str, Any] = {}
    known = (*own, *_OF_TRAINING)
    for option in words.split():
        name, _, value = option.partition("=")
        if name not in known:
            raise InputError(f"expected one of {', '.join(known)}, got {name!r} in {text!r}")
        if name in found:
            raise InputError(f"expected {name}= once, got {text!r}")
        try:
            found[name] = float(value) if name == "lr" else int(value)
        except ValueError as error:
            kind = "a number" if name == "lr" else "a whole number"
            raise InputError(f"expected {kind} as {name}=, got {value!r} in {text!r}") from error
    seeds = found.pop("seeds", 1)
    if not 1 <= seeds <= _MOST_SEEDS:
        raise InputError(f"expected seeds= from 1 to {_MOST_SEEDS}, got {text!r}")
    training: dict[str, Any] = {n: found.pop(n) for n in ("lr", "epochs") if n in found}
    return found, training, seeds


def configured(recipe: Recipe, chosen: Configuration, *, same_update: bool) -> Recipe:
    """Return the recipe that trains with a configuration.

    Milestones and the warm-up of the learning rate move in proportion to the epochs.

    Args:
        recipe: The recipe. Its strategy, workers and servers do not count.
        chosen: The configuration.
        same_update: Whether to divide ``training.batch_size`` by the number of gradients that an
            update averages. If true, an update uses the same number of samples in every
            configuration; if false, every worker has the batch size of the recipe.
    """
    asynchronous = chosen.strategy in ("async", "mixed")
    kept = (*OF_ANY_SERVERS, *_OF_ASYNCHRONOUS) if asynchronous else OF_ANY_SERVERS
    given = {name: getattr(recipe.distributed, name) for name in kept}
    distributed = dataclasses.replace(chosen.distributed, **given)
    result = dataclasses.replace(recipe, distributed=distributed)
    if "epochs" in chosen.training:
        result = with_epochs(result, chosen.training["epochs"])
    if "lr" in chosen.training:
        result = result.replaced("training", lr=chosen.training["lr"])
    if same_update:
        size, rest = divmod(recipe.training.batch_size, chosen.averaged)
        if rest:
            raise InputError(
                f"expected training.batch_size to be a multiple of the {chosen.averaged} gradients "
                f"that an update of {chosen.text!r} averages, got {recipe.training.batch_size}"
            )
        result = result.replaced("training", batch_size=size)
    return result


def launcher(chosen: Configuration) -> list[str]:
    """Return the command that starts a configuration's processes, before ``-m fineprune``."""
    if chosen.strategy != ALL_REDUCE:
        return [sys.executable]
    in_job = torchrun_in_job(chosen.nodes, chosen.group)
    if in_job is not None:
        return in_job
    # Each run has its own rendezvous store, on a free port of the loopback interface.
    return [
        sys.executable,
        "-m",
        "fineprune.launch.torchrun",
        f"--nproc-per-node={chosen.workers}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
    ]
