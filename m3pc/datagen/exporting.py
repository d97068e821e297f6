"""A store for other tools: two Parquet files, or a Minari data set."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import m3pc.envs  # noqa: F401  # registers ids that Minari's metadata may name
from m3pc.core.files import staged_directory, sync_directory
from m3pc.datasets.minari_writer import MinariContent, write_minari
from m3pc.types import Episode, InputError
from replay.format.segment import Tables, episodes_of
from replay.store.inspect import InspectedPart, StoreInspection

OnSteps = Callable[[int], None]  # takes the steps that are written


class Exported(NamedTuple):
    episodes: int
    steps: int


def export(
    found: StoreInspection, out: Path, kind: str, on_progress: Callable[[dict[str, Any]], None]
) -> Exported:
    """What is whole and not withdrawn, in a folder that appears when all of it is written.

    kind  one of FORMATS
    """
    kept = [part.segment.lengths[~part.withdrawn] for part in found.parts]
    total = Exported(sum(map(len, kept)), sum(int(lengths.sum()) for lengths in kept))
    if not total.episodes:
        raise InputError(f"{found.path} has no episode that could be exported; nothing was made")

    if out.resolve().is_relative_to(found.path.resolve()):
        raise InputError(f"{out} is inside the store; give a folder elsewhere")

    def report(steps: int) -> None:
        on_progress({"steps": steps, "of": total.steps})

    with staged_directory(out) as stage:
        FORMATS[kind](found, stage, out.name, report)
        _sync(stage)
    return total


def _parquet(found: StoreInspection, stage: Path, name: str, report: OnSteps) -> None:
    """The columns of segments, a segment at a time."""
    about = {"m3pc": found.listing.header.model_dump_json()}
    schemas = [table.schema.with_metadata(about) for table in found.parts[0].tables]
    with (
        pq.ParquetWriter(stage / "steps.parquet", schemas[0]) as steps,
        pq.ParquetWriter(stage / "episodes.parquet", schemas[1]) as episodes,
    ):
        row = 0
        for part in found.parts:
            tables = _kept(part, row)
            if tables.steps.num_rows:
                steps.write_batch(tables.steps)
                episodes.write_batch(tables.episodes)
            row += tables.steps.num_rows
            report(row)


def _kept(part: InspectedPart, first_row: int) -> Tables:
    """Without what was withdrawn; `first` counts rows of the one steps file from `first_row` on."""
    (steps, episodes), keep = part.tables, ~part.withdrawn
    lengths = part.segment.lengths[keep]
    if not keep.all():
        steps = steps.filter(pa.array(np.repeat(keep, part.segment.lengths)))
        episodes = episodes.filter(pa.array(keep))
    first = pa.array(first_row + np.cumsum(lengths) - lengths)
    place = episodes.schema.get_field_index("first")
    return Tables(steps, episodes.set_column(place, episodes.schema.field(place), first))


def _minari(found: StoreInspection, stage: Path, name: str, report: OnSteps) -> None:
    header = found.listing.header
    content = MinariContent(
        name=name,
        states=header.states,
        actions=header.actions,
        max_episode_steps=header.max_episode_steps,
        env=header.env,
        source=header.source,
        episodes=_episodes(found, report),
    )
    write_minari(stage, content)


def _episodes(found: StoreInspection, report: OnSteps) -> Iterator[Episode]:
    steps = 0
    for part in found.parts:
        for episode, gone in zip(episodes_of(part.segment), part.withdrawn, strict=True):
            if not gone:
                yield episode
                steps += len(episode)
                report(steps)


def _sync(folder: Path) -> None:
    """All of it is on the disk before its name is."""
    for path in folder.iterdir():
        if path.is_dir():
            _sync(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(folder)


FORMATS: Mapping[str, Callable[[StoreInspection, Path, str, OnSteps], None]] = {
    "parquet": _parquet,
    "minari": _minari,
}
