"""The policies by name, as recipes and tables use them."""

from fineprune.pruning.policies.adaptive import Adaptive
from fineprune.pruning.policies.align_prune import AlignPrune
from fineprune.pruning.policies.fine_pruning import FinePruning
from fineprune.pruning.policies.full import FullData
from fineprune.pruning.policies.infobatch import InfoBatch
from fineprune.pruning.policies.matched import Matched
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.policies.repb import RePB
from fineprune.pruning.policies.rs2 import RS2
from fineprune.pruning.policies.scheduled import RandomPruning

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Adaptive,
        AlignPrune,
        FinePruning,
        InfoBatch,
        RandomPruning,
        RePB,
        RS2,
        Matched,
        FullData,
    )
}
