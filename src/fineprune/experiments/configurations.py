"""Configurations of a cluster in a few words, as the paper has them: ``async 4+3 dedicated``."""

import dataclasses
import re
from typing import Any

from fineprune.errors import InputError
from fineprune.training.recipe import Recipe

ONE, ALL_REDUCE = "one", "all-reduce"
_SERVED = ("sync", "async", "mixed")
_FORM = re.compile(rf"({'|'.join(_SERVED)}) (\d+)\+(\d+)( dedicated| shared)?((?: [a-z]+=\d+)*)")
_OPTIONS = {"group": "group", "backup": "backup", "bound": "staleness_bound"}
_FORMS = (
    "'one', 'all-reduce 2', or 'async 4+3 dedicated': sync, async or mixed, workers+servers, "
    "shared or dedicated, and group=, backup= or bound= where wanted"
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Who trains.

    Attributes:
        text: as it was asked for, in one form.
        strategy: ``one`` (a process alone), ``all-reduce``, ``sync``, ``async`` or ``mixed``.
        workers: replicas of the model.
        servers: parameter servers.
        settings: of the recipe's ``distributed`` section.
    """

    text: str
    strategy: str
    workers: int
    servers: int
    settings: dict[str, Any]

    @property
    def nodes(self) -> int:
        """What is paid for: workers and dedicated servers; shared servers are on workers' nodes."""
        dedicated = self.settings.get("placement") == "dedicated"
        return self.workers + (self.servers if dedicated else 0)

    @property
    def folder(self) -> str:
        """A name for files."""
        return re.sub(r"[^a-z0-9]+", "-", self.text)


def configuration(text: str) -> Configuration:
    """Read a configuration.

    Args:
        text: ``one``; ``all-reduce N``; ``sync``, ``async`` or ``mixed``, then ``N+S`` for N
            workers and S servers, then ``dedicated`` where the servers have nodes of their own, and
            ``group=``, ``backup=`` or ``bound=`` with a number.

    Raises:
        InputError: it is none of these.
    """
    words = " ".join(text.split())
    if words == ONE:
        return Configuration(words, ONE, 1, 0, {})
    if found := re.fullmatch(rf"{ALL_REDUCE} (\d+)", words):
        workers = int(found[1])
        if workers < 2:
            raise InputError(f"expected at least two processes for all-reduce, got {text!r}")
        return Configuration(words, ALL_REDUCE, workers, 0, {})
    found = _FORM.fullmatch(words)
    if found is None:
        raise InputError(f"expected a configuration such as {_FORMS}; got {text!r}")
    strategy, workers, servers = found[1], int(found[2]), int(found[3])
    settings: dict[str, Any] = {"strategy": strategy, "workers": workers, "servers": servers}
    settings["placement"] = (found[4] or "shared").strip()
    for option in found[5].split():
        name, _, value = option.partition("=")
        if name not in _OPTIONS:
            raise InputError(f"expected one of {', '.join(_OPTIONS)}, got {name!r} in {text!r}")
        settings[_OPTIONS[name]] = int(value)
    return Configuration(words.replace(" shared", ""), strategy, workers, servers, settings)


def configured(recipe: Recipe, asked: Configuration, *, same_update: bool) -> Recipe:
    """Return the recipe as a configuration trains it.

    Args:
        recipe: of one process.
        asked: the configuration.
        same_update: divide ``training.batch_size`` by the gradients that an update averages, so
            that updates are of as many samples in all configurations; else every worker's batch
            is the recipe's.

    Raises:
        InputError: the settings do not fit together, or the batch does not divide.
    """
    made = recipe.replaced("distributed", **asked.settings) if asked.settings else recipe
    if same_update:
        averaged = (
            asked.workers if asked.strategy == ALL_REDUCE else made.distributed.batches_per_update
        )
        # A group splits its batch over its members by itself.
        size, rest = divmod(recipe.training.batch_size, averaged)
        if rest:
            raise InputError(
                f"expected training.batch_size to be a multiple of the {averaged} gradients that "
                f"an update of {asked.text!r} averages, got {recipe.training.batch_size}"
            )
        made = made.replaced("training", batch_size=size)
    return made
