"""``fineprune slurm``."""

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import RecipeFile, path_option, split_changes
from fineprune.cli.output_paths import check_file, inputs_of
from fineprune.errors import InputError, check_one_of
from fineprune.experiments.configurations import configuration, configured
from fineprune.launch.slurm import batch_script
from fineprune.training.recipe import Recipe, read_recipe
from fineprune.writing import make_folder, write_atomically

_VERBS = ("train", "compare", "scale")


@exits()
def slurm(
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
        str, typer.Option(help="More options of the verb, such as '--seeds 3'.")
    ] = "",
    run: Annotated[
        Path | None, path_option("The folder of the run or experiment [as without Slurm].")
    ] = None,
    gpus: Annotated[int, typer.Option(help="The number of GPUs, and processes, per node.")] = 0,
    cpus: Annotated[
        int | None, typer.Option(help="The number of CPUs per node [one per process].")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="The time limit, such as 24:00:00 or 2-12.")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="A shell command to run first, such as 'module load cuda'."),
    ] = None,
    out: Annotated[
        Path | None, path_option("The file to write the script to [standard output].")
    ] = None,
) -> None:
    """Write a Slurm batch script that trains a recipe on several nodes. Submits nothing.

    Example: fineprune slurm digits --nodes 8 --gpus 4 --time 24:00:00 --out job.sh

    Example: fineprune slurm digits --verb scale one 'async 4+2' --nodes 4 --out job.sh
    """
    check_one_of("--verb", verb, _VERBS)
    chosen, changed = split_changes(words)
    if bool(chosen) != (verb == "scale"):
        raise InputError(
            f"expected configurations, such as 'async 4+2', with --verb scale and only there, got "
            f"{' '.join(chosen) or 'none'} with --verb {verb}"
        )
    if run is not None and "$" in str(run):  # All jobs of an array would take it for one folder.
        raise InputError(
            f"expected --run without variables, which the script does not replace, got {run}: "
            f"write one script for each run"
        )
    made = read_recipe(recipe, changed)
    if out is not None:
        check_file("--out", out, [recipe, *inputs_of(made.as_dict())])
        if out.is_file() and out.read_bytes()[:2] not in (b"", b"#!"):
            raise InputError(
                f"expected --out to be a script, got {out}, which is none: give another name"
            )
    trained = [configured(made, configuration(text), same_update=False) for text in chosen]
    served = [one for one in trained or [made] if one.distributed.served]
    kind = "ray" if served or verb == "scale" else "one" if verb == "compare" else "all-reduce"
    if made.run.device.startswith("cuda") and not gpus:
        raise InputError(
            f"expected --gpus with run.device={made.run.device}, got none: ask for GPUs, or set "
            f"run.device=cpu"
        )
    if served:
        busiest = max(_processes(one, nodes, whole=verb != "scale") for one in served)
        cpus = cpus or busiest * max(1, made.run.threads) + 1
        # Left at 0 and "auto", these would be resolved on the first node for all workers.
        changed += [] if made.run.threads else [f"run.threads={max(1, (cpus - 1) // busiest)}"]
        changed += ["run.device=cpu"] if made.run.device == "auto" and not gpus else []
    policy = made.pruning.policy.replace(":", "-") if verb == "train" else verb
    folder = run or Path("runs") / f"{recipe.stem}-{policy}"
    command = ["-m", "fineprune", verb, str(recipe), *chosen, "--out", str(folder)]
    command += [*_options_of(verb, options), *(["--resume"] if verb == "train" else []), *changed]
    script = batch_script(
        command,
        folder,
        kind=kind,
        nodes=nodes,
        gpus=gpus,
        cpus=cpus,
        time=time,
        # Without the characters that Slurm does not allow.
        name="fineprune-" + re.sub(r"[^A-Za-z0-9_.-]", "-", recipe.stem),
        setup=setup or (),
    )
    if out is None:
        typer.echo(script, nl=False)
    else:
        make_folder(out.parent)
        write_atomically(out, script)
        typer.echo(f"written to {out}; submit it from here with: sbatch {shlex.quote(str(out))}")


def _options_of(verb: str, text: str) -> list[str]:
    """Return more options of a verb, which takes them: else the job would fail after its wait."""
    from fineprune.cli.main import app

    try:
        options = shlex.split(text)
        command: Any = typer.main.get_command(app)
        command.get_command(None, verb).make_context(verb, ["recipe", *options])
    except (ValueError, typer.TyperException) as error:
        told = error.format_message() if isinstance(error, typer.TyperException) else error
        raise InputError(f"expected --options of fineprune {verb}, got {text!r}: {told}") from error
    return options


def _processes(recipe: Recipe, nodes: int, *, whole: bool) -> int:
    """Return the workers and dedicated servers of the busiest node; a group shares a node.

    ``whole`` says whether the training has to use all nodes.
    """
    settings = recipe.distributed
    dedicated = settings.servers if settings.placement == "dedicated" else 0
    places = settings.groups + dedicated
    if whole and places < nodes:
        raise InputError(
            f"expected work for all {nodes} nodes, got {settings.groups} groups of workers and "
            f"{dedicated} dedicated servers: ask for fewer nodes, or set "
            f"distributed.workers={(nodes - dedicated) * settings.group}"
        )
    return -(-places // min(nodes, places)) * settings.group
