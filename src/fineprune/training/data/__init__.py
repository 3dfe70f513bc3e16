"""The data of a run, with one file for each source: memory, files, and the user's own datasets."""

from fineprune.training.data.load import load_data
from fineprune.training.data.run_data import Data

__all__ = ["Data", "load_data"]
