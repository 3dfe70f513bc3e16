"""The pruning section of a recipe."""

import dataclasses
import math
from typing import Any

from fineprune.errors import InputError, check_one_of
from fineprune.importing import check_import_name
from fineprune.training.policies import (
    OF_SOME,
    ONLY_WITH,
    POLICY_NAMES,
    arguments_of,
    defaults_of,
    follows_schedule,
    takes_save,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruningSettings:
    """Which samples are skipped, and in which epochs (Algorithms 1 and 2 of Li et al., NPC 2018).

    Either all windows have the same length (``window``, with ``start`` in epochs), or they are made
    from the learning rate's milestones (``windows_per_interval``, with ``start`` as a fraction of
    each window).

    The settings of a schedule, and ``prune``, ``tolerance``, ``save``, ``threshold``,
    ``first_epoch`` and ``returning``, may be set even if the policy does not use them, so that one
    recipe can be trained with several policies. With ``full``, this holds for all settings.

    Attributes:
        policy: The policy: ``adaptive``, ``align-prune``, ``fine-pruning``, ``infobatch``,
            ``random``, ``repb``, ``rs2``, ``matched`` or ``full``; or ``module:Class``, a
            user-defined policy, which is called with the number of epochs and ``arguments``.
        save: The share to save: an argument of ``Adaptive``, ``AlignPrune``, ``InfoBatch``,
            ``RePB`` and ``RS2``.
        threshold, first_epoch, returning: Arguments of ``Adaptive``.
        replacement: An argument of ``RS2``.
        trajectory, reference: The arguments of ``AlignPrune``.
        anneal, rescale: Arguments of ``AlignPrune``, ``InfoBatch`` and ``RePB``; None for the
            default of the policy.
        arguments: The keyword arguments of a user-defined policy: a table of numbers, strings,
            booleans, lists and tables.
        window, start, attenuation, attenuate, block, count: The arguments of ``Schedule``.
        windows_per_interval: The number of windows between two milestones, instead of ``window``.
        prune: The samples that a pruning epoch skips: a fraction in [0, 1), or their number. With
            ``infobatch``, a probability; 0 stands for none if ``save`` is given.
        tolerance: The fraction of the batch's mean loss by which a sample's loss may exceed this
            mean without being marked.
        numbers, mean_weights: The arguments of ``Matched``, one number for each epoch;
            ``fineprune compare`` takes them from the run that the control matches.
    """

    policy: str = "fine-pruning"
    save: float | None = None
    threshold: float = 0.7
    first_epoch: int = 5
    returning: float = 0.1
    replacement: bool | None = None
    trajectory: int | None = None
    reference: tuple[int, ...] | None = None
    anneal: float | None = None
    rescale: bool | None = None
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
    numbers: tuple[int, ...] | None = None
    mean_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.own:
            check_import_name("pruning.policy", self.policy)
        else:
            check_one_of("pruning.policy", self.policy, POLICY_NAMES)
        if self.arguments is not None:
            _check_arguments("pruning.arguments", self.arguments)
        self._check_applies()
        self._complete()
        if self.policy == "matched" and self.numbers is None:
            raise InputError(
                'expected pruning.numbers, the samples of each epoch, with policy = "matched", got '
                "none: the arm 'matched' of fineprune compare takes them from a finished run"
            )
        if follows_schedule(self.policy) and (self.window is None) == (
            self.windows_per_interval is None
        ):
            raise InputError(
                f"expected either pruning.window (epochs) or pruning.windows_per_interval, got "
                f"{self.window} and {self.windows_per_interval}: set one of them"
            )
        if self.window is not None and not isinstance(self.start, int):
            raise InputError(
                f"expected pruning.start in whole epochs with pruning.window, got {self.start}"
            )

    @property
    def own(self) -> bool:
        """Whether the policy is the user's own. Making it runs the user's code."""
        return ":" in self.policy

    def given(self) -> dict[str, Any]:
        """Return the settings that are not None."""
        return {key: value for key, value in vars(self).items() if value is not None}

    def without_effect(self) -> str | None:
        """Say that the share to save has no effect; None if it has one.

        A comparison may need it for other arms, so it is no error.
        """
        if self.own or not self.save or takes_save(self.policy):
            return None
        return (
            f"pruning.save = {self.save} has no effect with pruning.policy = {self.policy!r}: "
            f"choose a policy that saves this share, such as adaptive"
        )

    def _check_applies(self) -> None:
        """Raise InputError if a setting would be ignored silently."""
        if self.policy == "full":
            return
        for name, policy in ONLY_WITH.items():
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
        for name in OF_SOME:
            if getattr(self, name) is None or (not self.own and name in arguments_of(self.policy)):
                continue
            raise InputError(
                f'expected no pruning.{name} with pruning.policy = "{self.policy}", which has no '
                f"such argument, got one: remove it"
            )
        takes_prune = self.own or "prune" in arguments_of(self.policy)
        if takes_save(self.policy) and not takes_prune and self.prune and self.save is None:
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
        if self.own:
            return
        values = dict(defaults_of(self.policy))
        if self.policy == "infobatch":
            # It takes either ``save`` or ``prune``, and 0 stands for none.
            object.__setattr__(self, "prune" if self.save else "save", None)
            if self.save:
                del values["prune"]
        elif follows_schedule(self.policy):
            values["prune"] = 0.0
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
