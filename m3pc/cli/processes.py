"""How many processes step the environments that a command plays in."""

from typing import Annotated

import typer

Processes = Annotated[
    int,
    typer.Option(
        min=0,
        max=256,
        help="That step the environments; the numbers do not depend on it. Default: all cores "
        "for robosuite, else this one.",
    ),
]
