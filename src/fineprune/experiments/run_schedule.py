"""The schedule of a finished run, from its recipe."""

from fineprune.runs.run import Run
from fineprune.training.policies import follows_schedule
from fineprune.training.recipe import make_recipe

_WINDOWS = {"window", "windows_per_interval"}


def boundaries_of(run: Run) -> tuple[int, ...]:
    """Return the epochs, from 1, at whose end the run's schedule clears the counts.

    The tuple is empty if the run's policy has no schedule.
    """
    pruning = run.recipe.get("pruning", {})
    # Other policies ignore the schedule of a recipe.
    if not follows_schedule(pruning.get("policy", "")) or not _WINDOWS & pruning.keys():
        return ()
    return make_recipe(run.recipe).schedule().boundaries
