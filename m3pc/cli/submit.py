"""`m3pc submit`, `m3pc jobs`: let a Ray cluster run a command of m3pc."""

from pathlib import Path
from typing import Annotated, Any

import typer

Address = Annotated[
    str,
    typer.Option(
        envvar="RAY_API_SERVER_ADDRESS", help="Of the cluster's dashboard, which takes jobs."
    ),
]
Id = Annotated[str, typer.Argument(metavar="JOB", help="As m3pc submit printed it.")]
HERE = "http://127.0.0.1:8265"

app = typer.Typer(help="Jobs of a Ray cluster.", no_args_is_help=True)


def submit(
    words: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="After --: finetune, pretrain, ...")
    ],
    address: Address = HERE,
    working_dir: Annotated[
        str,
        typer.Option(help="Folder with m3pc to send along, or none where the cluster has it."),
    ] = "",
    folder: Annotated[
        Path | None,
        typer.Option("--in", help="Where it runs: a folder that all machines see. Default: here."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Set a variable. NAME alone: as it is here."),
    ] = None,
    job: Annotated[str, typer.Option("--id", help="The job's. Default: made up.")] = "",
    follow: Annotated[bool, typer.Option(help="Show its log until it ends.")] = True,
) -> None:
    """Run a command of m3pc on a cluster: m3pc submit -- finetune runs/hopper --data data/hopper

    The exit code is that of the command; Ctrl-C leaves it running.
    """
    from m3pc.distributed.jobs import Jobs, variables

    jobs = Jobs(address)
    found = jobs.submit(
        words,
        folder=(folder or Path.cwd()).resolve(),
        code=_code(working_dir),
        environment=variables(env or ()),
        job=job,
    )
    typer.echo(f"job: {found}", err=True)
    if follow:
        _follow(jobs, found)


@app.command("list")
def list_(address: Address = HERE) -> None:
    """What was submitted, the newest first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from m3pc.distributed.jobs import Jobs

    table = Table("job", "status", "code", "command")
    for job in Jobs(address).all():
        code = "" if job.code is None else str(job.code)
        table.add_row(*map(Text, (job.id, job.status, code, job.command)))
    Console(highlight=False).print(table)


@app.command()
def logs(
    job: Id,
    address: Address = HERE,
    follow: Annotated[bool, typer.Option(help="Until it ends.")] = False,
) -> None:
    """What a job printed."""
    from m3pc.distributed.jobs import Jobs

    jobs = Jobs(address)
    if follow:
        _follow(jobs, job)
    else:
        typer.echo(jobs.log(job), nl=False)


@app.command()
def stop(
    job: Id,
    address: Address = HERE,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for it.")] = 100.0,
) -> None:
    """End a job in order: episodes are stored, a checkpoint is written."""
    import time

    from m3pc.distributed.jobs import Jobs

    jobs, end = Jobs(address), time.monotonic() + wait
    jobs.stop(job)
    while not (found := jobs.find(job)).ended and time.monotonic() < end:
        time.sleep(0.5)
    typer.echo(f"job: {found.id}  {found.status.lower()}")
    if not found.ended:
        raise typer.Exit(1)


def _code(given: str) -> Path | None:
    """The folder that this m3pc is in, if it is one to send along."""
    import m3pc
    from m3pc.types import InputError

    if given == "none":
        return None
    folder = Path(given) if given else Path(m3pc.__file__).parents[1]
    if (folder / "m3pc").is_dir() and (folder / "pyproject.toml").is_file():
        return folder.resolve()
    if given:
        raise InputError(f"{given} holds no m3pc; give the folder of its source, or none")
    return None  # installed: the cluster has it installed, too


def _follow(jobs: Any, job: str) -> None:
    try:
        found = jobs.follow(job, lambda text: typer.echo(text, nl=False))
    except KeyboardInterrupt:
        typer.echo(
            f"\n{job} goes on; m3pc jobs logs {job} --follow shows it, m3pc jobs stop {job} "
            "ends it",
            err=True,
        )
        raise
    typer.echo(f"job: {job}  {found.status.lower()}", err=True)
    if found.status != "SUCCEEDED":
        raise typer.Exit(found.code or 1)
