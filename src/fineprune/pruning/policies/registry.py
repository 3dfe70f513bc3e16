"""The policies by name, as recipes and tables use them."""

from fineprune.pruning.policies.adaptive import Adaptive
from fineprune.pruning.policies.align_prune import AlignPrune
from fineprune.pruning.policies.fine_pruning import FinePruning
from fineprune.pruning.policies.full import FullData
from fineprune.pruning.policies.infobatch import InfoBatch
from fineprune.pruning.policies.kakurenbo import Kakurenbo
from fineprune.pruning.policies.matched import Matched
from fineprune.pruning.policies.policy import Policy
from fineprune.pruning.policies.progressive_dropout import ProgressiveDropout
from fineprune.pruning.policies.random import RandomPruning
from fineprune.pruning.policies.ranked import Ranked
from fineprune.pruning.policies.repb import RePB
from fineprune.pruning.policies.rs2 import RS2
from fineprune.pruning.policies.selective_backprop import SelectiveBackprop
from fineprune.pruning.policies.seta import SeTa
from fineprune.pruning.policies.ucb import UCB

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Adaptive,
        AlignPrune,
        FinePruning,
        InfoBatch,
        Kakurenbo,
        ProgressiveDropout,
        RandomPruning,
        Ranked,
        RePB,
        RS2,
        SelectiveBackprop,
        SeTa,
        UCB,
        Matched,
        FullData,
    )
}
