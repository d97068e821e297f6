"""`m3pc doctor`: check what is installed and which back-ends work, and say what to do.

Checks that could crash or hang (native libraries, GL drivers, bf16) run in a child process.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Annotated, Literal

import typer

from m3pc.core.subprocesses import ROOT, python_path

PROBE_SECONDS = 30.0  # a probe that takes longer is reported as hanging
ROBOSUITE_SECONDS = 90.0  # robosuite's first start on a machine compiles code
MIN_PYTHON = (3, 11)
MIN_DISK = 2.0  # GB: one D4RL data set, its store and a few checkpoints
D4RL_IDS = ("d4rl/Hopper-v2", "d4rl/Walker2d-v2", "d4rl/HalfCheetah-v2")

FindingStatus = Literal["ok", "missing", "broken", "optional"]


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One line of the report.

    Status "optional": missing or not working, but needed for some features only.
    """

    name: str
    status: FindingStatus
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The output of a child process, and how it failed; `failure` is empty after exit code 0."""

    output: str
    failure: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check what is installed and which back-ends work; exit code 1 if something must be fixed."""
    findings = run_checks(all_checks(os.environ))
    if as_json:
        rows = [
            {"name": f.name, "status": f.status, "found": f.detail, "advice": f.advice}
            for f in findings
        ]
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_table(findings)
    raise typer.Exit(exit_code(findings))


def exit_code(findings: Iterable[DoctorFinding]) -> int:
    return int(any(finding.status in {"missing", "broken"} for finding in findings))


def all_checks(environ: Mapping[str, str]) -> dict[str, Callable[[], Sequence[DoctorFinding]]]:
    """The checks by name, in the order of the report. Nothing runs yet."""
    path = environ.get("PATH", "")
    return {
        "python": lambda: [python_version(sys.version_info[:3])],
        "packages": lambda: list(packages(declared(ROOT))),
        "import numpy": lambda: [imports("numpy", environ)],
        "import pyarrow": lambda: [imports("pyarrow", environ)],
        "import mujoco": lambda: [imports("mujoco", environ)],
        "D4RL environments": lambda: [d4rl_environments(environ)],
        "robosuite": lambda: [robosuite(environ)],
        "rendering, egl": lambda: [rendering("egl", environ)],
        "rendering, osmesa": lambda: [rendering("osmesa", environ)],
        "torch": lambda: list(torch_back_ends(probe(TORCH, environ))),
        "redis-server": lambda: [program("redis-server", "clusters of several machines", path)],
        "prometheus": lambda: [program("prometheus", "graphs and alerts", path)],
        "promtool": lambda: [program("promtool", "checking alert rules", path)],
        "ray": lambda: [package("ray", "more than one process or machine")],
        "ffmpeg": lambda: [ffmpeg(environ)],
        "disk": lambda: [disk(Path.cwd())],
        "cache": lambda: [cache(download_cache())],
    }


def run_checks(checks: Mapping[str, Callable[[], Sequence[DoctorFinding]]]) -> list[DoctorFinding]:
    """Run all checks at the same time, so that the slowest determines the duration."""
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        runs = [pool.submit(_guarded, name, check) for name, check in checks.items()]
    return [finding for run in runs for finding in run.result()]


def _guarded(name: str, check: Callable[[], Sequence[DoctorFinding]]) -> Sequence[DoctorFinding]:
    try:
        return check()
    except Exception as error:  # one failing check must not hide the others
        advice = "please report it: a check should not fail like this"
        return [DoctorFinding(name, "broken", f"the check failed: {error!r}", advice)]


def python_version(version: tuple[int, int, int]) -> DoctorFinding:
    text = ".".join(map(str, version))
    if version >= MIN_PYTHON:
        return DoctorFinding("python", "ok", text)
    return DoctorFinding(
        "python", "broken", text, "install Python {}.{} or newer".format(*MIN_PYTHON)
    )


def declared(root: Path) -> list[str]:
    """Requirements of the installed package, or else of the source tree that contains this file."""
    try:
        return metadata.requires("m3pc") or []
    except metadata.PackageNotFoundError:
        import tomllib

        file = root / "pyproject.toml"  # code in a job's working directory has no metadata
        if not file.is_file():
            return []
        dependencies: list[str] = tomllib.loads(file.read_text())["project"]["dependencies"]
        return dependencies


def packages(requirements: Sequence[str]) -> Iterator[DoctorFinding]:
    """Compare each required package with the versions that the project allows."""
    from packaging.requirements import Requirement

    if not requirements:
        yield DoctorFinding(
            "packages", "optional", "no list of requirements", "install m3pc with pip"
        )
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        advice = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield DoctorFinding(requirement.name, "missing", "not installed", advice)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield DoctorFinding(requirement.name, "ok", version)
        else:
            yield DoctorFinding(
                requirement.name, "broken", f"{version}, not {requirement.specifier}", advice
            )


def package(name: str, needed_for: str) -> DoctorFinding:
    try:
        return DoctorFinding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return DoctorFinding(name, "optional", "missing", f"for {needed_for}: pip install {name}")


def program(name: str, needed_for: str, path: str) -> DoctorFinding:
    """Find a program on PATH and ask for its version."""
    executable = shutil.which(name, path=path)
    if executable is None:
        return DoctorFinding(
            name, "optional", "missing: not on PATH", f"for {needed_for}: install {name}"
        )
    result = run([executable, "--version"], {"PATH": path})
    if result.failure:
        return DoctorFinding(
            name, "optional", f"{executable} {result.failure}", f"reinstall {name}"
        )
    return DoctorFinding(name, "ok", result.output.partition("\n")[0] or executable)


def imports(name: str, environ: Mapping[str, str]) -> DoctorFinding:
    result = probe(f"import {name}; print({name}.__version__)", environ)
    if result.failure:
        advice = f"pip install --force-reinstall {name}"
        return DoctorFinding(f"import {name}", "broken", f"the import {result.failure}", advice)
    return DoctorFinding(f"import {name}", "ok", result.output)


def d4rl_environments(environ: Mapping[str, str]) -> DoctorFinding:
    code = "import gymnasium, m3pc.envs; print(*gymnasium.registry)"
    result, name = probe(code, environ), "D4RL environments"
    if result.failure:
        return DoctorFinding(
            name, "broken", f"import m3pc.envs {result.failure}", "see the packages above"
        )
    missing = [env_id for env_id in D4RL_IDS if env_id not in result.output.split()]
    if missing:
        return DoctorFinding(name, "missing", f"no {', '.join(missing)}", "reinstall m3pc")
    return DoctorFinding(name, "ok", ", ".join(D4RL_IDS))


# Prints two lines: the physics engine, after a step; "renders", after a frame.
ROBOSUITE = """
import m3pc.envs
env = m3pc.envs.make("robosuite/PickPlaceCan", render_mode="rgb_array", width=64, height=64)
env.reset(seed=0)
env.step(env.action_space.sample())
print(m3pc.envs.engine(env), flush=True)
frame = env.render()
env.close()
assert frame.max() > frame.min(), "the frame has one colour only"
print("renders")
"""


def robosuite(environ: Mapping[str, str]) -> DoctorFinding:
    """Whether a manipulation task can be made, stepped and rendered."""
    if package("robosuite", "").status != "ok":
        advice = "for manipulation tasks: pip install 'm3pc[robosuite]'"
        return DoctorFinding("robosuite", "optional", "missing", advice)
    rendering_environ = {"MUJOCO_GL": "egl", **environ}
    result = probe(ROBOSUITE, rendering_environ, ROBOSUITE_SECONDS)
    lines = result.output.splitlines()
    if not lines:
        advice = "for manipulation tasks: fix this error, or pip install 'm3pc[robosuite]' again"
        return DoctorFinding("robosuite", "optional", result.failure, advice)
    if result.failure:
        detail = f"{lines[0]}; no pictures: it {result.failure}"
        return DoctorFinding("robosuite", "optional", detail, "for videos, see rendering below")
    return DoctorFinding("robosuite", "ok", ", ".join(lines))


FRAME = """
import mujoco
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 3'/><geom size='1'/></worldbody></mujoco>"
)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 64, 64) as renderer:
    renderer.update_scene(data)
    frame = renderer.render()
assert frame.max() > frame.min(), "the frame has one colour only"
"""


def rendering(backend: str, environ: Mapping[str, str]) -> DoctorFinding:
    """Render a small frame with one of MuJoCo's GL back-ends."""
    result, name = probe(FRAME, {**environ, "MUJOCO_GL": backend}), f"rendering, {backend}"
    if result.failure:
        library = {"egl": "libegl1", "osmesa": "libosmesa6"}[backend]
        return DoctorFinding(
            name, "optional", result.failure, f"for videos, one of the two: apt install {library}"
        )
    return DoctorFinding(name, "ok", "renders", f"for videos: MUJOCO_GL={backend}")


# Prints three lines: threads, CUDA version and GPU; seconds of the fastest product in fp32; the
# same in bf16. A crash in a later step does not lose the earlier lines.
TORCH = """
import json, time, torch
threads = torch.get_num_threads()
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps([threads, torch.version.cuda, gpu]), flush=True)
torch.set_num_threads(1)
for dtype in torch.float32, torch.bfloat16:
    rows, weights = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        torch.nn.functional.linear(rows, weights)
        times.append(time.perf_counter() - start)
    print(min(times[1:]), flush=True)
"""


def torch_back_ends(result: ProbeResult) -> Iterator[DoctorFinding]:
    """Findings about threads, CUDA and bf16, from the lines that the child printed."""
    lines = result.output.splitlines()
    if not lines:
        yield DoctorFinding("torch", "broken", f"the import {result.failure}", "reinstall torch")
        return
    threads, built_for, gpu = json.loads(lines[0])
    advice = "set OMP_NUM_THREADS=1 where several processes share the cores" if threads > 1 else ""
    yield DoctorFinding("torch threads", "ok", str(threads), advice)
    yield cuda(built_for, gpu)
    yield bf16(result.failure, [float(line) for line in lines[1:]])


def cuda(built_for: str | None, gpu: str | None) -> DoctorFinding:
    if gpu:
        return DoctorFinding("CUDA", "ok", f"{gpu}, CUDA {built_for}")
    if built_for:
        detail = f"built for CUDA {built_for}, no GPU found"
        return DoctorFinding("CUDA", "optional", detail, "check the driver, if there is a GPU")
    return DoctorFinding(
        "CUDA", "optional", "missing: torch without CUDA", "nothing to do without a GPU"
    )


def bf16(failure: str, seconds: Sequence[float]) -> DoctorFinding:
    """Whether bf16 works and is faster. CPU flags prove nothing: it may still die by SIGILL."""
    advice = "nothing to do: fp32 is the default"
    if failure:
        return DoctorFinding("bf16", "optional", failure, advice)
    fp32, half = seconds
    detail = f"works, {fp32 / half:.2g} times as fast as fp32"
    if half < fp32:
        return DoctorFinding("bf16", "ok", detail)
    return DoctorFinding("bf16", "optional", detail, advice)


def ffmpeg(environ: Mapping[str, str]) -> DoctorFinding:
    result = probe("import imageio_ffmpeg as i; print(i.get_ffmpeg_version())", environ)
    if result.failure:
        detail = "missing" if "ModuleNotFoundError" in result.failure else result.failure
        return DoctorFinding("ffmpeg", "optional", detail, "for videos: pip install imageio-ffmpeg")
    return DoctorFinding("ffmpeg", "ok", result.output)


def disk(folder: Path) -> DoctorFinding:
    free = shutil.disk_usage(folder).free / 1e9
    if free < MIN_DISK:
        return DoctorFinding(
            "disk", "broken", f"{free:.1f} GB free", f"free at least {MIN_DISK:g} GB"
        )
    return DoctorFinding("disk", "ok", f"{free:.1f} GB free")


def download_cache() -> Path:
    from m3pc.datasets.download import cache_folder

    return cache_folder()


def cache(directory: Path) -> DoctorFinding:
    """Whether downloads can be kept in the directory, or in the folder where it would be made."""
    parents = (directory, *directory.absolute().parents)
    folder = next(path for path in parents if path.exists())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"m3pc")
    except OSError as error:
        advice = "make it writable, or set M3PC_CACHE"
        return DoctorFinding("cache", "broken", f"{directory}: {error.strerror}", advice)
    return DoctorFinding("cache", "ok", str(directory))


def probe(code: str, environ: Mapping[str, str], seconds: float = PROBE_SECONDS) -> ProbeResult:
    """Run Python code in a child process that finds our packages and writes no core file."""
    prelude = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    environ = {**environ, "PYTHONPATH": python_path(environ)}
    return run([sys.executable, "-P", "-c", prelude + code], environ, seconds)


def run(
    command: Sequence[str], environ: Mapping[str, str], seconds: float = PROBE_SECONDS
) -> ProbeResult:
    """Run a command; after `seconds` kill it with its complete process group."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,  # a file: waiting for a pipe hangs if a grandchild keeps it open
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            return ProbeResult("", f"cannot be started: {error.strerror}")
        try:
            failure = _failure(child.wait(seconds), errors)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            failure = f"gives no answer in {seconds:g} s"
        return ProbeResult(_text(output), failure)


def _failure(code: int, errors: IO[bytes]) -> str:
    """A verb phrase that says how the child failed; empty after exit code 0."""
    if code == 0:
        return ""
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"dies with {names.get(-code, f'signal {-code}')}"
    lines = _text(errors).splitlines() or [f"exit code {code}"]
    return f"fails: {lines[-1].strip()[:200]}"


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def _print_table(findings: Sequence[DoctorFinding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "missing": "red", "broken": "red", "optional": "yellow"}
    table = Table("check", "status", "found", "what to do")
    for f in findings:
        status = Text(f.status, colours[f.status])
        table.add_row(Text(f.name), status, Text(f.detail), Text(f.advice))
    Console().print(table)
