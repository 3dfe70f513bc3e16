"""How well the planner predicts the second paper's table.

    python benchmarks/planner.py --paper

``--paper`` calibrates the planner on three rows of [D] Tables 1 and 2 (one node, two workers with
one server, four workers with one server) and predicts the others. The paper gives no spread of its
steps, so they are taken to be equal. Then two numbers are unknown: what an exchange adds to a step,
which follows from the row with two workers, and how long a server is busy with a gradient, which
follows from the row with four workers. The last line is the largest error, in percent.
"""

import argparse
import sys

from fineprune.experiments.cluster_costs import ClusterShape, Costs
from fineprune.experiments.cluster_simulation import simulate
from fineprune.experiments.configurations import configuration

# Configuration, nodes and images per second of [D] Tables 1 and 2. A worker is a node of 4 GPUs.
BATCH = 128
CALIBRATION = {"one": 124.18, "async 2+1": 195.60, "async 4+1": 292.22}
PAPER = (
    ("one", 1, 124.18),
    ("async 2+1", 2, 195.60),
    ("async 4+1", 4, 292.22),
    ("async 4+3", 4, 374.73),
    ("async 4+3", 4, 383.09),
    ("async 4+3 dedicated", 7, 396.62),
    ("async 8+7", 8, 809.10),
)


def paper_costs() -> Costs:
    """Return the costs that the three rows of the calibration determine."""
    step = BATCH / CALIBRATION["one"]
    two = 2 * BATCH / CALIBRATION["async 2+1"]  # how long a step of each worker takes
    busy = BATCH / CALIBRATION["async 4+1"]  # how long a server takes for each gradient
    # With two workers, the server is idle at times; with four, it never is.
    if not (2 * busy < two < 4 * busy):
        sys.exit("the rows of the calibration do not determine the costs")
    return Costs((step,), BATCH, 0.0, overhead=two - step, serve=busy, overlaps=True)


def paper() -> float:
    """Print the prediction for each row; return the largest error of those not calibrated on."""
    costs, network = paper_costs(), ClusterShape(gigabits=0, latency=0)
    print(
        f"calibrated: step {costs.step:.4f} s, exchange {costs.overhead:.4f} s, server "
        f"{costs.serve:.4f} s per gradient\n"
    )
    print("| configuration | paper, images/s | predicted | error, % | efficiency | limit |")
    print("|---|---:|---:|---:|---:|---|")
    largest = 0.0
    for text, nodes, measured in PAPER:
        result = simulate(costs, network, configuration(text))
        error = 100 * (result.throughput / measured - 1)
        efficiency = result.throughput / CALIBRATION["one"] / nodes
        known = text in CALIBRATION
        print(
            f"| {text}{' (calibration)' if known else ''} | {measured:.2f} | "
            f"{result.throughput:.2f} | {error:+.2f} | {efficiency:.2f} | {result.limit} |"
        )
        if not known:
            largest = max(largest, abs(error))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paper", action="store_true", help="predict the paper's table")
    options = parser.parse_args()
    if not options.paper:
        parser.error("give --paper")
    print(f"\nlargest error: {paper():.2f} %")


if __name__ == "__main__":
    main()
