"""What was run and on what, as terms and their values."""

from collections.abc import Iterable, Sequence
from typing import Any

from fineprune.runs.run import Run


def facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return terms and their values, for runs of one network on one dataset."""
    summaries = [run.summary for run in runs]
    first = summaries[0]
    epochs = {summary["arm"]: summary["epochs"] for summary in summaries}
    lengths = distinct(epochs.values())
    return [
        ("Runs", f"{len(runs)}: {', '.join(distinct(run.title for run in runs))}"),
        ("Network", f"{first['network']}, {first['parameters']:,} parameters"),
        ("Data", f"{first['dataset']}, {first['train_samples']:,} training samples"),
        ("Evaluated on", f"{first['evaluated_on']} set"),
        (
            "Epochs",
            str(lengths[0])
            if len(lengths) == 1
            else ", ".join(f"{arm} {number}" for arm, number in epochs.items()),
        ),
        ("Seeds", ", ".join(distinct(str(summary["seed"]) for summary in summaries))),
        ("Hardware", "; ".join(distinct(hardware(summary) for summary in summaries))),
        ("Versions", "; ".join(distinct(_versions(summary) for summary in summaries))),
        ("Git revision", ", ".join(distinct(summary["git"] or "none" for summary in summaries))),
    ]


def hardware(summary: dict[str, Any]) -> str:
    """Say on what a run was made, and in which precision."""
    described = summary["hardware"]
    threads = described["threads"]
    cpu = f"{described['cpu']}, {threads} thread{'' if threads == 1 else 's'}"
    machine = cpu if described["gpu"] is None else f"{described['gpu']} ({cpu})"
    return f"{machine}, {summary['precision']}"


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return each value once, in the order in which they came."""
    return list(dict.fromkeys(values))


def _versions(summary: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
