"""`m3pc replay`: inspect a store, check it, audit it, drop parts of it, export it."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from m3pc.cli.options import RunPath, StoreName, store_path
from m3pc.core.exit_codes import CHECK_FAILED

if TYPE_CHECKING:
    from replay.format.index import StoreIndex
    from replay.writing.writer import Writer

app = typer.Typer(
    help="Inspect a store, check it, drop parts of it, export it.", no_args_is_help=True
)


@app.command()
def info(
    store: StoreName,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show state, sizes, age, producers, policy versions and damage; also of a store in use."""
    from m3pc.cli import replay_info
    from replay.store.inspect import inspect_store

    inspection = inspect_store(store_path(store))
    if json:
        typer.echo(replay_info.as_json(inspection))
    else:
        replay_info.show(inspection)


@app.command()
def verify(store: StoreName) -> None:
    """Check every byte of every file; exit code 1 and a line per damaged file."""
    from m3pc.cli.replay_info import line
    from m3pc.types import InputError
    from replay.format import manifest, watermark
    from replay.format.fs import Disk
    from replay.store.recovery import FOLDERS
    from replay.store.tail import read_index
    from replay.store.verify import file_names
    from replay.store.verify import verify as check

    path = store_path(store)
    if not any((path / name).exists() for name in (manifest.NAME, watermark.NAME, *FOLDERS)):
        raise InputError(f"{path} is not a store; give a folder made by `m3pc data` or by a run")
    findings = check(path)
    for finding in findings:
        typer.echo(line(path, finding))
    if findings:
        raise typer.Exit(CHECK_FAILED)
    sizes = [
        file.stat().st_size
        for name in file_names(read_index(Disk(), path))
        if (file := path / name).exists()  # a writer may have replaced its log meanwhile
    ]
    typer.echo(f"{len(sizes):,} files, {sum(sizes):,} bytes: all as written")


@app.command()
def drop(
    store: StoreName,
    segments: Annotated[
        str | None,
        typer.Option(help="Delete these segments: numbers and ranges, such as 0-3,7."),
    ] = None,
    producer: Annotated[
        str | None,
        typer.Option(
            metavar="SLOT[:INCARNATION]",
            help="Never sample this producer's episodes again; they stay in the store.",
        ),
    ] = None,
    damaged: Annotated[
        bool,
        typer.Option(
            "--damaged", help="Move damaged files to quarantine/ and keep the undamaged ones."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Drop segments, a producer's episodes or damaged files from a store that is not in use."""
    from m3pc.types import InputError
    from replay.format.fs import Disk
    from replay.store.tail import read_index
    from replay.writing.writer import Writer

    if [segments is not None, producer is not None, damaged].count(True) != 1:
        raise InputError("give one of --segments, --producer and --damaged, not several or none")
    path = store_path(store)
    index = read_index(Disk(), path)
    if index.close is not None:
        raise InputError(
            f"{path} is a finished data set, from which nothing is dropped; make or import another"
        )
    if segments is not None:
        plan = _without_segments(path, index, segments)
    else:
        plan = _without_damage(path) if producer is None else _without_producer(path, producer)
    typer.echo(plan.description)
    if plan.action is None:
        return
    _confirm(yes)
    with Writer(path, index.header, accept_loss=damaged) as writer:
        plan.action(writer)
    typer.echo("done")


@app.command()
def audit(
    run: RunPath,
) -> None:
    """Compare the acknowledged episodes that a run's actors recorded with its store; exit code 1 if
    one is lost, duplicated or changed. Needs a run with fleet.receipts; works while it runs, too.
    """
    from m3pc.online.delivery_audit import audit_deliveries

    deliveries = audit_deliveries(run)
    for fault, keys in deliveries.faults.items():
        for key in keys:
            typer.echo(f"{fault}: slot {key.slot}, incarnation {key.incarnation}, {key.sequence}")
    typer.echo(str(deliveries))
    if not deliveries.sound:
        raise typer.Exit(CHECK_FAILED)


@app.command()
def export(
    store: StoreName,
    out: Annotated[Path, typer.Argument(help="Folder of the export; must not exist yet.")],
    format_: Annotated[str, typer.Option("--format", help="parquet or minari.")],
) -> None:
    """Write all episodes but damaged and withdrawn ones as Parquet files or a Minari data set."""
    from m3pc.cli.progress import progress
    from m3pc.cli.replay_info import line
    from m3pc.datagen.exporting import FORMATS
    from m3pc.datagen.exporting import export as run
    from m3pc.types import InputError
    from replay.store.inspect import inspect_store

    if format_ not in FORMATS:
        raise InputError(f"--format is {format_!r}; give {' or '.join(FORMATS)}")
    inspection = inspect_store(store_path(store))
    with progress(f"exporting {store}", "steps") as report:
        totals = run(inspection, out, format_, report)
    for finding in inspection.damaged:
        typer.echo(f"damaged, left out: {line(inspection.path, finding)}", err=True)
    typer.echo(
        f"{out}: {totals.episodes:,} episodes, {totals.steps:,} steps; left out: "
        f"{inspection.withdrawn:,} withdrawn episodes, {inspection.lost:,} in damaged segments"
    )


class DropPlan(NamedTuple):
    """What `drop` will do."""

    description: str
    action: Callable[["Writer"], None] | None  # None: there is nothing to do


def _without_segments(path: Path, index: "StoreIndex", text: str) -> DropPlan:
    from m3pc.types import InputError

    segments = {segment.number: segment for segment in index.segments}
    chosen: set[int] = set()
    for word in text.split(","):
        bounds = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", word)
        if bounds is None:
            raise InputError(f"--segments has {word!r}; give numbers and ranges, such as 0-3,7")
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        numbers = {number for number in segments if first <= number <= last}
        if not numbers:
            present = ", ".join(map(str, sorted(segments)[:20])) or "none"
            raise InputError(f"{path} has no segment {word.strip()}; it has {present}")
        chosen |= numbers
    dropped = [segments[number] for number in sorted(chosen)]
    return DropPlan(
        f"segments {', '.join(str(segment.number) for segment in dropped)}: "
        f"{sum(segment.episodes.rows for segment in dropped):,} episodes, "
        f"{sum(segment.steps.rows for segment in dropped):,} steps, "
        f"{sum(segment.bytes for segment in dropped):,} bytes will be deleted",
        lambda writer: writer.drop([segment.number for segment in dropped]),
    )


def _without_producer(path: Path, text: str) -> DropPlan:
    from m3pc.types import InputError
    from replay.format.manifest import Withdraw
    from replay.format.segment import withdrawn_mask
    from replay.store.inspect import inspect_store

    parts = re.fullmatch(r"([0-9]{1,10})(?::([0-9]{1,19}))?", text)
    if parts is None:
        raise InputError(f"--producer is {text!r}; give SLOT or SLOT:INCARNATION, such as 3:0")
    slot, incarnation = int(parts[1]), None if parts[2] is None else int(parts[2])
    inspection = inspect_store(path)
    if slot not in inspection.producers:
        present = ", ".join(map(str, sorted(inspection.producers)[:20])) or "none"
        raise InputError(f"{path} has no producer in slot {slot}; there are slots {present}")
    newest = inspection.producers[slot].incarnation
    if incarnation is not None and incarnation > newest:
        raise InputError(f"{path} knows slot {slot} up to incarnation {newest}, not {incarnation}")
    event = Withdraw(slot=slot, incarnation=incarnation)
    count = sum(int(withdrawn_mask(part.segment, [event]).sum()) for part in inspection.parts)
    producer, later = f"slot {slot}", ", nor those that the slot sends later"
    if incarnation is not None:
        producer, later = f"{producer}, incarnation {incarnation}", ""
    return DropPlan(
        f"{producer}: {count:,} episodes will never be sampled again{later}",
        lambda writer: writer.withdraw_producer(slot, incarnation),
    )


def _without_damage(path: Path) -> DropPlan:
    from m3pc.cli.replay_info import line
    from replay.store.inspect import inspect_store
    from replay.store.recovery import QUARANTINE

    inspection = inspect_store(path)
    if not inspection.damaged:
        return DropPlan("nothing is damaged: nothing to do", None)
    files = [line(path, finding) for finding in inspection.damaged]
    last = f"{inspection.lost:,} episodes of damaged segments will be moved to {QUARANTINE}/"
    if any(finding.file == path / str(inspection.log) for finding in inspection.damaged):
        last += ", the log too, after its undamaged episodes were saved"
    return DropPlan("\n".join([*files, last]), lambda writer: None)  # opening the writer does it


def _confirm(yes: bool) -> None:
    from m3pc.types import InputError

    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(
            "nothing was done: there is no terminal to ask for confirmation; give --yes to do it"
        )
    if not typer.confirm("go on?"):
        typer.echo("nothing was done")
        raise typer.Exit(CHECK_FAILED)
