"""Data fine-pruning and distributed training strategies, and wrong labels found on the way.

These are its public names. A name is imported when it is first used, so that the command line does
not import torch before it needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fineprune.labels.label_watch import LabelWatch
    from fineprune.pruning.epoch import Position
    from fineprune.pruning.indexed import Indexed, IndexedCollate
    from fineprune.pruning.plan import EpochPlan
    from fineprune.pruning.policies.adaptive import Adaptive
    from fineprune.pruning.policies.align_prune import AlignPrune
    from fineprune.pruning.policies.fine_pruning import FinePruning
    from fineprune.pruning.policies.full import FullData
    from fineprune.pruning.policies.infobatch import InfoBatch
    from fineprune.pruning.policies.policy import Policy, Training
    from fineprune.pruning.policies.repb import RePB
    from fineprune.pruning.policies.rs2 import RS2
    from fineprune.pruning.policies.scheduled import RandomPruning
    from fineprune.pruning.pruner import Pruner
    from fineprune.pruning.sample_losses import reduce_pixels, reduce_tokens
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
    "reduce_tokens",
    "shorter",
]

# The module of each name.
_MODULES = {
    "LabelWatch": "fineprune.labels.label_watch",
    "Indexed": "fineprune.pruning.indexed",
    "IndexedCollate": "fineprune.pruning.indexed",
    "EpochPlan": "fineprune.pruning.plan",
    "Adaptive": "fineprune.pruning.policies.adaptive",
    "AlignPrune": "fineprune.pruning.policies.align_prune",
    "FinePruning": "fineprune.pruning.policies.fine_pruning",
    "FullData": "fineprune.pruning.policies.full",
    "InfoBatch": "fineprune.pruning.policies.infobatch",
    "Policy": "fineprune.pruning.policies.policy",
    "Training": "fineprune.pruning.policies.policy",
    "RandomPruning": "fineprune.pruning.policies.scheduled",
    "RePB": "fineprune.pruning.policies.repb",
    "RS2": "fineprune.pruning.policies.rs2",
    "Position": "fineprune.pruning.epoch",
    "Pruner": "fineprune.pruning.pruner",
    "reduce_pixels": "fineprune.pruning.sample_losses",
    "reduce_tokens": "fineprune.pruning.sample_losses",
    "PruningSampler": "fineprune.pruning.sampler",
    "Savings": "fineprune.pruning.savings",
    "closed_form_pruned_epochs": "fineprune.pruning.savings",
    "predict_savings": "fineprune.pruning.savings",
    "Schedule": "fineprune.pruning.schedule",
    "shorter": "fineprune.pruning.shorter",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
