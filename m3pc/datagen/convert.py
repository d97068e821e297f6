"""The sandboxed half of `m3pc data import`: reads a foreign file and writes a store.

The sandbox's child process calls `main(job)`.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from m3pc.datasets import d4rl, minari, robomimic
from m3pc.datasets.hdf5 import open_hdf5
from m3pc.datasets.sandbox import report
from m3pc.datasets.source import EpisodeSource, ImportOptions
from m3pc.types import InputError
from replay.format.manifest import Header
from replay.store.store import StoreWriter

REPORT_EVERY = 20_000  # steps
NO_SUBSETS = "--subset is {!r}, but only robomimic's files have subsets; leave it out"
# A file may hold one array under many names, each of which becomes an episode. So a store may have
# MAX_BYTES, or MAX_RATIO times the bytes of its source on disk if that is more.
MAX_BYTES, MAX_RATIO = 1 << 30, 64


def main(job: dict[str, Any]) -> None:
    """job: path, kind ('' to detect it), name, sha256, options, out (an empty folder)."""
    options = ImportOptions(**{**job["options"], "keys": tuple(job["options"]["keys"])})
    path = Path(job["path"])
    if options.subset and path.is_dir():
        raise InputError(NO_SUBSETS.format(options.subset))
    origin = {"name": job["name"], "sha256": job["sha256"]}
    if path.is_dir():
        if not minari.is_minari(path):
            raise InputError(
                f"{path.name} is a folder, but not a Minari data set: data/metadata.json is missing"
            )
        _write(minari.read_minari(path, options), origin, Path(job["out"]), max_store_bytes(path))
        return
    with open_hdf5(path) as file:
        kind = job["kind"] or _kind(file, path)
        if kind == "robomimic":
            source = robomimic.read_robomimic(file, options)
        elif options.subset:
            raise InputError(NO_SUBSETS.format(options.subset))
        else:
            source = d4rl.read_d4rl(file, job["name"], options)
        _write(source, origin, Path(job["out"]), max_store_bytes(path))


def max_store_bytes(path: Path) -> int:
    """The largest size of a store that is made from this file or folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return max(MAX_BYTES, MAX_RATIO * sum(512 * file.stat().st_blocks for file in files))


def _kind(file: Any, path: Path) -> str:
    if robomimic.is_robomimic(file):
        return "robomimic"
    if d4rl.is_d4rl(file):
        return "d4rl"
    raise InputError(
        f"{path.name} is neither D4RL (observations, actions, rewards, terminals) nor robomimic "
        f"(data/demo_*): found {list(file)[:12]}"
    )


def _write(source: EpisodeSource, origin: dict[str, str], out: Path, max_bytes: int) -> None:
    try:
        header = Header(
            states=source.state_size,
            actions=source.action_size,
            max_episode_steps=source.max_episode_steps,
            env=source.env,
            source={"kind": source.kind, **origin, **source.details},
        )
    except ValidationError as error:
        fault = error.errors()[0]
        raise InputError(f"{fault['loc'][0]} is {fault['input']!r}: {fault['msg']}") from None
    writer = StoreWriter(out, header)
    reported = 0
    step_bytes = 4 * (source.state_size + source.action_size + 1)
    for episode in source.episodes:
        if step_bytes * (writer.steps + len(episode)) > max_bytes:
            raise InputError(
                f"{origin['name']} unpacks to more than {max_bytes} bytes, far more than it has on "
                "disk; if you trust it, write it again without compression and links"
            )
        writer.append(episode)
        if writer.steps - reported >= REPORT_EVERY:
            reported = writer.steps
            report(steps=writer.steps, episodes=writer.episodes)
    writer.close()
    report(steps=writer.steps, episodes=writer.episodes)
