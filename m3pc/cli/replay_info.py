"""The output of `m3pc replay info`, and the lines of `m3pc replay verify`."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from m3pc.cli.config import wide_console
from replay.format.segment import FOLDER as SEGMENTS
from replay.store.inspect import StoreInspection, StoreState
from replay.store.recovery import QUARANTINE
from replay.store.verify import Finding, file_names

MAX_LISTED = 8  # producers, segments or files in one line
MEANING = {
    StoreState.WRITTEN: "a writer has it open",
    StoreState.CLOSED: "no writer has it open",
    StoreState.CRASHED: "its writer did not close it; opening it for writing repairs it",
    StoreState.FINISHED: "complete; nothing will be added",
}
AGES = (("days", 86_400), ("hours", 3_600), ("minutes", 60))


def as_json(store: StoreInspection) -> str:
    return json.dumps(_facts(store), indent=1)


def show(store: StoreInspection) -> None:
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _labelled(_facts(store), time.time()).items():
        table.add_row(name, Text(value or "none"))
    wide_console().print(table)


def line(path: Path, finding: Finding) -> str:
    """The name of a damaged file in the store, and what is wrong with it."""
    return f"{finding.file.relative_to(path)}: {_what(finding)}"


def _what(finding: Finding) -> str:
    return finding.what.removeprefix(f"{finding.file} ")


def _facts(store: StoreInspection) -> dict[str, Any]:
    """Everything that `info` shows, by its name in the JSON output."""
    index, header = store.index, store.index.header
    quarantine, stats = store.path / QUARANTINE, _stats(store)
    segment_times = [changed for name, (_, changed) in stats.items() if name.startswith(SEGMENTS)]
    return {
        "store": str(store.path),
        "state": store.state,
        "environment": header.env,
        "states": header.states,
        "actions": header.actions,
        "step_limit": header.max_episode_steps,
        "source": header.source,
        "episodes": store.episodes,
        "steps": store.steps,
        "policy_versions": store.versions,
        "bytes": sum(size for size, _ in stats.values()),
        "segments": [segment.number for segment in index.segments],
        "oldest_segment": _moment(min(segment_times, default=None)),
        "newest_segment": _moment(max(segment_times, default=None)),
        "log": store.log,
        "log_bytes": store.log_bytes,
        "log_changed": _moment(stats[store.log][1]) if store.log in stats else None,
        "torn_bytes": dict(store.torn),
        "producers": [
            {"slot": slot, "incarnation": producer.incarnation, "next": producer.expected}
            for slot, producer in sorted(store.producers.items())
        ],
        "refused_episodes": store.refused,
        "dropped_segments": list(index.dropped),
        "withdrawn": [event.model_dump(exclude={"event"}) for event in index.withdrawn],
        "withdrawn_episodes": store.withdrawn,
        "quarantined": [event.model_dump(exclude={"event"}) for event in index.quarantined],
        "quarantine_files": sorted(p.name for p in quarantine.iterdir())
        if quarantine.is_dir()
        else [],
        "damaged": {str(f.file.relative_to(store.path)): _what(f) for f in store.damaged},
        "episodes_in_damaged_segments": store.lost,
    }


def _labelled(facts: dict[str, Any], now: float) -> dict[str, str]:
    """Turn the facts into labelled lines for people; a text is empty if there is nothing."""
    state, versions = facts["state"], facts["policy_versions"]
    lines = {
        "store": facts["store"],
        "state": f"{state}: {MEANING[state]}",
        "environment": facts["environment"] or "unknown",
        "source": ", ".join(f"{key} {value}" for key, value in facts["source"].items()),
        "state, action sizes": f"{facts['states']}, {facts['actions']}",
        "step limit": f"{facts['step_limit']:,}",
        "episodes": f"{facts['episodes']:,}",
        "steps": f"{facts['steps']:,}",
        "policy versions": f"{versions[0]} to {versions[1]}" if versions else "",
        "bytes": f"{facts['bytes']:,}",
        "segments": _shortened(facts["segments"]),
        "oldest segment": _age(facts["oldest_segment"], now),
        "newest segment": _age(facts["newest_segment"], now),
        "damaged": _by_name(facts["damaged"]),
    }
    if state is StoreState.FINISHED:
        return lines
    producers = [f"{p['slot']}:{p['incarnation']} next {p['next']}" for p in facts["producers"]]
    slots = [
        w["slot"] if w["incarnation"] is None else f"{w['slot']}:{w['incarnation']}"
        for w in facts["withdrawn"]
    ]
    return lines | {
        "log": f"{facts['log']}, {facts['log_bytes']:,} bytes",
        "log changed": _age(facts["log_changed"], now),
        "torn bytes": _by_name(facts["torn_bytes"]),
        "producers, slot:incarnation": _shortened(producers),
        "refused episodes": f"{facts['refused_episodes']:,}",
        "withdrawn": f"{_shortened(slots)}: {facts['withdrawn_episodes']:,} episodes"
        if slots
        else "",
        "dropped segments": _shortened(facts["dropped_segments"]),
        "quarantined segments": _by_name({q["number"]: q["reason"] for q in facts["quarantined"]}),
        "in quarantine/": _shortened(facts["quarantine_files"]),
    }


def _stats(store: StoreInspection) -> dict[str, tuple[int, float]]:
    """Bytes and time of change of each file, except files that a writer removed meanwhile."""
    stats = {}
    for name in file_names(store.index):
        try:
            stat = (store.path / name).stat()
        except FileNotFoundError:
            continue
        stats[name] = stat.st_size, stat.st_mtime
    return stats


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _age(moment: str | None, now: float) -> str:
    if moment is None:
        return ""
    then = datetime.fromisoformat(moment)
    seconds = max(now - then.timestamp(), 0)
    unit, size = next((row for row in AGES if seconds >= 2 * row[1]), ("seconds", 1))
    return f"{then:%Y-%m-%d %H:%M:%S} UTC, {seconds / size:.0f} {unit} ago"


def _shortened(values: Sequence[object]) -> str:
    """Show the number of values, the first ones and the last."""
    shown = list(map(str, values))
    if len(shown) > MAX_LISTED:
        shown = [*shown[: MAX_LISTED - 1], "...", shown[-1]]
    return f"{len(values):,} ({', '.join(shown)})" if values else ""


def _by_name(texts: Mapping[Any, object]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in texts.items())
