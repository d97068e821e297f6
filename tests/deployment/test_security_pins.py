"""No package is older than SECURITY.md says: neither here, nor what users are given."""

import re
import tomllib
from importlib.metadata import version

import h5py
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.episodes.shared_data import ROOT

IMAGES = ("docker/compose.yaml", "kubernetes/redis.yaml")
PYTHON = ("ray", "pyarrow", "torch")


def minimum_versions() -> dict[str, Version]:
    """The only place where these numbers are."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    table = text.partition("## Minimum versions")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \|", table, re.MULTILINE)
    return {name: Version(number) for name, number in rows}


def test_the_table_is_read() -> None:
    assert set(minimum_versions()) == {*PYTHON, "hdf5", "redis"}


@pytest.mark.parametrize("name", PYTHON)
def test_what_is_installed_is_not_older(name: str) -> None:
    assert Version(version(name)) >= minimum_versions()[name]


def test_the_library_of_h5py_is_not_older() -> None:
    assert Version(h5py.version.hdf5_version) >= minimum_versions()["hdf5"]


@pytest.mark.parametrize("name", PYTHON)
def test_bounds_and_pins_are_not_older(name: str) -> None:
    """What the project asks for admits nothing older, and the lock names nothing older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {need.name: need for need in map(Requirement, project["dependencies"])}
    bounds = [Version(s.version) for s in asked[name].specifier if s.operator == ">="]
    assert bounds
    assert max(bounds) >= minimum_versions()[name]
    lock = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    [pinned] = re.findall(rf"^{name}==(\S+)", lock, re.MULTILINE)
    assert Version(pinned) >= minimum_versions()[name]


def test_every_package_is_pinned_to_one_version() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    given = [line for line in lines if line and not line.startswith("#")]
    assert len(given) > 50
    assert [
        line for line in given if not re.fullmatch(r"[\w.\-\[\],]+==[\w.+!]+( ?;.*)?", line)
    ] == []


@pytest.mark.parametrize("file", IMAGES)
def test_images_of_redis_are_not_older(file: str) -> None:
    images = re.findall(r"image: redis:([\d.]+)", (ROOT / file).read_text(encoding="utf-8"))
    assert images
    assert all(Version(number) >= minimum_versions()["redis"] for number in images)
