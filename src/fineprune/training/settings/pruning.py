"""The pruning section of a recipe."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fineprune.errors import InputError, check_one_of
from fineprune.importing import check_import_name
from fineprune.training.convert import check_plain
from fineprune.training.policies import POLICY_NAMES, carried_over, complete_arguments


@dataclasses.dataclass(frozen=True)
class PruningSettings:
    """Which samples are skipped, and in which epochs (Algorithms 1 and 2 of Li et al., NPC 2018).

    In TOML, the arguments stand beside the policy. They are those of its constructor, which
    ``complete_arguments`` checks. A policy with a schedule has those of ``Schedule`` too: either
    all windows have the same length (``window``, with ``start`` in epochs), or they are made from
    the learning rate's milestones (``windows_per_interval``, with ``start`` as a fraction of each
    window).

    Attributes:
        policy: The policy: ``full``, another name out of ``POLICY_NAMES``, or ``module:Class``, a
            user-defined policy, which is called with the number of epochs and the arguments.
        arguments: The arguments: numbers, texts, booleans, and lists and tables of them.
    """

    policy: str = "full"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.own:
            check_import_name("pruning.policy", self.policy)
            for name, value in self.arguments.items():
                check_plain(f"pruning.{name}", value)
        else:
            check_one_of("pruning.policy", self.policy, POLICY_NAMES)
            complete = complete_arguments(self.policy, self.arguments)
            object.__setattr__(self, "arguments", complete)  # It is frozen for its users.

    @property
    def own(self) -> bool:
        """Whether the policy is the user's own. Making it runs the user's code."""
        return ":" in self.policy

    def section(self) -> dict[str, Any]:
        """Return the section as in TOML."""
        return {"policy": self.policy, **self.arguments}

    def replaced(self, **values: Any) -> "PruningSettings":
        """Return a copy with some arguments replaced, or with another policy.

        Another policy keeps of the arguments what ``carried_over`` says.
        """
        return pruning_settings(with_policy(self.section(), values))


def pruning_settings(section: Mapping[str, Any]) -> PruningSettings:
    """Return the settings of a section as in TOML. None stands for a setting that is unset."""
    values = {key: value for key, value in section.items() if value is not None}
    policy = values.pop("policy", "full")
    if not isinstance(policy, str):
        raise InputError(f"expected pruning.policy to be a text, got {policy!r}")
    return PruningSettings(policy, values)


def with_policy(section: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with some values replaced, of which ``policy`` may be one."""
    before = {"policy": "full", **section}
    policy = before.pop("policy")
    other = values.get("policy", policy)
    kept = carried_over(policy, before, other) if isinstance(other, str) else {}
    return {**kept, **values, "policy": other}
