"""Run a parser over many mutants, each in its own fork of this one process.

Starting Python and loading the parsers takes longer than parsing; here that happens once. A fork
has its own limits of memory and time, so a mutant cannot affect the others.
"""

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from m3pc.datagen import convert
from m3pc.datasets.source import ImportOptions
from m3pc.types import InputError
from replay.format import manifest
from replay.store.store import Store

MEMORY, SECONDS = 2 << 30, 20
OK, REFUSED, BROKEN = 0, 2, 3  # exit codes of a fork
WORDS = {OK: "ok", REFUSED: "refused", BROKEN: "broken"}
# fmt: off
EXTREMES = (0, 1, -1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63), -8)
# fmt: on


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    """One to three changes, seldom to the length; never the same bytes as before."""
    for _ in range(100):
        changed = content
        for _ in range(rng.integers(1, 4)):
            changed = CHANGES[rng.integers(len(CHANGES))](bytearray(changed), rng)
        if changed != content:
            return changed
    raise AssertionError("a hundred changes changed nothing")


def _flip(content: bytearray, rng: np.random.Generator) -> bytes:
    for position in rng.integers(len(content), size=rng.integers(1, 9)):
        content[position] ^= 1 << rng.integers(8)
    return bytes(content)


def _zero(content: bytearray, rng: np.random.Generator) -> bytes:
    first, run = rng.integers(len(content)), rng.integers(1, 65)
    content[first : first + run] = bytes(len(content[first : first + run]))
    return bytes(content)


def _scramble(content: bytearray, rng: np.random.Generator) -> bytes:
    first, run = rng.integers(len(content)), rng.integers(1, 65)
    content[first : first + run] = rng.bytes(len(content[first : first + run]))
    return bytes(content)


def _cut(content: bytearray, rng: np.random.Generator) -> bytes:
    return bytes(content[: rng.integers(1, len(content) + 1)])


def _double(content: bytearray, rng: np.random.Generator) -> bytes:
    """Repeat a block: over other bytes, or inserted between them."""
    source, target = rng.integers(len(content), size=2)
    block = content[source : source + rng.integers(1, 257)]
    pushed = target if rng.random() < 0.3 else target + len(block)
    content[target:pushed] = block
    return bytes(content)


def _extreme(content: bytearray, rng: np.random.Generator) -> bytes:
    width = int(rng.choice([4, 8]))
    first = int(rng.integers(max(1, len(content) // width))) * width
    value = EXTREMES[rng.integers(len(EXTREMES))] % 2 ** (8 * width)
    content[first : first + width] = value.to_bytes(width, "little")
    return bytes(content)


CHANGES: tuple[Callable[[bytearray, np.random.Generator], bytes], ...] = (
    *(_flip, _zero, _scramble, _double, _extreme, _extreme),
    _cut,
)


def main() -> None:
    """Standard input: {task, files, count, seed, folder}; output: a list of {file, outcome}."""
    order = json.load(sys.stdin)
    warm = Path(order["folder"]) / "warm"
    for file in map(Path, order["files"]):  # what is loaded at first use is loaded before the forks
        with contextlib.redirect_stdout(io.StringIO()):
            TASKS[order["task"]](file, file, warm)
        shutil.rmtree(warm)
    results = [_one(order, number) for number in range(order["count"])]
    json.dump(results, sys.stdout)


def _one(order: dict[str, Any], number: int) -> dict[str, str]:
    """Make a mutant, run it, and remove it again if that went well."""
    source = Path(order["files"][number % len(order["files"])])
    rng = np.random.default_rng([order["seed"], number])
    mutant = Path(order["folder"]) / f"{number:06d}-{source.name}"
    work = mutant.with_suffix(".work")
    mutant.write_bytes(mutate(source.read_bytes(), rng))
    outcome = _forked(lambda: TASKS[order["task"]](mutant, source, work))
    shutil.rmtree(work, ignore_errors=True)
    if outcome in ("ok", "refused"):
        mutant.unlink()
    return {"file": mutant.name, "outcome": outcome}


def _forked(task: Callable[[], None]) -> str:
    child = os.fork()
    if child == 0:
        os._exit(_limited(task))
    _, status = os.waitpid(child, 0)  # bounded: the child's alarm ends it, whatever it does
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        late = ended_by in (signal.SIGALRM, signal.SIGXCPU)
        return "late" if late else f"died {signal.Signals(ended_by).name}"
    return WORDS.get(os.WEXITSTATUS(status), f"exit {os.WEXITSTATUS(status)}")


def _limited(task: Callable[[], None]) -> int:
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        task()
    except AssertionError:
        return BROKEN
    except Exception:  # as in the sandbox, where any of them is a refusal
        return REFUSED
    return OK


def convert_mutant(mutant: Path, source: Path, work: Path) -> None:
    """An import that succeeds must leave a store that opens and holds numbers only."""
    work.mkdir()
    job = {"path": str(mutant), "kind": "", "name": source.name, "sha256": ""}
    convert.main(job | {"options": asdict(ImportOptions()), "out": str(work)})
    _assert_good(work)


def open_resealed(mutant: Path, source: Path, work: Path) -> None:
    """The store in which the mutant takes its source's place, with a hash that fits it."""
    shutil.copytree(source.parent.parent, work)
    shutil.copy(mutant, work / "segments" / source.name)
    text = (work / manifest.NAME).read_bytes()
    for old, new in zip(_signature(source), _signature(mutant), strict=True):
        text = text.replace(old, new)
    bodies = [line[9:] for line in text.splitlines()]
    crc, lines = 0, b""
    for body in bodies:
        crc = zlib.crc32(body, crc)
        lines += b"%08x %s\n" % (crc, body)
    (work / manifest.NAME).write_bytes(lines)
    try:
        store = Store(work)
    except InputError:
        raise
    except Exception as error:
        raise AssertionError("only InputError is a refusal here") from error
    for episode in store.episodes():
        assert len(episode.states) == len(episode.actions) + 1 == len(episode.rewards) + 1


def _signature(path: Path) -> tuple[bytes, bytes]:
    content = path.read_bytes()
    return b'"bytes":%d' % len(content), hashlib.sha256(content).hexdigest().encode()


def _assert_good(folder: Path) -> None:
    try:
        episodes = list(Store(folder).episodes())
    except Exception as error:
        raise AssertionError(f"{folder} was written but does not open") from error
    for episode in episodes:
        assert all(np.isfinite(x).all() for x in (episode.states, episode.actions, episode.rewards))


TASKS = {"convert": convert_mutant, "open": open_resealed}


if __name__ == "__main__":
    main()
