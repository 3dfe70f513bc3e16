"""``fineprune paper``."""

from pathlib import Path
from typing import Annotated

import typer

from fineprune.cli.exits import exits
from fineprune.cli.options import AsJson, Changes, path_option
from fineprune.cli.output_paths import check_folder
from fineprune.cli.progress import progress
from fineprune.errors import InputError


@exits(to_continue="run the same command again to continue")
def paper(
    which: Annotated[
        str,
        typer.Argument(
            metavar="PAPER",
            help="1: Data Fine-pruning (Li et al. 2018). 2: Distributed training strategies "
            "(Campos et al. 2017).",
            show_default=False,
        ),
    ],
    changes: Changes = None,
    out: Annotated[Path | None, path_option("The folder of all runs [runs/paper-1].")] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Train at the size of the paper: 1: ten networks, 200 epochs, CIFAR-10; 2: "
            "ResNet-50 on a cluster. By default, at one for two CPU cores in about a quarter of an "
            "hour, on CIFAR-10 if it is in data.dir, or else on the embedded digits.",
        ),
    ] = False,
    seeds: Annotated[
        int, typer.Option(help="The number of runs (seeds) of each training [3 of LeNet].", min=0)
    ] = 0,
    jobs: Annotated[
        int, typer.Option(help="Paper 1: the number of runs to train at the same time.", min=0)
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Repeat the experiments of a paper, and write a page with its tables and figures beside ours.

    The same command continues where it was stopped.

    Example: fineprune paper 1 data.dir=data

    Example: fineprune paper 2 --out runs/strategies
    """
    if which not in ("1", "2"):
        raise InputError(f"expected paper 1 or 2, got {which!r}")
    # Imported here, because torch, matplotlib and scipy would delay the start of every command.
    from fineprune.experiments.papers import paper_one, paper_two
    from fineprune.experiments.scale_table import read_scaling, scale_rows
    from fineprune.report.paper_one import write_paper_one
    from fineprune.report.paper_two import write_paper_two
    from fineprune.report.table import print_tables
    from fineprune.runs.files import REPORT, json_text
    from fineprune.runs.run import read_runs

    folder = out or Path("runs") / f"paper-{which}"
    check_folder(folder)
    page, given = folder / REPORT, changes or ()
    with progress() as update:
        if which == "1":
            for comparisons in paper_one(
                folder, given, full=full, seeds=seeds, jobs=jobs, on_progress=update
            ):
                claims = write_paper_one(read_runs(comparisons), page)
        else:
            paper_two(folder, given, full=full, seeds=seeds, on_progress=update)
            scaling = read_scaling(folder)
            claims = write_paper_two(scaling, scale_rows(scaling.runs), page)
    if as_json:
        said = [dict(zip(claims.headers, line, strict=True)) for line in claims.lines]
        typer.echo(json_text({"report": str(page), "claims": said}))
        return
    print_tables([claims])
    typer.echo(f"report: {page}")
