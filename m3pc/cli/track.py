"""The option of commands that make metrics."""

from typing import Annotated

import typer

TrackOption = Annotated[
    str,
    typer.Option(
        envvar="M3PC_TRACK",
        help="mlflow or wandb: metrics go there too; where that is, the tool's own variables say.",
    ),
]
