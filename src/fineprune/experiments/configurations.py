"""Parses configurations of workers and servers such as ``async 4+3 dedicated`` ([D] Table 1)."""

import dataclasses
import re
import sys
from typing import Any

from fineprune.distributed.strategy import OF_ANY_SERVERS, Strategy
from fineprune.errors import InputError
from fineprune.launch.slurm import torchrun_in_job
from fineprune.training.recipe import Recipe

ONE, ALL_REDUCE = "one", "all-reduce"
_FORM = re.compile(
    rf"(?:{ONE}|{ALL_REDUCE} (?P<processes>\d{{1,4}})|(?P<strategy>sync|async|mixed) "
    r"(?P<workers>\d{1,4})\+(?P<servers>\d{1,4})(?: (?P<placement>dedicated|shared))?)"
    r"(?P<options>(?: [a-z]+=[0-9.e-]{1,12})*)"
)
# The options that are settings of ``distributed``, which only the text of a configuration changes.
OF_SERVERS = {"group": "group", "backup": "backup", "bound": "staleness_bound"}
# Settings of ``distributed`` that a recipe chooses for the asynchronous configurations, besides
# those of any servers. The text of a configuration says all others.
_OF_ASYNCHRONOUS = ("rate_by_staleness",)


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
        lr: The learning rate; None for that of the recipe.
    """

    text: str
    strategy: str
    workers: int
    distributed: Strategy
    group: int = 1
    lr: float | None = None

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
            ``backup=`` and ``bound=`` with servers, and always ``lr=``.
    """
    found = _FORM.fullmatch(" ".join(text.split()))
    if found is None:
        raise InputError(
            f"expected a configuration such as 'one', 'all-reduce 2' or 'async 4+3 dedicated', got "
            f"{text!r}: write sync, async or mixed, then workers+servers, and optionally shared or "
            f"dedicated, and group=, backup=, bound= or lr="
        )
    form, words = found[0].removesuffix(found["options"]), found["options"].split()
    own = OF_SERVERS if found["strategy"] else ("group",) if found["processes"] else ()
    options = dict(_option(word, (*own, "lr"), text) for word in words)
    if len(options) < len(words):
        raise InputError(f"expected each option once, got {text!r}")
    normal = " ".join([form.removesuffix(" shared"), *(f"{n}={v:g}" for n, v in options.items())])
    lr = options.pop("lr", None)
    integers: dict[str, Any] = {name: int(value) for name, value in options.items()}
    if found["strategy"]:
        made = Strategy(
            strategy=found["strategy"],
            workers=int(found["workers"]),
            servers=int(found["servers"]),
            placement=found["placement"] or "shared",
            **{OF_SERVERS[name]: value for name, value in integers.items()},
        )
        return Configuration(normal, made.strategy, made.workers, made, made.group, lr)
    if not found["processes"]:
        return Configuration(normal, ONE, 1, Strategy(), 1, lr)
    workers = int(found["processes"])
    if workers < 2:
        raise InputError(f"expected at least two processes for all-reduce, got {text!r}")
    group = integers.get("group", workers)  # Without group=, all of them are on one node.
    if group < 1 or workers % group:
        raise InputError(f"expected group= to divide the {workers} processes, got {text!r}")
    return Configuration(normal, ALL_REDUCE, workers, Strategy(), group, lr)


def _option(word: str, known: tuple[str, ...], text: str) -> tuple[str, float]:
    """Return the name and the number of an option."""
    name, _, value = word.partition("=")
    if name not in known:
        raise InputError(f"expected one of {', '.join(known)}, got {name!r} in {text!r}")
    try:
        return name, float(value) if name == "lr" else int(value)
    except ValueError as error:
        kind = "a number" if name == "lr" else "a whole number"
        raise InputError(f"expected {kind} as {name}=, got {value!r} in {text!r}") from error


def configured(recipe: Recipe, chosen: Configuration, *, same_update: bool = False) -> Recipe:
    """Return the recipe that trains with a configuration.

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
    if chosen.lr is not None:
        result = result.replaced("training", lr=chosen.lr)
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
        *(sys.executable, "-m", "fineprune.launch.torchrun", f"--nproc-per-node={chosen.workers}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
    ]
