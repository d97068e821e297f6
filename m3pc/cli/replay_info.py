"""How `m3pc replay` shows a store."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m3pc.cli.config import WIDE
from replay.format.segment import FOLDER as SEGMENTS
from replay.store.inspect import StoreInspection, StoreState
from replay.store.recovery import QUARANTINE
from replay.store.verify import Finding, files

MOST = 8  # producers, segments or files that a line names
MEANING = {
    StoreState.WRITTEN: "a writer has it open",
    StoreState.CLOSED: "nobody has it open",
    StoreState.CRASHED: "its writer did not end in order; opening it to write repairs it",
    StoreState.FINISHED: "nothing more will come",
}
AGES = (("days", 86_400), ("hours", 3_600), ("minutes", 60))


def as_json(found: StoreInspection) -> str:
    return json.dumps(_facts(found), indent=1)


def show(found: StoreInspection) -> None:
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _words(_facts(found), time.time()).items():
        table.add_row(name, Text(value or "none"))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def line(path: Path, finding: Finding) -> str:
    """The file by its name in the store, and what is wrong with it."""
    return f"{finding.file.relative_to(path)}: {_what(finding)}"


def _what(finding: Finding) -> str:
    return finding.what.removeprefix(f"{finding.file} ")


def _facts(found: StoreInspection) -> dict[str, Any]:
    header, listing = found.listing.header, found.listing
    aside, stats = found.path / QUARANTINE, _stats(found)
    sealed = [changed for name, (_, changed) in stats.items() if name.startswith(SEGMENTS)]
    return {
        "store": str(found.path),
        "state": found.state,
        "environment": header.env,
        "states": header.states,
        "actions": header.actions,
        "step_limit": header.max_episode_steps,
        "source": header.source,
        "episodes": found.episodes,
        "steps": found.steps,
        "policy_versions": found.versions,
        "bytes": sum(size for size, _ in stats.values()),
        "segments": [listed.number for listed in listing.segments],
        "oldest_segment": _moment(min(sealed, default=None)),
        "newest_segment": _moment(max(sealed, default=None)),
        "log": found.log,
        "log_bytes": found.log_bytes,
        "log_changed": _moment(stats[found.log][1]) if found.log in stats else None,
        "torn_bytes": dict(found.torn),
        "producers": [
            {"slot": slot, "incarnation": where.incarnation, "next": where.expected}
            for slot, where in sorted(found.producers.items())
        ],
        "refused_episodes": found.refused,
        "dropped_segments": list(listing.dropped),
        "withdrawn": [event.model_dump(exclude={"event"}) for event in listing.withdrawn],
        "withdrawn_episodes": found.withdrawn,
        "quarantined": [event.model_dump(exclude={"event"}) for event in listing.quarantined],
        "quarantine_files": sorted(p.name for p in aside.iterdir()) if aside.is_dir() else [],
        "damaged": {str(f.file.relative_to(found.path)): _what(f) for f in found.damaged},
        "episodes_in_damaged_segments": found.lost,
    }


def _words(facts: dict[str, Any], now: float) -> dict[str, str]:
    """The same for people; an empty text where there is nothing."""
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
        "segments": _some(facts["segments"]),
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
        "producers, slot:incarnation": _some(producers),
        "refused episodes": f"{facts['refused_episodes']:,}",
        "withdrawn": f"{_some(slots)}: {facts['withdrawn_episodes']:,} episodes" if slots else "",
        "dropped segments": _some(facts["dropped_segments"]),
        "quarantined segments": _by_name({q["number"]: q["reason"] for q in facts["quarantined"]}),
        "in quarantine/": _some(facts["quarantine_files"]),
    }


def _stats(found: StoreInspection) -> dict[str, tuple[int, float]]:
    """Bytes of each file and when it changed; without those that a writer has just removed."""
    stats = {}
    for name in files(found.listing):
        try:
            stat = (found.path / name).stat()
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


def _some(values: Sequence[object]) -> str:
    """How many, and the first and last of them."""
    shown = list(map(str, values))
    if len(shown) > MOST:
        shown = [*shown[: MOST - 1], "...", shown[-1]]
    return f"{len(values):,} ({', '.join(shown)})" if values else ""


def _by_name(found: Mapping[Any, object]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in found.items())
