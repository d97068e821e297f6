"""`m3pc replay`: look at a store, check it, drop parts of it, give it to other tools."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from m3pc.cli.data import store_path

if TYPE_CHECKING:
    from replay.format.index import StoreIndex
    from replay.writing.writer import Writer

FOUND = 1  # exit code where a check found something

app = typer.Typer(help="Look at a store, check it, drop from it, export it.", no_args_is_help=True)

StorePath = Annotated[str, typer.Argument(metavar="STORE", help="A store, or shipped:NAME.")]


@app.command()
def info(
    store: StorePath,
    json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """State, sizes, age, producers, policy versions, damage; also while the store is written."""
    from m3pc.cli import replay_info
    from replay.store.inspect import survey

    found = survey(store_path(store))
    if json:
        typer.echo(replay_info.as_json(found))
    else:
        replay_info.show(found)


@app.command()
def verify(store: StorePath) -> None:
    """Check every byte of every file; exit code 1 and a line for each file that is not right."""
    from m3pc.cli.replay_info import line
    from m3pc.types import InputError
    from replay.format import manifest, watermark
    from replay.format.fs import Disk
    from replay.store.recovery import FOLDERS
    from replay.store.tail import read_listing
    from replay.store.verify import files
    from replay.store.verify import verify as check

    path = store_path(store)
    if not any((path / name).exists() for name in (manifest.NAME, watermark.NAME, *FOLDERS)):
        raise InputError(f"{path} is not a store; give a folder made by `m3pc data` or by a run")
    findings = check(path)
    for finding in findings:
        typer.echo(line(path, finding))
    if findings:
        raise typer.Exit(FOUND)
    sizes = [
        file.stat().st_size
        for name in files(read_listing(Disk(), path))
        if (file := path / name).exists()  # a writer may just have replaced its log
    ]
    typer.echo(f"{len(sizes):,} files, {sum(sizes):,} bytes: all as written")


@app.command()
def drop(
    store: StorePath,
    segments: Annotated[
        str | None, typer.Option(help="Numbers and ranges, such as 0-3,7: gone for good.")
    ] = None,
    producer: Annotated[
        str | None,
        typer.Option(metavar="SLOT[:INCARNATION]", help="What it sent is never sampled again."),
    ] = None,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Set damaged files aside, go on with what is whole.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Forget segments, a producer or what is damaged, in a store that nobody writes."""
    from m3pc.types import InputError
    from replay.format.fs import Disk
    from replay.store.tail import read_listing
    from replay.writing.writer import Writer

    if [segments is not None, producer is not None, damaged].count(True) != 1:
        raise InputError("give one of --segments, --producer and --damaged, not several or none")
    path = store_path(store)
    listing = read_listing(Disk(), path)
    if listing.close is not None:
        raise InputError(
            f"{path} is a finished data set, from which nothing is dropped; make or import another"
        )
    if segments is not None:
        plan = _without_segments(path, listing, segments)
    else:
        plan = _without_damage(path) if producer is None else _without_producer(path, producer)
    typer.echo(plan.what)
    if plan.act is None:
        return
    _confirm(yes)
    with Writer(path, listing.header, accept_loss=damaged) as writer:
        plan.act(writer)
    typer.echo("done")


@app.command()
def export(
    store: StorePath,
    out: Annotated[Path, typer.Argument(help="The folder to make; must not exist yet.")],
    format_: Annotated[str, typer.Option("--format", help="parquet or minari.")],
) -> None:
    """Write what is whole and not withdrawn for other tools: Parquet files or a Minari data set."""
    from m3pc.cli.progress import progress
    from m3pc.cli.replay_info import line
    from m3pc.datagen.exporting import FORMATS
    from m3pc.datagen.exporting import export as run
    from m3pc.types import InputError
    from replay.store.inspect import survey

    if format_ not in FORMATS:
        raise InputError(f"--format is {format_!r}; give {' or '.join(FORMATS)}")
    found = survey(store_path(store))
    with progress(f"exporting {store}", "steps") as report:
        done = run(found, out, format_, report)
    for finding in found.damaged:
        typer.echo(f"damaged, left out: {line(found.path, finding)}", err=True)
    typer.echo(
        f"{out}: {done.episodes:,} episodes, {done.steps:,} steps; left out: "
        f"{found.withdrawn:,} withdrawn episodes, {found.lost:,} in damaged segments"
    )


class DropPlan(NamedTuple):
    what: str  # will be done, in words
    act: Callable[["Writer"], None] | None  # None: there is nothing to do


def _without_segments(path: Path, listing: "StoreIndex", text: str) -> DropPlan:
    from m3pc.types import InputError

    known = {listed.number: listed for listed in listing.segments}
    chosen: set[int] = set()
    for word in text.split(","):
        bounds = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", word)
        if bounds is None:
            raise InputError(f"--segments has {word!r}; give numbers and ranges, such as 0-3,7")
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        within = {number for number in known if first <= number <= last}
        if not within:
            there = ", ".join(map(str, sorted(known)[:20])) or "none"
            raise InputError(f"{path} has no segment {word.strip()}; it has {there}")
        chosen |= within
    gone = [known[number] for number in sorted(chosen)]
    return DropPlan(
        f"segments {', '.join(str(listed.number) for listed in gone)}: "
        f"{sum(listed.episodes.rows for listed in gone):,} episodes, "
        f"{sum(listed.steps.rows for listed in gone):,} steps, "
        f"{sum(listed.bytes for listed in gone):,} bytes will be gone for good",
        lambda writer: writer.drop([listed.number for listed in gone]),
    )


def _without_producer(path: Path, text: str) -> DropPlan:
    from m3pc.types import InputError
    from replay.format.manifest import Withdraw
    from replay.format.segment import withdrawn
    from replay.store.inspect import survey

    words = re.fullmatch(r"([0-9]{1,10})(?::([0-9]{1,19}))?", text)
    if words is None:
        raise InputError(f"--producer is {text!r}; give SLOT or SLOT:INCARNATION, such as 3:0")
    slot, incarnation = int(words[1]), None if words[2] is None else int(words[2])
    found = survey(path)
    if slot not in found.producers:
        there = ", ".join(map(str, sorted(found.producers)[:20])) or "none"
        raise InputError(f"{path} has no producer in slot {slot}; there are slots {there}")
    newest = found.producers[slot].incarnation
    if incarnation is not None and incarnation > newest:
        raise InputError(f"{path} knows slot {slot} up to incarnation {newest}, not {incarnation}")
    event = Withdraw(slot=slot, incarnation=incarnation)
    count = sum(int(withdrawn(part.segment, [event]).sum()) for part in found.parts)
    who, later = f"slot {slot}", ", nor what the slot sends later"
    if incarnation is not None:
        who, later = f"{who}, incarnation {incarnation}", ""
    return DropPlan(
        f"{who}: {count:,} episodes will never be sampled again{later}",
        lambda writer: writer.withdraw(slot, incarnation),
    )


def _without_damage(path: Path) -> DropPlan:
    from m3pc.cli.replay_info import line
    from replay.store.inspect import survey
    from replay.store.recovery import QUARANTINE

    found = survey(path)
    if not found.damaged:
        return DropPlan("nothing is damaged: nothing to do", None)
    files = [line(path, finding) for finding in found.damaged]
    last = f"{found.lost:,} episodes of damaged segments will be set aside in {QUARANTINE}/"
    if any(finding.file == path / str(found.log) for finding in found.damaged):
        last += ", the log too, after what is whole in it was saved"
    return DropPlan("\n".join([*files, last]), lambda writer: None)  # opening the writer does it


def _confirm(yes: bool) -> None:
    from m3pc.types import InputError

    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError("nothing was done, for nobody can be asked here; give --yes to do it")
    if not typer.confirm("go on?"):
        typer.echo("nothing was done")
        raise typer.Exit(FOUND)
