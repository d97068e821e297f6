"""`m3pc replay export`: a store as two Parquet files, or as a Minari data set."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import m3pc.envs  # noqa: F401  # registers ids that Minari's metadata may name
from m3pc.core.files import staged_directory, sync_directory
from m3pc.core.progress import OnProgress
from m3pc.datasets.minari_writer import MinariContent, write_minari
from m3pc.types import Episode, InputError
from replay.format.segment import Tables, episodes_of
from replay.store.inspect import InspectedPart, StoreInspection

OnSteps = Callable[[int], None]  # called with the number of steps written so far


class ExportTotals(NamedTuple):
    """The size of what was exported."""

    episodes: int
    steps: int


def export(store: StoreInspection, out: Path, kind: str, on_progress: OnProgress) -> ExportTotals:
    """Write all episodes that are undamaged and not withdrawn. `out` appears when it is complete.

    kind  one of FORMATS
    """
    lengths = [part.segment.lengths[~part.withdrawn] for part in store.parts]
    total = ExportTotals(sum(map(len, lengths)), sum(int(part.sum()) for part in lengths))
    if not total.episodes:
        raise InputError(f"{store.path} has no episode that could be exported; nothing was made")
    if out.resolve().is_relative_to(store.path.resolve()):
        raise InputError(f"{out} is inside the store; give a folder elsewhere")

    def report(steps: int) -> None:
        on_progress({"steps": steps, "of": total.steps})

    with staged_directory(out) as stage:
        FORMATS[kind](store, stage, out.name, report)
        _sync(stage)
    return total


def _parquet(store: StoreInspection, stage: Path, name: str, report: OnSteps) -> None:
    """The columns of the segments, one segment at a time."""
    metadata = {"m3pc": store.index.header.model_dump_json()}
    schemas = [table.schema.with_metadata(metadata) for table in store.parts[0].tables]
    with (
        pq.ParquetWriter(stage / "steps.parquet", schemas[0]) as steps,
        pq.ParquetWriter(stage / "episodes.parquet", schemas[1]) as episodes,
    ):
        row = 0
        for part in store.parts:
            tables = _kept(part, row)
            if tables.steps.num_rows:
                steps.write_batch(tables.steps)
                episodes.write_batch(tables.episodes)
            row += tables.steps.num_rows
            report(row)


def _kept(part: InspectedPart, first_row: int) -> Tables:
    """A part's tables without withdrawn episodes; `first` counts rows of the joined steps file."""
    (steps, episodes), keep = part.tables, ~part.withdrawn
    lengths = part.segment.lengths[keep]
    if not keep.all():
        steps = steps.filter(pa.array(np.repeat(keep, part.segment.lengths)))
        episodes = episodes.filter(pa.array(keep))
    first = pa.array(first_row + np.cumsum(lengths) - lengths)
    column = episodes.schema.get_field_index("first")
    return Tables(steps, episodes.set_column(column, episodes.schema.field(column), first))


def _minari(store: StoreInspection, stage: Path, name: str, report: OnSteps) -> None:
    header = store.index.header
    content = MinariContent(
        name=name,
        state_size=header.states,
        action_size=header.actions,
        max_episode_steps=header.max_episode_steps,
        env=header.env,
        source=header.source,
        episodes=_episodes(store, report),
    )
    write_minari(stage, content)


def _episodes(store: StoreInspection, report: OnSteps) -> Iterator[Episode]:
    steps = 0
    for part in store.parts:
        for episode, withdrawn in zip(episodes_of(part.segment), part.withdrawn, strict=True):
            if not withdrawn:
                yield episode
                steps += len(episode)
                report(steps)


def _sync(folder: Path) -> None:
    """Flush every file, so that its content is on disk before the folder is renamed."""
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
