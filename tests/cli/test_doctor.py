"""The doctor: every check is reported, and no failing check ends the report."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from m3pc.cli import doctor as module
from m3pc.cli.doctor import (
    DoctorFinding,
    ProbeResult,
    cache,
    cuda,
    d4rl_environments,
    declared,
    disk,
    doctor,
    exit_code,
    packages,
    probe,
    program,
    python_version,
    rendering,
    run,
    run_checks,
    torch_back_ends,
)

ILL = "import os, signal; print('before', flush=True); os.kill(os.getpid(), signal.SIGILL)"
HANG = "import time; time.sleep(600)"
INFO = "[2, null, null]\n"

app = typer.Typer()
app.command()(doctor)


def test_a_probe_that_dies_by_a_signal_is_reported_with_its_earlier_output() -> None:
    assert probe(ILL, os.environ) == ProbeResult("before", "dies with SIGILL")


def test_a_probe_that_hangs_is_killed_and_reported() -> None:
    assert probe(HANG, os.environ, seconds=1).failure == "gives no answer in 1 s"


def test_a_probe_whose_child_keeps_its_output_open_is_killed_too() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HANG!r}])"
    assert probe(code, os.environ, seconds=1).failure == "gives no answer in 1 s"


def test_a_probe_that_raises_is_reported_with_the_last_line() -> None:
    assert probe("raise OSError('no such driver')", os.environ).failure == (
        "fails: OSError: no such driver"
    )


def test_a_probe_that_exits_silently_is_reported_with_its_code() -> None:
    assert probe("import sys; sys.exit(3)", os.environ).failure == "fails: exit code 3"


def test_a_command_that_cannot_be_started_is_reported() -> None:
    assert (
        run(["/nonexistent/program"], {}).failure == "cannot be started: No such file or directory"
    )


def test_a_probe_leaves_no_core_file() -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE)[0])"
    assert probe(code, os.environ).output == "0"


def test_a_check_that_raises_is_one_broken_line_among_the_others() -> None:
    def fails() -> Sequence[DoctorFinding]:
        raise RuntimeError("surprise")

    findings = run_checks({"bad": fails, "good": lambda: [DoctorFinding("good", "ok", "1.0")]})
    assert [(check.name, check.status) for check in findings] == [("bad", "broken"), ("good", "ok")]
    assert "surprise" in findings[0].detail


@pytest.mark.parametrize(
    ("status", "code"), [("ok", 0), ("optional", 0), ("missing", 1), ("broken", 1)]
)
def test_only_required_parts_decide_the_exit_code(status: module.FindingStatus, code: int) -> None:
    assert exit_code([DoctorFinding("a", "ok", ""), DoctorFinding("b", status, "")]) == code


def test_an_old_python_is_broken() -> None:
    assert python_version((3, 10, 9)).status == "broken"
    assert python_version((3, 11, 0)).status == "ok"


def test_packages_are_compared_with_the_versions_that_the_project_allows() -> None:
    numpy = metadata.version("numpy")
    requirements = ["numpy>=1", "numpy<1", "no-such-package>=2", "absent; extra == 'dev'"]
    assert list(packages(requirements)) == [
        DoctorFinding("numpy", "ok", numpy),
        DoctorFinding("numpy", "broken", f"{numpy}, not <1", "pip install 'numpy<1'"),
        DoctorFinding(
            "no-such-package", "missing", "not installed", "pip install 'no-such-package>=2'"
        ),
    ]


def test_without_a_list_of_requirements_nothing_is_claimed_about_packages() -> None:
    assert [check.status for check in packages([])] == ["optional"]


def test_code_that_is_not_installed_reads_the_requirements_of_its_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    assert declared(tmp_path) == []
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["numpy>=2"]\n')
    assert declared(tmp_path) == ["numpy>=2"]


def test_a_program_that_is_not_on_the_path_is_reported_as_missing(tmp_path: Path) -> None:
    check = program("redis-server", "clusters", str(tmp_path))
    assert (check.status, check.detail) == ("optional", "missing: not on PATH")
    assert "redis-server" in check.advice


def test_a_program_on_the_path_is_asked_for_its_version(tmp_path: Path) -> None:
    _script(tmp_path / "redis-server", "echo Redis server v=7.0.15; echo more")
    assert program("redis-server", "clusters", str(tmp_path)) == (
        DoctorFinding("redis-server", "ok", "Redis server v=7.0.15")
    )


def test_a_program_that_crashes_is_reported_and_not_required(tmp_path: Path) -> None:
    _script(tmp_path / "promtool", "kill -ILL $$")
    check = program("promtool", "rules", str(tmp_path))
    assert (check.status, check.detail) == ("optional", f"{tmp_path / 'promtool'} dies with SIGILL")


def test_a_gl_back_end_that_fails_is_not_required() -> None:
    check = rendering("osmesa", {"PATH": os.defpath, "PYOPENGL_PLATFORM": "nonsense"})
    assert (check.name, check.status) == ("rendering, osmesa", "optional")
    assert "libosmesa6" in check.advice


@pytest.mark.parametrize(
    ("result", "status", "detail"),
    [
        (ProbeResult(INFO + "0.4\n0.1"), "ok", "works, 4 times as fast as fp32"),
        (ProbeResult(INFO + "0.1\n0.2"), "optional", "works, 0.5 times as fast as fp32"),
        (ProbeResult(INFO + "0.1", "dies with SIGILL"), "optional", "dies with SIGILL"),
        (
            ProbeResult(INFO + "0.1", "gives no answer in 12 s"),
            "optional",
            "gives no answer in 12 s",
        ),
    ],
)
def test_bf16_is_ok_only_where_it_works_and_is_faster(
    result: ProbeResult, status: module.FindingStatus, detail: str
) -> None:
    threads, _, bf16 = torch_back_ends(result)
    assert (threads.status, threads.detail) == ("ok", "2")
    assert (bf16.name, bf16.status, bf16.detail) == ("bf16", status, detail)


def test_a_bf16_that_kills_its_process_does_not_break_the_report() -> None:
    code = f"print({INFO.strip()!r}, flush=True); {ILL.replace('before', '0.1')}"
    findings = run_checks({"torch": lambda: list(torch_back_ends(probe(code, os.environ)))})
    assert [(check.name, check.status) for check in findings] == [
        ("torch threads", "ok"),
        ("CUDA", "optional"),
        ("bf16", "optional"),
    ]
    assert findings[-1].detail == "dies with SIGILL"
    assert exit_code(findings) == 0


def test_a_torch_that_does_not_import_is_broken() -> None:
    (check,) = torch_back_ends(ProbeResult("", "dies with SIGSEGV"))
    assert (check.status, check.detail) == ("broken", "the import dies with SIGSEGV")


def test_cuda_is_reported_by_the_name_of_the_gpu_and_never_required() -> None:
    assert cuda("12.8", "H100") == DoctorFinding("CUDA", "ok", "H100, CUDA 12.8")
    assert cuda("12.8", None).status == cuda(None, None).status == "optional"


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (ProbeResult(" ".join(module.D4RL_IDS)), "ok"),
        (ProbeResult("CartPole-v1 d4rl/Hopper-v2"), "missing"),
        (ProbeResult("", "fails: ImportError"), "broken"),
    ],
)
def test_the_three_d4rl_environments_must_be_registered(
    answer: ProbeResult, status: module.FindingStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "probe", lambda code, environ: answer)
    assert d4rl_environments({}).status == status


def test_a_full_disk_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk(tmp_path).detail.endswith("GB free")
    monkeypatch.setattr(module, "MIN_DISK", float("inf"))
    assert disk(tmp_path).status == "broken"


def test_checking_the_cache_does_not_make_it(tmp_path: Path) -> None:
    assert cache(tmp_path / "a" / "b").status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cache(tmp_path / "file").status == "broken"


def test_a_missing_redis_is_reported_and_does_not_decide_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["--json"])
    checks = {line["name"]: line for line in json.loads(result.stdout)}
    assert checks["redis-server"]["status"] == "optional"
    assert checks["redis-server"]["found"] == "missing: not on PATH"
    assert set(next(iter(checks.values()))) == {"name", "status", "found", "advice"}
    assert checks["python"]["found"].startswith(f"{sys.version_info.major}.")
    required = [line for line in checks.values() if line["status"] in {"missing", "broken"}]
    assert result.exit_code == bool(required)


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("missing", 1)])
def test_the_table_shows_each_check_and_the_exit_code_follows(
    status: module.FindingStatus, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(environ: object) -> dict[str, Callable[[], Sequence[DoctorFinding]]]:
        return {"thing": lambda: [DoctorFinding("thing", status, "[1.0]", "do [it]")]}

    monkeypatch.setattr(module, "all_checks", one)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == code
    assert all(text in result.stdout for text in ("thing", status, "[1.0]", "do [it]"))


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
