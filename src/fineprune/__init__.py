"""fineprune finds wrong labels while a network trains, and saves part of the training.

These are its public names.
"""

from fineprune.labels.label_watch import LabelWatch
from fineprune.pruning.indexed import Indexed, IndexedCollate
from fineprune.pruning.plan import EpochPlan
from fineprune.pruning.policies.adaptive import Adaptive
from fineprune.pruning.policies.align_prune import AlignPrune
from fineprune.pruning.policies.fine_pruning import FinePruning
from fineprune.pruning.policies.full import FullData
from fineprune.pruning.policies.infobatch import InfoBatch
from fineprune.pruning.policies.policy import Policy, Training
from fineprune.pruning.policies.random import RandomPruning
from fineprune.pruning.policies.repb import RePB
from fineprune.pruning.policies.rs2 import RS2
from fineprune.pruning.pruner import Position, Pruner
from fineprune.pruning.sample_losses import reduce_pixels, reduce_tasks, reduce_tokens
from fineprune.pruning.sampler import PruningSampler
from fineprune.pruning.savings import Savings, closed_form_pruned_epochs, predict_savings
from fineprune.pruning.schedule import Schedule
from fineprune.pruning.shorter import shorter

__version__ = "0.1.0"

__all__ = [
    "RS2",
    "Adaptive",
    "AlignPrune",
    "EpochPlan",
    "FinePruning",
    "FullData",
    "Indexed",
    "IndexedCollate",
    "InfoBatch",
    "LabelWatch",
    "Policy",
    "Position",
    "Pruner",
    "PruningSampler",
    "RandomPruning",
    "RePB",
    "Savings",
    "Schedule",
    "Training",
    "closed_form_pruned_epochs",
    "predict_savings",
    "reduce_pixels",
    "reduce_tasks",
    "reduce_tokens",
    "shorter",
]
