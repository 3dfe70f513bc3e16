"""The data of a run, with one file for each source: memory, files, and the user's own datasets."""

from fineprune.training.data.files import image_files
from fineprune.training.data.memory import device_data, load_images
from fineprune.training.data.run_data import Data
from fineprune.training.data.user import own_data
from fineprune.training.recipe import Recipe

__all__ = ["Data", "load_data"]


def load_data(recipe: Recipe, samples_digest: str | None = None) -> Data:
    """Load the data that a recipe names.

    The digest is the ``samples_digest`` with which the run began; None for a new run.
    """
    if recipe.data.own:
        return own_data(recipe, samples_digest)
    if recipe.data.name == "images":
        return image_files(recipe, samples_digest)
    return device_data(recipe, load_images(recipe))
