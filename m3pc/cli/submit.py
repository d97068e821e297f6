"""`m3pc submit` and `m3pc jobs`: run commands of m3pc as jobs of a Ray cluster."""

from pathlib import Path
from typing import Annotated, Any

import typer

Address = Annotated[
    str,
    typer.Option(
        envvar="RAY_API_SERVER_ADDRESS", help="URL of the cluster's dashboard, which takes jobs."
    ),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id that m3pc submit printed.")]
HERE = "http://127.0.0.1:8265"

app = typer.Typer(help="List, follow and stop the jobs of a Ray cluster.", no_args_is_help=True)


def submit(
    words: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="A command of m3pc and its arguments, after --."),
    ],
    address: Address = HERE,
    working_dir: Annotated[
        str,
        typer.Option(
            help="Folder of the source code to send along; none: use what the cluster has "
            "installed. Default: this installation's source code, if it has any."
        ),
    ] = "",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--in",
            help="Working folder, which all machines must see. Default: the present folder.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Set an environment variable; NAME alone passes on its present value. May be "
            "repeated.",
        ),
    ] = None,
    job: Annotated[str, typer.Option("--id", help="Id of the job. Default: a new one.")] = "",
    follow: Annotated[bool, typer.Option(help="Print its log until it ends.")] = True,
) -> None:
    """Run a command of m3pc on a cluster: m3pc submit -- finetune runs/hopper --data data/hopper

    The exit code is that of the command. Ctrl-C leaves the job running.
    """
    from m3pc.distributed.jobs import Jobs, variables

    jobs = Jobs(address)
    job_id = jobs.submit(
        words,
        folder=(folder or Path.cwd()).resolve(),
        code=_code(working_dir),
        environment=variables(env or ()),
        job=job,
    )
    typer.echo(f"job: {job_id}", err=True)
    if follow:
        _follow(jobs, job_id)


@app.command("list")
def list_(address: Address = HERE) -> None:
    """List the submitted jobs, the newest first."""
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
    job: JobId,
    address: Address = HERE,
    follow: Annotated[bool, typer.Option(help="Go on until the job ends.")] = False,
) -> None:
    """Print the log of a job."""
    from m3pc.distributed.jobs import Jobs

    jobs = Jobs(address)
    if follow:
        _follow(jobs, job)
    else:
        typer.echo(jobs.log(job), nl=False)


@app.command()
def stop(
    job: JobId,
    address: Address = HERE,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for its end.")] = 100.0,
) -> None:
    """Stop a job in order: its episodes are stored and a checkpoint is written."""
    import time

    from m3pc.distributed.jobs import Jobs

    jobs, end = Jobs(address), time.monotonic() + wait
    jobs.stop(job)
    while not (state := jobs.find(job)).ended and time.monotonic() < end:
        time.sleep(0.5)
    typer.echo(f"job: {state.id}  {state.status.lower()}")
    if not state.ended:
        raise typer.Exit(1)


def _code(option: str) -> Path | None:
    """The source folder to send along; None: the cluster has m3pc installed."""
    import m3pc
    from m3pc.types import InputError

    if option == "none":
        return None
    folder = Path(option) if option else Path(m3pc.__file__).parents[1]
    if (folder / "m3pc").is_dir() and (folder / "pyproject.toml").is_file():
        return folder.resolve()
    if option:
        raise InputError(f"{option} holds no m3pc; give the folder of its source, or none")
    return None  # this m3pc was installed without its source


def _follow(jobs: Any, job: str) -> None:
    try:
        state = jobs.follow(job, lambda text: typer.echo(text, nl=False))
    except KeyboardInterrupt:
        typer.echo(
            f"\n{job} is still running; m3pc jobs logs {job} --follow shows it, "
            f"m3pc jobs stop {job} stops it",
            err=True,
        )
        raise
    typer.echo(f"job: {job}  {state.status.lower()}", err=True)
    if state.status != "SUCCEEDED":
        raise typer.Exit(state.code or 1)
