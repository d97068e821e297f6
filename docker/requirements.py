"""Print the dependencies in pyproject.toml, one per line, for `pip install -r`: images contain the
dependencies without the project, so a change of code does not rebuild them."""

import argparse
import re
import sys
import tomllib
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(project: Path, without: list[str]) -> list[str]:
    dependencies: list[str] = tomllib.loads(project.read_text())["project"]["dependencies"]
    names = [match.group() for line in dependencies if (match := NAME.match(line))]
    if missing := set(without) - set(names):
        sys.exit(f"{project} does not require {', '.join(sorted(missing))}, which --without names")
    return [line for line, name in zip(dependencies, names, strict=True) if name not in without]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("project", type=Path)
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    arguments = parser.parse_args()
    sys.stdout.write("\n".join(requirements(arguments.project, arguments.without)) + "\n")
