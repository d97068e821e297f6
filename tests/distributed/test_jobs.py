"""Commands as jobs of a cluster: their shell line, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private.runtime_env.packaging import create_package

from m3pc.distributed.jobs import EXCLUDED, Jobs, entrypoint, variables
from m3pc.types import InputError
from tests.support.episodes.shared_data import ROOT
from tests.support.servers.redis_server import free_port


def run(line: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a shell line with a `python` that only prints its arguments."""
    program = folder / "bin" / "python"
    program.parent.mkdir(exist_ok=True)
    program.write_text(
        '#!/bin/sh\npwd; echo "$PYTHONPATH"; for word; do printf "%s\\0" "$word"; done\n'
    )
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-c", line],
        cwd=folder,
        env={"PATH": path},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_job_runs_in_its_folder_with_the_uploaded_code(tmp_path: Path) -> None:
    there = tmp_path / "a folder; with 'signs'"
    there.mkdir()
    done = run(entrypoint(["evaluate", "runs/x"], there), tmp_path)
    folder, code, words = done.stdout.split("\n", 2)
    assert done.returncode == 0, done.stderr
    assert (folder, code) == (str(there), str(tmp_path))
    assert words.split("\0")[:-1] == ["-P", "-m", "m3pc", "evaluate", "runs/x"]


def test_a_folder_that_the_head_does_not_see_is_refused(tmp_path: Path) -> None:
    done = run(entrypoint(["finetune", "x"], tmp_path / "absent"), tmp_path)
    assert done.returncode == 2
    assert "is not on the head; give a folder that all machines see" in done.stderr


@pytest.mark.parametrize(
    ("words", "joins"),
    [
        (["finetune", "runs/x"], True),
        (["resume", "runs/x", "--set", "a=b"], True),
        (["finetune", "runs/x", "--local"], False),
        (["finetune", "runs/x", "--address", "ray://h:1"], False),
        (["finetune", "runs/x", "--address=ray://h:1"], False),
        (["pretrain", "--data", "x"], False),
    ],
)
def test_a_run_joins_the_cluster_that_it_is_sent_to(words: list[str], joins: bool) -> None:
    assert entrypoint(words, Path("/")).endswith("--address auto") == joins


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0\n", exclude_categories=["Cs"])), min_size=1
    )
)
def test_no_word_means_anything_to_the_shell(words: list[str]) -> None:
    line = entrypoint(["replay", *words], Path("/"))
    arguments = line.rpartition("exec python -P ")[2]
    done = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {arguments}"], capture_output=True, timeout=30, check=True
    )
    assert done.stdout.decode().split("\0")[:-1] == ["-m", "m3pc", "replay", *words]


def test_the_code_is_uploaded_without_large_files(tmp_path: Path) -> None:
    """As Ray packs it; a package of nothing would not be noticed where m3pc is installed."""
    create_package(str(ROOT), tmp_path / "sent.zip", excludes=EXCLUDED, include_gitignore=True)
    with ZipFile(tmp_path / "sent.zip") as sent:
        names = set(sent.namelist())
        assert sum(info.file_size for info in sent.infolist()) < 20 << 20
    assert {
        "m3pc/__main__.py",
        "replay/store/store.py",
        "learner/iql.py",
        "pyproject.toml",
    } <= names
    assert not [name for name in names if name.startswith((".git/", ".venv/", "tests/", "runs/"))]


def test_variables_have_a_value_or_that_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M3PC_COORDINATOR", "redis://:word@h:1")
    assert variables(["A=1=2", "M3PC_COORDINATOR"]) == {
        "A": "1=2",
        "M3PC_COORDINATOR": "redis://:word@h:1",
    }
    monkeypatch.delenv("ABSENT", raising=False)
    for wrong in ("ABSENT", "1A=2", "=2", "A B=1"):
        with pytest.raises(InputError, match="--env"):
            variables([wrong])


def test_an_address_of_another_kind_is_refused() -> None:
    for address in ("auto", "ray://127.0.0.1:10001", "127.0.0.1:6379", ""):
        with pytest.raises(InputError, match="expected that of its dashboard"):
            Jobs(address)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("disabled", "no cluster answers at"),
        ("token", "no entry to the cluster at"),  # no request is sent without one
    ],
)
def test_an_absent_cluster_and_a_missing_token_are_reported(
    mode: str, expected: str, tmp_path: Path
) -> None:
    """In a process of its own: Ray reads these variables once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    address = f"http://127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, "-m", "m3pc", "jobs", "list", "--address", address],
        env={**environment, "RAY_AUTH_MODE": mode, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
