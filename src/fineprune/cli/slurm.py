"""``fineprune slurm``."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Changes, RecipeFile
from fineprune.distributed.slurm import STRATEGIES, batch_script, train_command
from fineprune.training.recipe import read_recipe


@exits
def slurm(
    recipe: RecipeFile,
    nodes: Annotated[int, typer.Option(help="Nodes of the job.")],
    strategy: Annotated[str, typer.Option(help=f"{', '.join(STRATEGIES)}.")] = STRATEGIES[0],
    run: Annotated[Path | None, typer.Option(help="Run folder [runs/<recipe>-<policy>].")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes on a node [one for each GPU, or one].")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of a node.")] = 0,
    cpus: Annotated[
        int | None, typer.Option(help="CPUs of a node [one a process, and one a server].")
    ] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, as 24:00:00 or 2-12.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    job_name: Annotated[
        str | None, typer.Option(help="Name of the job [fineprune-<recipe>].")
    ] = None,
    setup: Annotated[
        list[str] | None, typer.Option(help="Line of shell to begin with: 'module load cuda'.")
    ] = None,
    changes: Changes = None,
    out: Annotated[Path | None, typer.Option(help="File to write [standard output].")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a Slurm batch script that trains a recipe on several nodes. Submits nothing.

    Example: fineprune slurm recipes/digits.toml --nodes 8 --gpus 4 --time 24:00:00 --out job.sh
    """
    made = read_recipe(recipe, changes or ())
    folder = run or Path("runs") / f"{recipe.stem}-{made.pruning.policy}"
    command = train_command(recipe, folder, changes or (), strategy=strategy)
    script = batch_script(
        command,
        folder,
        nodes=nodes,
        strategy=strategy,
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
        out.write_text(script, encoding="utf-8")
    if as_json:
        written = None if out is None else str(out)
        typer.echo(json.dumps({"out": written, "run": str(folder), "script": script}))
    elif out is None:
        typer.echo(script, nl=False)
    else:
        typer.echo(f"written to {out}; submit it from here with: sbatch {out}")


def _plain(stem: str) -> str:
    """A file's name may hold what a job's may not."""
    return "fineprune-" + re.sub(r"[^A-Za-z0-9_.-]", "-", stem)
