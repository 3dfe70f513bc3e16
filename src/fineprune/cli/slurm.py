"""``fineprune slurm``."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import (
    AsJson,
    RecipeFile,
    path_option,
    split_changes,
)
from fineprune.cli.output_paths import check_file, inputs_of
from fineprune.errors import InputError, check_one_of
from fineprune.experiments.configurations import (
    ALL_REDUCE,
    Configuration,
    configuration,
    configured,
)
from fineprune.launch.slurm import ALONE, JOB_STRATEGIES, batch_script, fit_servers, job_command
from fineprune.training.recipe import Recipe, read_recipe
from fineprune.writing import make_folder, write_atomically

_VERBS = ("train", "compare", "scale")


@exits()
def slurm(
    context: typer.Context,
    recipe: RecipeFile,
    nodes: Annotated[int, typer.Option(help="The number of nodes of the job.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIGURATION]... [SECTION.KEY=VALUE]...",
            help="Changes of the recipe's settings. With --verb scale, also the configurations.",
            show_default=False,
        ),
    ] = None,
    verb: Annotated[str, typer.Option(help=f"What the job runs: {', '.join(_VERBS)}.")] = "train",
    options: Annotated[
        str, typer.Option(help="More options of compare or scale, such as '--seeds 3'.")
    ] = "",
    strategy: Annotated[
        str | None,
        typer.Option(
            help=f"The strategy: {', '.join(JOB_STRATEGIES)} [that of the recipe, or all-reduce]."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        path_option("The folder of the run or experiment [as without Slurm]."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="The number of processes per node [one per GPU, or one].")
    ] = None,
    gpus: Annotated[int, typer.Option(help="The number of GPUs per node.")] = 0,
    cpus: Annotated[
        int | None,
        typer.Option(
            help="The number of CPUs per node [those that its processes use; with servers, one "
            "more]."
        ),
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="The time limit, such as 24:00:00 or 2-12.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="The partition of the cluster.")] = None,
    account: Annotated[str | None, typer.Option(help="The account to charge.")] = None,
    job_name: Annotated[
        str | None, typer.Option(help="The name of the job [fineprune-<recipe>].")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="A shell command to run first, such as 'module load cuda'."),
    ] = None,
    out: Annotated[
        Path | None, path_option("The file to write the script to [standard output].")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a Slurm batch script that trains a recipe on several nodes. Submits nothing.

    Example: fineprune slurm digits --nodes 8 --gpus 4 --time 24:00:00 --out job.sh

    Example: fineprune slurm digits --verb scale one 'async 4+2' --nodes 4 --out job.sh
    """
    check_one_of("--verb", verb, _VERBS)
    chosen, changed = split_changes(words)
    if chosen and verb != "scale":
        raise InputError(f"expected configurations with --verb scale only, got {chosen[0]!r}")
    if options and verb == "train":
        raise InputError(f"expected --options with --verb compare or scale, got {options!r}")
    further = _further_options(context, verb, recipe, options)
    if strategy is not None and verb == "scale":
        raise InputError(
            f"expected configurations with --verb scale, such as 'async 4+2', got --strategy "
            f"{strategy}: leave it out"
        )
    if strategy is not None:
        check_one_of("--strategy", strategy, JOB_STRATEGIES)
        changed.append(f"distributed.strategy={'none' if strategy == 'all-reduce' else strategy}")
    made = read_recipe(recipe, changed)
    if run is not None and "$" in str(run):  # All jobs of an array would take it for one folder.
        raise InputError(
            f"expected --run without variables, which the script does not replace, got {run}: "
            f"write one script for each run"
        )
    if out is not None:
        check_file("--out", out, [recipe, *inputs_of(made.as_dict())])
        if out.is_file() and out.read_bytes()[:2] not in (b"", b"#!"):
            raise InputError(
                f"expected --out to be a script, got {out}, which is none: give another name"
            )
    kind = made.pruning.policy.replace(":", "-") if verb == "train" else verb
    folder = run or Path("runs") / f"{recipe.stem}-{kind}"
    trained = [made]
    launched = made.distributed.strategy if made.distributed.served else "all-reduce"
    if verb == "compare" and not made.distributed.served:
        launched = ALONE
    if verb == "scale":
        if not chosen:
            raise InputError("expected configurations with --verb scale, such as 'async 4+2'")
        parsed = [configuration(text) for text in chosen]
        trained = [configured(made, one, same_update=False) for one in parsed]
        _check_nodes(parsed, nodes)
        launched = "async"  # Ray's nodes run the servers, and the first one starts all runs.
    served = [one for one in trained if one.distributed.served]
    if len(served) < len(trained):
        several = launched == "all-reduce" and max(nodes, processes or gpus) > 1
        _check_processes(made, gpus, several=several)
    if served:
        spreads = [_spread(one, nodes, gpus, cpus, whole=verb != "scale") for one in served]
        cpus = max(found for found, _ in spreads)
        changed += _fitting(made, min(threads for _, threads in spreads), gpus)
    command = job_command(verb, recipe, folder, changed, configurations=chosen, options=further)
    script = batch_script(
        command,
        folder,
        nodes=nodes,
        strategy=launched,
        processes_per_node=processes,
        gpus_per_node=gpus,
        cpus_per_task=cpus,
        time=time,
        partition=partition,
        account=account,
        # Without the characters that Slurm does not allow.
        job_name=job_name or "fineprune-" + re.sub(r"[^A-Za-z0-9_.-]", "-", recipe.stem),
        setup=setup or (),
    )
    if out is not None:
        make_folder(out.parent)
        write_atomically(out, script)
    if as_json:
        written = None if out is None else str(out)
        typer.echo(json.dumps({"out": written, "run": str(folder), "script": script}))
    elif out is None:
        typer.echo(script, nl=False)
    else:
        typer.echo(f"written to {out}; submit it from here with: sbatch {shlex.quote(str(out))}")


def _further_options(context: typer.Context, verb: str, recipe: Path, options: str) -> list[str]:
    """Return the words of ``--options``. Those that the verb does not take would end the job."""
    parent: Any = context.parent
    told = f"expected --options that {verb} takes, got {options!r}"
    try:
        words = shlex.split(options)
        made = parent.command.get_command(parent, verb).make_context(
            verb, [str(recipe), *words], parent
        )
    except ValueError as error:  # a quote that is not closed
        raise InputError(f"{told}: {error}") from None
    except typer.TyperException as error:
        raise InputError(f"{told}: {error.format_message()}") from None
    for name in ("out", "changes", "as_json", "configurations"):
        if made.params.get(name):
            raise InputError(
                f"{told}: give the folder with --run, and changes and configurations as for "
                f"{verb} itself"
            )
    if made.params.get("prediction"):
        raise InputError(f"{told}: run fineprune scale --predict directly, since it needs no job")
    return words


def _check_processes(recipe: Recipe, gpus: int, *, several: bool) -> None:
    """Check that processes without servers find what the recipe asks for."""
    device, simulated = recipe.run.device, recipe.distributed.simulate
    if device.startswith("cuda") and not gpus:
        raise InputError(
            f"expected --gpus with run.device={device}, got none: ask for GPUs, or set "
            f"run.device=cpu"
        )
    if simulated > 1 and several:
        raise InputError(
            f"expected distributed.simulate in one process, got {simulated} in a job of several: "
            f"leave it out, or ask for one node and one process"
        )


def _spread(
    recipe: Recipe, nodes: int, gpus: int, cpus: int | None, *, whole: bool
) -> tuple[int, int]:
    """Return the CPUs per node, and the threads of each process, of a training with servers.

    Without a number of ``cpus``, they are as many as the processes use. ``whole`` says whether the
    training has to use all nodes.
    """
    settings, run = recipe.distributed, recipe.run
    dedicated = settings.servers if settings.placement == "dedicated" else 0
    return fit_servers(
        nodes if whole else min(nodes, settings.groups + dedicated),
        workers=settings.workers,
        group=settings.group,
        dedicated=dedicated,
        threads=run.threads,
        on_gpus=run.device.startswith("cuda") or (run.device == "auto" and gpus > 0),
        gpus_per_node=gpus,
        cpus_per_task=cpus,
    )


def _fitting(recipe: Recipe, threads: int, gpus: int) -> list[str]:
    """Return the changes that fit the recipe to the nodes."""
    # Left at 0 and "auto", these settings would be resolved on the first node for all workers. And
    # a node may have GPUs that the job did not ask for, which Ray does not give to workers.
    changed = [] if recipe.run.threads else [f"run.threads={threads}"]
    if recipe.run.device == "auto" and not gpus:
        changed.append("run.device=cpu")
    return changed


def _check_nodes(configurations: Sequence[Configuration], nodes: int) -> None:
    """Check that each all-reduce fits the nodes, each of which runs ``group`` of its processes."""
    for one in configurations:
        if one.strategy == ALL_REDUCE and 1 < nodes < one.nodes:
            raise InputError(
                f"expected configurations for {nodes} nodes, got {one.text!r} on {one.nodes}: give "
                f"group=, the number of processes per node, or ask for more nodes"
            )
