"""The table of what a planner predicts for a cluster."""

from collections.abc import Callable, Sequence

from fineprune.experiments.planner import Plan, Predicted
from fineprune.report.table import Table, number, table_of

_COLUMNS: Sequence[tuple[str, Callable[[Predicted], str]]] = (
    ("configuration", lambda row: row.configuration),
    ("nodes", lambda row: f"{row.nodes:,}"),
    ("samples/s", lambda row: format(row.throughput, ",.0f" if row.throughput >= 100 else ".3g")),
    ("speedup", lambda row: f"{row.speedup:,.2f}"),
    ("efficiency", lambda row: f"{row.efficiency:.2f}"),
    ("staleness", lambda row: f"{row.staleness:,.3g}"),
    ("limit", lambda row: row.limit),
    ("samples", lambda row: f"{row.samples_factor:.2f}"),
    ("hours", lambda row: f"{row.hours:,.3g}"),
    ("pruned", lambda row: number(row.hours_pruned, ",.3g")),
)
_NOTE = (
    "Speedup is relative to one node, and efficiency is speedup divided by nodes. Limit: what "
    "limits the throughput. Samples: relative to one worker; all the same unless a critical batch "
    "size and a cost of staleness are given. Hours: to the target, or for the recipe's epochs, on "
    "all data and with the pruning of the recipe. A formula predicts this from steps that were "
    "measured on one machine or given."
)
_STOPS = (
    "For each strategy, the configuration with the most workers whose last doubling shortened the "
    "training by a third. "
)


def planned_table(plan: Plan) -> Table:
    """Return where scaling stops paying or, if only some configurations were asked for, these."""
    if plan.stops:
        return table_of("Where scaling stops paying", plan.stops, _COLUMNS, _STOPS + _NOTE)
    return table_of("Predicted configurations", plan.rows, _COLUMNS, _NOTE)
