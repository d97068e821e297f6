"""Arguments and options that several commands share, and what their values stand for."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from m3pc.datasets.sandbox import SandboxLimits
    from replay.store.store import Store

PICTURE_ENDINGS = (".png", ".pdf", ".svg")


def check_picture(path: Path | None) -> Path | None:
    """Callback of every --png: refuse a path that cannot hold a picture, before any work."""
    from m3pc.types import InputError

    if path is None:
        return None
    if path.suffix.lower() not in PICTURE_ENDINGS:
        endings = " or ".join(PICTURE_ENDINGS)
        raise InputError(f"--png is {path}; give a file whose name ends in {endings}")
    if path.is_dir():
        raise InputError(f"--png is {path}, a folder; give a file")
    return path


# Arguments

CheckpointPath = Annotated[
    Path, typer.Argument(metavar="CKPT", help="Folder of a run or of a checkpoint.")
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of an online run.")]
RunPaths = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of online runs.")]
StoreName = Annotated[
    str, typer.Argument(metavar="STORE", help="Folder of a store, or shipped:NAME.")
]

# Options

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change one setting, such as planner.candidates=64. May be repeated; all settings: "
        "m3pc config fields.",
    ),
]
Preset = Annotated[
    str | None, typer.Option(help="parity, paper or small. Default: that of --file, else paper.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(help="YAML file with the settings that differ from the preset."),
]
Seed = Annotated[
    int, typer.Option(min=0, help="Seed of all random numbers: same seed, same result.")
]
RunSeed = Annotated[
    int | None,
    typer.Option(min=0, help="Seed of all random numbers; the same as --set seed=N."),
]
TargetRatio = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=10,
        help="Target return, as a multiple of the best return in the data. Default: "
        "conditioning.evaluation_ratio of CKPT.",
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        min=0,
        max=256,
        help="Processes that step the environments; results do not depend on it. Default 0: one "
        "per core for robosuite, none for other environments.",
    ),
]
Track = Annotated[
    str,
    typer.Option(
        envvar="M3PC_TRACK",
        help="mlflow or wandb: send metrics there too. The tool's own environment variables say "
        "where that is.",
    ),
]
EnvId = Annotated[
    str | None,
    typer.Option("--env", help="Environment id. Needed only if the file does not name one."),
]
MemoryLimit = Annotated[
    float,
    typer.Option(min=0.25, max=4096, help="GiB of memory for reading a foreign file."),
]
TimeLimit = Annotated[
    float, typer.Option(min=1, max=86400, help="Seconds for reading a foreign file.")
]


def open_store(name: str) -> "Store":
    """Open the store that a StoreName stands for."""
    from replay.store.store import Store

    return Store(store_path(name))


def store_path(name: str) -> Path:
    """The folder that a StoreName stands for."""
    from m3pc.datasets.download import SHIPPED
    from m3pc.types import InputError

    kind, _, dataset = name.partition(":")
    if kind != "shipped":
        return Path(name)
    names = sorted(path.name for path in SHIPPED.iterdir() if path.is_dir())
    if dataset not in names:
        raise InputError(f"{name} does not come with m3pc; there is {', '.join(names)}")
    return SHIPPED / dataset


def sandbox_limits(memory: float, seconds: float) -> "SandboxLimits":
    """Make limits from a MemoryLimit (GiB) and a TimeLimit (seconds)."""
    from m3pc.datasets.sandbox import SandboxLimits

    return SandboxLimits(memory=int(memory * 2**30), seconds=seconds)
