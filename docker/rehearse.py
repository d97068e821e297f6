"""Run a target's steps of the Dockerfile where there is no engine: in a Debian root of its own.

    python docker/rehearse.py ROOT --target actor -- python -c "import ray"

Needs Linux, root and debootstrap. The base image is replaced by Debian bookworm with its own Python
3.11; everything else is read from the Dockerfile: ARG, ENV, WORKDIR, COPY, RUN, USER. Stages run
after each other in one root, so what a last stage leaves behind of the earlier ones is not shown.
What follows `--` runs at the end as the image's user, with a /proc, process ids and /dev/shm of its
own. ROOT stays; a second call goes on with the same Debian and makes everything else anew.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SUITE, PACKAGES = "bookworm", "ca-certificates,python3,python3-venv,python-is-python3"
START = {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin", "HOME": "/root"}
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Step:
    word: str
    rest: str


@dataclass(slots=True)
class Stage:
    name: str
    base: str
    steps: list[Step] = field(default_factory=list)


def parse(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """Arguments before the first stage, and the stages by name."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for step in _steps(text):
        if step.word == "FROM":
            base, _, name = step.rest.partition(" AS ")
            stage = stages[name] = Stage(name, expand(base, arguments))
        elif stage is not None:
            stage.steps.append(step)
        elif step.word == "ARG":
            name, _, value = step.rest.partition("=")
            arguments[name] = value
    return arguments, stages


def _steps(text: str) -> Iterator[Step]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    for line in filter(None, (line.strip() for line in joined.splitlines())):
        word, _, rest = line.partition(" ")
        yield Step(word, rest.strip())


def expand(text: str, values: dict[str, str]) -> str:
    return VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def needed(stages: dict[str, Stage], target: str) -> list[Stage]:
    """The stages that a target stands on or copies from, in an order in which they can run."""
    order: list[Stage] = []

    def visit(name: str) -> None:
        stage = stages.get(name)
        if stage is None or stage in order:
            return
        for step in stage.steps:
            if match := re.match(r"--from=(\S+)", step.rest):
                visit(match[1])
        visit(stage.base)
        order.append(stage)

    visit(target)
    return order


class Root:
    """A Debian in a folder, in which commands run with mounts and process ids of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mounts = _pip_folders()

    def make(self) -> None:
        if not (self.folder / "usr/bin/python").exists():
            options = ["--variant=minbase", f"--include={PACKAGES}"]
            subprocess.run(["debootstrap", *options, SUITE, str(self.folder)], check=True)
        shutil.copy("/etc/resolv.conf", self.folder / "etc/resolv.conf")
        for name in ("opt/venv", "build"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self.run("if id m3pc; then userdel --remove m3pc; fi > /dev/null 2>&1", START, "/", "")

    def run(self, command: str, environment: dict[str, str], place: str, user: str) -> int:
        inside = f"cd {shlex.quote(place)} && {command}"
        change = f"chroot --userspec={user} ." if user else "chroot ."
        variables = " ".join(shlex.quote(f"{name}={value}") for name, value in environment.items())
        return self._here(f"env -i {variables} /bin/sh -c {shlex.quote(inside)}", change)

    def _here(self, command: str, change: str = "chroot .") -> int:
        lines = ["set -e", "mount -t proc proc proc", "mount --bind /dev dev"]
        lines.append("mount -t tmpfs -o mode=1777 shm dev/shm")
        for path in self._mounts:
            made = "mkdir -p" if path.is_dir() else "install -D /dev/null"
            inner = shlex.quote(str(path).lstrip("/"))
            lines += [f"{made} {inner}", f"mount --bind -o ro {shlex.quote(str(path))} {inner}"]
        lines.append(f"exec {change} {command}")
        # Whatever a command leaves running ends with its process ids' namespace.
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return subprocess.run(
            [*spaces, "sh", "-c", "\n".join(lines)], cwd=self.folder, check=False
        ).returncode


def _pip_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def _pip_folders() -> list[Path]:
    """Where this machine's pip finds packages and certificates, for the pip inside the root."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    named = [Path(path) for path in re.findall(r"(?<![\w.])(/[\w./-]+)", listing)]
    files = [Path("/etc/pip.conf"), Path("/etc/ssl/certs"), *named]
    present = [path for path in files if path.exists()]
    outer = [path for path in present if not any(other in path.parents for other in present)]
    return sorted(set(outer))


def play(root: Root, stages: list[Stage], arguments: dict[str, str]) -> tuple[dict[str, str], str]:
    """Run the steps; the last stage's environment and user."""
    pip = {key: value for key, value in _pip_settings().items() if key != "PIP_CONSTRAINT"}
    kept: dict[str, tuple[dict[str, str], str]] = {}
    environment, place, user = {}, "/", ""
    for stage in stages:
        inherited, place = kept.get(stage.base, (START, "/"))
        environment, user, local = dict(inherited), "", dict(arguments)
        for step in stage.steps:
            if step.word == "ARG":
                name, _, value = step.rest.partition("=")
                local.setdefault(name, value)
            elif step.word == "ENV":
                for part in shlex.split(step.rest):
                    name, _, value = part.partition("=")
                    environment[name] = expand(value, environment)
            elif step.word == "WORKDIR":
                place = step.rest
                (root.folder / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif step.word == "COPY" and not step.rest.startswith("--from"):
                *sources, _target = step.rest.split()
                for source in sources:
                    shutil.copy(REPOSITORY / source, root.folder / place.lstrip("/"))
            elif step.word == "USER":
                user = step.rest
            elif step.word == "RUN":
                sys.stderr.write(f"[{stage.name}] RUN {step.rest}\n")
                if status := root.run(step.rest, pip | local | environment, place, ""):
                    sys.exit(f"[{stage.name}] RUN ended with {status}")
        kept[stage.name] = (environment, place)
    return environment, user


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    words, command = sys.argv[1:], []
    if "--" in words:
        words, command = words[: words.index("--")], words[words.index("--") + 1 :]
    options = parser.parse_args(words)
    arguments, stages = parse((REPOSITORY / "docker/Dockerfile").read_text())
    arguments |= dict(pair.split("=", 1) for pair in options.build_arg)
    assert options.target in stages, f"no stage {options.target!r}: {', '.join(stages)}"
    root = Root(options.root.resolve())
    root.make()
    environment, user = play(root, needed(stages, options.target), arguments)
    if command:
        home = {"HOME": "/home/m3pc"}
        sys.exit(root.run(shlex.join(command), environment | home, "/home/m3pc", user))


if __name__ == "__main__":
    main()
