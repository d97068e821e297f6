"""`m3pc serve`: a checkpoint that tells robots what to do, over HTTP."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A run or checkpoint.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8400,
    token_file: Annotated[
        Path | None,
        typer.Option(help="What robots must send; made if there is none, for your eyes only."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure-without-token", help="Let everybody on this machine ask."),
    ] = False,
    planner: Annotated[
        str | None,
        typer.Option(help="rcbc, m, q or q0, for sessions that ask for none; default: CKPT's."),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(min=0, max=10, help="Ask for this times the best return of the data."),
    ] = None,
    deadline_ms: Annotated[
        float,
        typer.Option(min=1, max=60_000, help="For an answer, unless a robot says otherwise."),
    ] = 50.0,
    record: Annotated[
        Path | None,
        typer.Option(metavar="STORE", help="Append every episode to this store; made if absent."),
    ] = None,
    follow: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Answer by the newest weights that this run publishes."),
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, max=1024, help="Robots at the same time.")] = 64,
    idle: Annotated[
        float, typer.Option("--idle-minutes", min=0.01, max=10_080, help="Then a session is ended.")
    ] = 10.0,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change how to plan. May be repeated."),
    ] = None,
) -> None:
    """Serve actions until SIGTERM; SIGHUP reads CKPT anew. docs/SERVE.md says how to ask."""
    import logging

    from m3pc.serving.server import ServeConfig
    from m3pc.serving.server import serve as served
    from m3pc.types import InputError

    if (token_file is None) is not insecure:
        raise InputError(
            "robots are moved by whoever may ask: give --token-file FILE, which is made if there "
            "is none, or on loopback --insecure-without-token, and not both"
        )
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s level=%(levelname)s %(message)s", force=True
    )
    more = [f"planner.mode={planner}"] if planner else []
    more += [] if ratio is None else [f"conditioning.evaluation_ratio={ratio}"]
    code = served(
        ServeConfig(
            path=checkpoint,
            host=host,
            port=port,
            token=token_file,
            sets=(*(sets or ()), *more),
            deadline=deadline_ms / 1000,
            record=record,
            follow=follow,
            sessions=sessions,
            idle=60 * idle,
        )
    )
    raise typer.Exit(code)
