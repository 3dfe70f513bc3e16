"""The policies by name, as recipes and tables use them."""

from fineprune.pruning.policies.adaptive import Adaptive
from fineprune.pruning.policies.fine_pruning import FinePruning
from fineprune.pruning.policies.full import FullData
from fineprune.pruning.policies.matched import Matched
from fineprune.pruning.policies.random import RandomPruning
from fineprune.pruning.policies.scheduled import ScheduledPolicy

POLICIES: dict[str, type[FullData] | type[Adaptive] | type[Matched] | type[ScheduledPolicy]] = {
    policy.name: policy for policy in (Adaptive, FinePruning, RandomPruning, Matched, FullData)
}
