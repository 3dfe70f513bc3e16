"""Parses configurations of workers and servers such as ``async 4+3 dedicated`` ([D] Table 1)."""

import dataclasses
import re
from typing import Any

from fineprune.errors import InputError
from fineprune.training.recipe import Recipe

ONE, ALL_REDUCE = "one", "all-reduce"
_SERVED = ("sync", "async", "mixed")
_FORM = re.compile(
    rf"({'|'.join(_SERVED)}) (\d{{1,4}})\+(\d{{1,4}})( dedicated| shared)?((?: [a-z]+=\d{{1,4}})*)"
)
_OPTIONS = {"group": "group", "backup": "backup", "bound": "staleness_bound"}
_EXAMPLES = "'one', 'all-reduce 2' or 'async 4+3 dedicated'"
_SYNTAX = (
    "write sync, async or mixed, then workers+servers, and optionally shared or dedicated, and "
    "group=, backup= or bound="
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The workers and servers that train a recipe.

    Attributes:
        text: The configuration as text, in its normal form.
        strategy: The strategy: ``one`` (a single process), ``all-reduce``, ``sync``, ``async`` or
            ``mixed``.
        workers: The number of replicas of the model.
        servers: The number of parameter servers.
        settings: The settings of the recipe's ``distributed`` section.
    """

    text: str
    strategy: str
    workers: int
    servers: int
    settings: dict[str, Any]

    @property
    def nodes(self) -> int:
        """The number of workers and dedicated servers; shared servers are on the workers' nodes."""
        dedicated = self.settings.get("placement") == "dedicated"
        return self.workers + (self.servers if dedicated else 0)

    @property
    def folder(self) -> str:
        """The name of the folder of the configuration's run."""
        return re.sub(r"[^a-z0-9]+", "-", self.text)


def configuration(text: str) -> Configuration:
    """Parse a configuration.

    Args:
        text: The text: ``one``; ``all-reduce N`` for N processes; or ``sync``, ``async`` or
            ``mixed``, followed by ``N+S`` for N workers and S servers, optionally by ``shared`` or
            ``dedicated`` for the placement of the servers, and optionally by ``group=``,
            ``backup=`` or ``bound=`` with a number.

    Raises:
        InputError: The text is not a configuration.
    """
    words = " ".join(text.split())
    if words == ONE:
        return Configuration(words, ONE, 1, 0, {})
    if found := re.fullmatch(rf"{ALL_REDUCE} (\d{{1,4}})", words):
        workers = int(found[1])
        if workers < 2:
            raise InputError(f"expected at least two processes for all-reduce, got {text!r}")
        return Configuration(words, ALL_REDUCE, workers, 0, {})
    found = _FORM.fullmatch(words)
    if found is None:
        raise InputError(f"expected a configuration such as {_EXAMPLES}, got {text!r}: {_SYNTAX}")
    strategy, workers, servers = found[1], int(found[2]), int(found[3])
    settings: dict[str, Any] = {"strategy": strategy, "workers": workers, "servers": servers}
    settings["placement"] = (found[4] or "shared").strip()
    for option in found[5].split():
        name, _, value = option.partition("=")
        if name not in _OPTIONS:
            raise InputError(f"expected one of {', '.join(_OPTIONS)}, got {name!r} in {text!r}")
        settings[_OPTIONS[name]] = int(value)
    return Configuration(words.replace(" shared", ""), strategy, workers, servers, settings)


def configured(recipe: Recipe, chosen: Configuration, *, same_update: bool) -> Recipe:
    """Return the recipe that trains with a configuration.

    Args:
        recipe: The recipe for a single process.
        chosen: The configuration.
        same_update: Whether to divide ``training.batch_size`` by the number of gradients that an
            update averages. If true, an update uses the same number of samples in every
            configuration; if false, every worker has the batch size of the recipe.

    Raises:
        InputError: The settings do not fit together, or the batch size is not divisible.
    """
    result = recipe.replaced("distributed", **chosen.settings) if chosen.settings else recipe
    if same_update:
        averaged = (
            chosen.workers
            if chosen.strategy == ALL_REDUCE
            else result.distributed.batches_per_update
        )
        size, rest = divmod(recipe.training.batch_size, averaged)
        if rest:
            raise InputError(
                f"expected training.batch_size to be a multiple of the {averaged} gradients that "
                f"an update of {chosen.text!r} averages, got {recipe.training.batch_size}"
            )
        result = result.replaced("training", batch_size=size)
    return result
