"""Print what pyproject.toml asks for, a line each, for `pip install -r`: an image gets dependencies
without the project, so that a change of code does not build it anew."""

import argparse
import re
import sys
import tomllib
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(project: Path, without: list[str]) -> list[str]:
    found: list[str] = tomllib.loads(project.read_text())["project"]["dependencies"]
    names = [match.group() for line in found if (match := NAME.match(line))]
    if missing := set(without) - set(names):
        sys.exit(f"{project} does not ask for {', '.join(sorted(missing))}: nothing to leave out")
    return [line for line, name in zip(found, names, strict=True) if name not in without]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("project", type=Path)
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    arguments = parser.parse_args()
    sys.stdout.write("\n".join(requirements(arguments.project, arguments.without)) + "\n")
