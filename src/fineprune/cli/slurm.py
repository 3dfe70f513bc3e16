"""``fineprune slurm``."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import path_option, split_changes
from fineprune.cli.output_paths import check_file, inputs_of
from fineprune.errors import InputError, check_one_of
from fineprune.launch.slurm import batch_script
from fineprune.writing import make_folder, write_atomically


@exits()
def slurm(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- VERB ...",
            help="What the job runs, as without Slurm: train, compare, scale or paper.",
            show_default=False,
        ),
    ],
    nodes: Annotated[int, typer.Option(min=1, help="The number of nodes of the job.")],
    gpus: Annotated[
        int, typer.Option(min=0, help="The number of GPUs, and processes, per node.")
    ] = 0,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="The number of CPUs per node [one per process].")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="A shell command to run first, such as 'module load cuda'."),
    ] = None,
    out: Annotated[
        Path | None, path_option("The file to write the script to [standard output].")
    ] = None,
) -> None:
    """Write a Slurm batch script that runs a command on several nodes. Submits nothing.

    Example: fineprune slurm --nodes 8 --gpus 4 --out job.sh -- train digits run.seed=1

    Example: fineprune slurm --nodes 4 --out job.sh -- scale digits one 'async 4+2'
    """
    # Imported here, because it imports this module.
    from fineprune.cli.main import app

    verb, *words = command
    check_one_of("the verb of the job", verb, ("train", "compare", "scale", "paper"))
    verbs = typer.main.get_group(app)
    parser = verbs.get_command(typer.Context(verbs), verb)
    assert parser is not None
    try:
        given = parser.make_context(verb, list(words)).params
    except typer.TyperException as error:
        raise InputError(f"{verb}: {error.format_message()}") from error
    kind, inputs = "ray" if verb == "scale" or given.get("which") == "2" else "one", []
    if "recipe" in given:
        # Imported here, because torch would delay the start of every command.
        from fineprune.training.recipe import read_recipe

        _, changes = split_changes(given.get("changes") or given.get("configurations"))
        made = read_recipe(given["recipe"], changes)
        inputs = [given["recipe"], *inputs_of(made.as_dict())]
        if made.run.device.startswith("cuda") and not gpus:
            raise InputError(
                f"expected --gpus with run.device={made.run.device}, got none: ask for GPUs, or "
                f"set run.device=cpu"
            )
        if verb == "train":
            kind = "ray" if made.distributed.served else "all-reduce"
            words += [] if given["resume"] else ["--resume"]
    python = ["-m", "fineprune", verb, *words]
    script = batch_script(python, kind=kind, nodes=nodes, gpus=gpus, cpus=cpus, setup=setup or ())
    if out is None:
        typer.echo(script, nl=False)
        return
    check_file("--out", out, inputs)
    if out.is_file() and out.read_bytes()[:2] not in (b"", b"#!"):
        raise InputError(
            f"expected --out to be a script, got {out}, which is none: give another name"
        )
    make_folder(out.parent)
    write_atomically(out, script)
    typer.echo(f"written to {out}; submit it from here with: sbatch {shlex.quote(str(out))}")
