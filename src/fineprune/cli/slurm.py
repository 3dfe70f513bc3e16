"""``fineprune slurm``."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Changes, MoreChanges, RecipeFile, all_changes, path_option
from fineprune.cli.outputs import check_file, inputs_of
from fineprune.errors import check_one_of
from fineprune.launch.slurm import STRATEGIES, batch_script, fit_servers, train_command
from fineprune.runs.files import write_atomically
from fineprune.training.recipe import Recipe, read_recipe


@exits()
def slurm(
    recipe: RecipeFile,
    nodes: Annotated[int, typer.Option(help="The number of nodes of the job.")],
    more: MoreChanges = None,
    strategy: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(STRATEGIES)} [as in the recipe, or all-reduce]."),
    ] = None,
    run: Annotated[Path | None, path_option("The run folder [runs/<recipe>-<policy>].")] = None,
    processes: Annotated[
        int | None, typer.Option(help="The processes per node [one per GPU, or one].")
    ] = None,
    gpus: Annotated[int, typer.Option(help="The GPUs per node.")] = 0,
    cpus: Annotated[
        int | None,
        typer.Option(
            help="The CPUs per node [as many as its processes use; with servers, one more]."
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
    changes: Changes = None,
    out: Annotated[
        Path | None, path_option("The file to write the script to [standard output].")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a Slurm batch script that trains a recipe on several nodes. Submits nothing.

    Example: fineprune slurm digits --nodes 8 --gpus 4 --time 24:00:00 --out job.sh
    """
    changed = all_changes(changes, more)
    if strategy is not None:
        check_one_of("--strategy", strategy, STRATEGIES)
        changed.append(f"distributed.strategy={'none' if strategy == 'all-reduce' else strategy}")
    made = read_recipe(recipe, changed)
    if out is not None:
        check_file("--out", out, inputs_of(recipe, made))
    folder = run or Path("runs") / f"{recipe.stem}-{made.pruning.policy.replace(':', '-')}"
    if made.distributed.served:
        cpus, spread = _spread(made, nodes, gpus, cpus)
        changed += spread
    script = batch_script(
        train_command(recipe, folder, changed),
        folder,
        nodes=nodes,
        strategy=made.distributed.strategy if made.distributed.served else "all-reduce",
        processes_per_node=processes,
        gpus_per_node=gpus,
        cpus_per_task=cpus,
        time=time,
        partition=partition,
        account=account,
        job_name=job_name or _plain(recipe.stem),
        setup=setup or (),
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, script)
    if as_json:
        written = None if out is None else str(out)
        typer.echo(json.dumps({"out": written, "run": str(folder), "script": script}))
    elif out is None:
        typer.echo(script, nl=False)
    else:
        typer.echo(f"written to {out}; submit it from here with: sbatch {out}")


def _spread(recipe: Recipe, nodes: int, gpus: int, cpus: int | None) -> tuple[int, list[str]]:
    """Return the CPUs per node, and the changes that fit the recipe to the nodes."""
    settings, run = recipe.distributed, recipe.run
    cpus, threads = fit_servers(
        nodes,
        workers=settings.workers,
        group=settings.group,
        dedicated=settings.servers if settings.placement == "dedicated" else 0,
        threads=run.threads,
        on_gpus=run.device.startswith("cuda") or (run.device == "auto" and gpus > 0),
        gpus_per_node=gpus,
        cpus_per_task=cpus,
    )
    # Left at 0 and "auto", these settings would be resolved on the first node for all workers. And
    # a node may have GPUs that the job did not ask for, which Ray does not give to workers.
    changed = [] if run.threads else [f"run.threads={threads}"]
    if run.device == "auto" and not gpus:
        changed.append("run.device=cpu")
    return cpus, changed


def _plain(stem: str) -> str:
    """Return a job name for a recipe, without the characters that Slurm does not allow."""
    return "fineprune-" + re.sub(r"[^A-Za-z0-9_.-]", "-", stem)
