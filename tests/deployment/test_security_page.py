"""SECURITY.md says what is: its ports, its users of Redis and its tests are the real ones."""

import ast
import re
from functools import cache

import pytest

from m3pc.ray_nodes.ports import ports_table
from tests.support.episodes.shared_data import ROOT

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
THREATS = [f"T{number}" for number in range(1, 22)]


def row(threat: str) -> str:
    [line] = re.findall(rf"^\| {threat} \|.*$", PAGE, re.MULTILINE)
    return str(line)


@cache
def functions_in(file: str) -> frozenset[str]:
    path = ROOT / "tests" / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.parse("")
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("threat", THREATS)
def test_every_threat_has_tests_that_exist(threat: str) -> None:
    named = re.findall(r"`([\w/]*test_\w+\.py)::(test_\w+)`", row(threat))
    assert named
    assert [pair for pair in named if pair[1] not in functions_in(pair[0])] == []


def test_the_table_of_ports_is_that_of_the_command() -> None:
    shown = PAGE.partition("<!-- m3pc node ports -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == ports_table()


def test_the_users_of_redis_are_those_that_are_shipped() -> None:
    shipped = (ROOT / "docker" / "prepare.sh").read_text(encoding="utf-8")
    plain = re.sub(r'#\$\(hash "\$\w+"\)', "#HASH", shipped)
    users = re.findall(r"^user .*$", PAGE, re.MULTILINE)
    assert users == re.findall(r"^user .*$", plain, re.MULTILINE)
    assert len(users) == 3
