"""The schedule of a finished run, from its recipe."""

from fineprune.runs.run import Run
from fineprune.training.recipe import make_recipe

_WINDOWS = {"window", "windows_per_interval"}


def boundaries_of(run: Run) -> tuple[int, ...]:
    """Return the epochs, from 1, at whose end the run's schedule clears the counts.

    The tuple is empty if the run's policy has no schedule.
    """
    pruning = run.recipe.get("pruning", {})
    policy = pruning.get("policy", "fine-pruning")
    # All other policies ignore the schedule of a recipe.
    if policy not in ("fine-pruning", "random", "full") or not _WINDOWS & pruning.keys():
        return ()
    return make_recipe(run.recipe).schedule().boundaries
