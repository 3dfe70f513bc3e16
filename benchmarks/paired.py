"""How much longer one command takes than another: they take turns, so that other work slows both.

    python benchmarks/paired.py --rounds 9 'python old.py' 'python new.py'
    python benchmarks/paired.py --in ../old --in . 'fineprune train quick --out /tmp/$ROUND'

Prints the median processor time of each command, and the median of the ratios within a round with
a 95 % interval (bootstrap). Every other round, the second command comes first. A command may use
the variables ROUND, such as 3-b, and those of the shell; with ``--in``, each command runs in its
folder, and one command runs in both. One round before the first is not counted.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


def seconds(command: str, folder: str, round_: str) -> dict[str, float]:
    """Run a command, and return its processor time with that of its children, and its time."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "ROUND": round_}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL
    )
    if done.returncode:
        sys.exit(f"{command!r} in {folder} ended with status {done.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"processor": used, "wall": time.perf_counter() - started}


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, from 10,000 samples with replacement."""
    chance = np.random.default_rng(0)
    medians = np.median(chance.choice(ratios, (10_000, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commands", nargs="+", help="one or two shell commands")
    parser.add_argument("--in", dest="folders", action="append", help="where each command runs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wall", action="store_true", help="compare wall-clock times")
    parser.add_argument("--json", type=Path, help="the file of all rounds to write")
    given = parser.parse_args()
    commands = given.commands * (2 if len(given.commands) == 1 else 1)
    folders = (given.folders or ["."]) * (1 if len(given.folders or []) == 2 else 2)
    if len(commands) != 2 or len(folders) != 2 or given.rounds < 2:
        parser.error("expected one or two commands, no or two folders, and at least two rounds")
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(given.rounds + 1):
        order = "ab" if number % 2 else "ba"
        pair = {
            one: seconds(commands["ab".index(one)], folders["ab".index(one)], f"{number}-{one}")
            for one in order
        }
        rounds += [pair] if number else []
    clock = "wall" if given.wall else "processor"
    for one, command in zip("ab", commands, strict=True):
        print(f"{np.median([pair[one][clock] for pair in rounds]):8.3f} s  {one}: {command}")
    ratios = [pair["b"][clock] / pair["a"][clock] for pair in rounds]
    low, high = interval(ratios)
    print(f"b / a: {np.median(ratios):.3f} ({low:.3f} to {high:.3f}), n = {len(ratios)}")
    if given.json is not None:
        given.json.write_text(json.dumps({"commands": commands, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
