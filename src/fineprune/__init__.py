"""fineprune makes the same PyTorch training run cheaper. These are its public names."""

from fineprune.pruning.indexed import Indexed, IndexedCollate
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.adaptive import Adaptive
from fineprune.pruning.policies.fine_pruning import FinePruning
from fineprune.pruning.policies.full import FullData
from fineprune.pruning.policies.policy import LossRecords, Policy
from fineprune.pruning.policies.random import RandomPruning
from fineprune.pruning.pruner import Pruner
from fineprune.pruning.sampler import PruningSampler
from fineprune.pruning.savings import Savings, closed_form_pruned_epochs, predict_savings
from fineprune.pruning.schedule import Schedule

__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "EpochPlan",
    "FinePruning",
    "FullData",
    "Indexed",
    "IndexedCollate",
    "LossRecords",
    "Policy",
    "Pruner",
    "PruningSampler",
    "RandomPruning",
    "Savings",
    "Schedule",
    "closed_form_pruned_epochs",
    "predict_savings",
]
