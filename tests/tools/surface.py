"""What users rely on, written to a folder, so that two versions can be compared with `diff -r`.

    python -m tests.tools.surface OUT

Commands run with the Python and in the folder that this was started with.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer.main

from m3pc.cli import app

DATA = "shipped:hopper-medium-replay"
TINY = [
    "pretrain.updates=40",
    "critic.regression_updates=20",
    "critic.updates=20",
    "pretrain.warmup=5",
    "pretrain.checkpoint_every=20",
    "pretrain.log_every=10",
    "pretrain.measure_every=40",
    "planner.candidates=16",
]
LOCAL = [
    "online.steps=120",
    "replay.online_after=40",
    "evaluation.every=60",
    "evaluation.episodes=2",
    "fleet.envs_per_actor=2",
]


def sets(changes: list[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def m3pc(*words: str) -> str:
    """Output of a command; whatever it ends with."""
    done = subprocess.run(
        [sys.executable, "-m", "m3pc", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"},
        check=False,
    )
    return f"{done.stdout}{done.stderr}\nexit code {done.returncode}\n"


def helps(command: Any, words: tuple[str, ...]) -> dict[str, str]:
    shown = {" ".join(words) or "m3pc": m3pc(*words, "--help")}
    for name, child in getattr(command, "commands", {}).items():
        shown |= helps(child, (*words, name))
    return shown


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in (".safetensors", ".arrow")
    }


def keys(folder: Path) -> dict[str, list[str]]:
    """Names inside the JSON files of a run."""
    by_file = {}
    for path in sorted(folder.rglob("*.json*")):
        if path.suffix not in (".json", ".jsonl"):
            continue
        names: set[str] = set()
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        for line in lines:
            tree = json.loads(line)
            names |= set(tree) if isinstance(tree, dict) else set()
        by_file[re.sub(r"\d{6,}", "N", str(path.relative_to(folder)))] = sorted(names)
    return by_file


def sources(pattern: str) -> list[str]:
    """What stands in the sources, each once."""
    tops = ("m3pc", "actors", "learner", "planner", "replay")
    files = [path for top in tops for path in Path(top).rglob("*.py")]
    return sorted({hit for path in files for hit in re.findall(pattern, path.read_text())})


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)

    def save(name: str, text: str) -> None:
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for name, text in helps(typer.main.get_command(app), ()).items():
        save(f"help/{name.replace(' ', '-')}.txt", text)
    for preset in ("parity", "paper", "small"):
        save(f"presets/{preset}.txt", m3pc("config", "show", "--preset", preset))
    save("fields.txt", m3pc("config", "fields"))
    save("metrics.txt", m3pc("monitor", "metrics"))
    save("events.txt", "\n".join(sources(r"event=([a-z-]+)")))
    save("environment.txt", "\n".join(sources(r"\b(M3PC_[A-Z_]+)\b")))
    with tempfile.TemporaryDirectory() as folder:
        base, online = Path(folder) / "base", Path(folder) / "online"
        log = m3pc("pretrain", "--data", DATA, "--preset", "small", "--out", str(base), *sets(TINY))
        log += m3pc(
            *("finetune", str(base), "--data", DATA, "--local", "--planner", "q"),
            *("--out", str(online), *sets(LOCAL)),
        )
        log += m3pc(
            *("evaluate", str(base), "--planner", "q", "--planner", "m"),
            *("--episodes", "2", "--seed", "3"),
        )
        save("runs/log.txt", log.replace(folder, "RUNS"))
        for run in (base, online):
            save(f"runs/{run.name}-digests.json", json.dumps(digests(run), indent=1))
            save(f"runs/{run.name}-keys.json", json.dumps(keys(run), indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
