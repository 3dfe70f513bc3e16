"""The data of a run: one source for each place where samples come from, and one loader for all."""

from fineprune.training.data.run_data import Data, load_data
from fineprune.training.data.source import EpochLoader

__all__ = ["Data", "EpochLoader", "load_data"]
