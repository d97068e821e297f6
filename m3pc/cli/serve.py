"""`m3pc serve`: actions for robots, over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from m3pc.cli.options import CheckpointPath, Sets, TargetRatio

ServeTokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File of the token that robots must send. Made, readable only by you, if it does "
        "not exist."
    ),
]
ServeInsecure = Annotated[
    bool,
    typer.Option(
        "--insecure-without-token",
        help="Answer every process on this machine, without a token; on loopback only.",
    ),
]
ServePlanner = Annotated[
    str | None,
    typer.Option(
        help="rcbc, m, q or q0: planner of sessions that choose none. Default: planner.mode of "
        "CKPT."
    ),
]
ServeDeadlineMs = Annotated[
    float,
    typer.Option(
        min=1, max=60_000, help="Milliseconds for an answer, unless a request sets its own."
    ),
]
ServeRecord = Annotated[
    Path | None,
    typer.Option(
        metavar="STORE",
        help="Record every episode in this store, which is made if it does not exist.",
    ),
]
ServeFollow = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN", help="Use the newest weights of this online run as it publishes them."
    ),
]
ServeIdle = Annotated[
    float,
    typer.Option(
        "--idle-minutes", min=0.01, max=10_080, help="A session without requests ends then."
    ),
]


def serve(
    checkpoint: CheckpointPath,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port to listen at; 0: any free port.")
    ] = 8400,
    token_file: ServeTokenFile = None,
    insecure: ServeInsecure = False,
    planner: ServePlanner = None,
    ratio: TargetRatio = None,
    deadline_ms: ServeDeadlineMs = 50.0,
    record: ServeRecord = None,
    follow: ServeFollow = None,
    sessions: Annotated[
        int, typer.Option(min=1, max=1024, help="Largest number of robots at the same time.")
    ] = 64,
    idle: ServeIdle = 10.0,
    sets: Sets = None,
) -> None:
    """Serve actions over HTTP until SIGTERM; SIGHUP reloads CKPT. docs/SERVE.md has the API."""
    import logging

    from m3pc.serving.server import ServeConfig
    from m3pc.serving.server import serve as served
    from m3pc.types import InputError

    if (token_file is None) is not insecure:
        raise InputError(
            "every client that is let in can move a robot: give --token-file FILE, which is made "
            "if it does not exist, or, on loopback, --insecure-without-token, but not both"
        )
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s level=%(levelname)s %(message)s", force=True
    )
    changes = [*(sets or ())]
    changes += [f"planner.mode={planner}"] if planner else []
    changes += [] if ratio is None else [f"conditioning.evaluation_ratio={ratio}"]
    code = served(
        ServeConfig(
            source=checkpoint,
            host=host,
            port=port,
            token_file=token_file,
            overrides=tuple(changes),
            deadline=deadline_ms / 1000,
            record=record,
            follow=follow,
            max_sessions=sessions,
            idle_seconds=60 * idle,
        )
    )
    raise typer.Exit(code)
