"""The settings of a run: one frozen dataclass per section of a recipe, each in a file of its own.

A wrong value raises an error before anything is built.
"""

from fineprune.training.settings.data import DataSettings
from fineprune.training.settings.network import NetworkSettings
from fineprune.training.settings.run import RunSettings
from fineprune.training.settings.training import TrainingSettings

__all__ = ["DataSettings", "NetworkSettings", "RunSettings", "TrainingSettings"]
