"""`m3pc doctor`: what is installed, which back-ends work, what to do about the rest.

Whatever could crash or hang (native libraries, GL drivers, bf16) is tried in a child process.
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
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Annotated, Literal

import typer

from m3pc.core.subprocesses import ROOT, python_path

PROBE_SECONDS = 30.0  # a probe that is not back by then is reported as hanging
ROBOSUITE_SECONDS = 90.0  # its first start on a machine compiles
OLDEST_PYTHON = (3, 11)
LEAST_DISK = 2.0  # GB: one D4RL data set, its store and a few checkpoints
D4RL_IDS = ("d4rl/Hopper-v2", "d4rl/Walker2d-v2", "d4rl/HalfCheetah-v2")

FindingStatus = Literal["ok", "missing", "broken", "optional"]


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One line of the report. Optional: not here or not working, and few people need it."""

    name: str
    status: FindingStatus
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a child process printed, and how it ended: `died` is empty after exit code 0."""

    output: str
    died: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Say what is installed, which back-ends work, and what to do; exit 1 if work is needed."""
    checks = examine(all_checks(os.environ))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print_table(checks)
    raise typer.Exit(exit_code(checks))


def exit_code(checks: Iterable[DoctorFinding]) -> int:
    return int(any(check.status in {"missing", "broken"} for check in checks))


def all_checks(environ: Mapping[str, str]) -> dict[str, Callable[[], Sequence[DoctorFinding]]]:
    """What to examine, by name, in the order of the report. Nothing runs yet."""
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
        "cache": lambda: [cache(cache_directory())],
    }


def examine(checks: Mapping[str, Callable[[], Sequence[DoctorFinding]]]) -> list[DoctorFinding]:
    """Run all checks at once, so that the slowest decides how long it takes."""
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        runs = [pool.submit(_guarded, name, check) for name, check in checks.items()]
    return [check for run in runs for check in run.result()]


def _guarded(name: str, check: Callable[[], Sequence[DoctorFinding]]) -> Sequence[DoctorFinding]:
    try:
        return check()
    except Exception as error:  # whatever it is, the other checks are worth reading
        advice = "please report it: a check should not fail like this"
        return [DoctorFinding(name, "broken", f"the check failed: {error!r}", advice)]


def python_version(version: tuple[int, int, int]) -> DoctorFinding:
    found = ".".join(map(str, version))
    if version >= OLDEST_PYTHON:
        return DoctorFinding("python", "ok", found)
    return DoctorFinding(
        "python", "broken", found, "install Python {}.{} or newer".format(*OLDEST_PYTHON)
    )


def declared(root: Path) -> list[str]:
    """Requirements of the project: of the installed one, else of the source tree beside it."""
    try:
        return metadata.requires("m3pc") or []
    except metadata.PackageNotFoundError:
        import tomllib

        file = root / "pyproject.toml"  # code that came by working directory has no metadata
        if not file.is_file():
            return []
        dependencies: list[str] = tomllib.loads(file.read_text())["project"]["dependencies"]
        return dependencies


def packages(requirements: Sequence[str]) -> Iterator[DoctorFinding]:
    """Each required package against the versions that the project allows."""
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
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield DoctorFinding(requirement.name, "missing", "not installed", advice)
            continue
        if requirement.specifier.contains(found, prereleases=True):
            yield DoctorFinding(requirement.name, "ok", found)
        else:
            yield DoctorFinding(
                requirement.name, "broken", f"{found}, not {requirement.specifier}", advice
            )


def package(name: str, needed_for: str) -> DoctorFinding:
    try:
        return DoctorFinding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return DoctorFinding(name, "optional", "missing", f"for {needed_for}: pip install {name}")


def program(name: str, needed_for: str, path: str) -> DoctorFinding:
    """A program on PATH, asked for its version."""
    executable = shutil.which(name, path=path)
    if executable is None:
        return DoctorFinding(
            name, "optional", "missing: not on PATH", f"for {needed_for}: install {name}"
        )
    answer = run([executable, "--version"], {"PATH": path})
    if answer.died:
        return DoctorFinding(name, "optional", f"{executable} {answer.died}", f"reinstall {name}")
    return DoctorFinding(name, "ok", answer.output.partition("\n")[0] or executable)


def imports(name: str, environ: Mapping[str, str]) -> DoctorFinding:
    answer = probe(f"import {name}; print({name}.__version__)", environ)
    if answer.died:
        advice = f"pip install --force-reinstall {name}"
        return DoctorFinding(f"import {name}", "broken", f"the import {answer.died}", advice)
    return DoctorFinding(f"import {name}", "ok", answer.output)


def d4rl_environments(environ: Mapping[str, str]) -> DoctorFinding:
    code = "import gymnasium, m3pc.envs; print(*gymnasium.registry)"
    answer, name = probe(code, environ), "D4RL environments"
    if answer.died:
        return DoctorFinding(
            name, "broken", f"import m3pc.envs {answer.died}", "see the packages above"
        )
    absent = [known for known in D4RL_IDS if known not in answer.output.split()]
    if absent:
        return DoctorFinding(name, "missing", f"no {', '.join(absent)}", "reinstall m3pc")
    return DoctorFinding(name, "ok", ", ".join(D4RL_IDS))


# Two lines: what simulates, after a step; that it renders, after a frame.
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
    """Whether a manipulation task can be made, stepped and seen."""
    if package("robosuite", "").status != "ok":
        advice = "for manipulation tasks: pip install 'm3pc[robosuite]'"
        return DoctorFinding("robosuite", "optional", "missing", advice)
    seen = {"MUJOCO_GL": "egl", **environ}
    answer = probe(ROBOSUITE, seen, ROBOSUITE_SECONDS)
    lines = answer.output.splitlines()
    if not lines:
        advice = "for manipulation tasks, what it says; or pip install 'm3pc[robosuite]' anew"
        return DoctorFinding("robosuite", "optional", answer.died, advice)
    if answer.died:
        found = f"{lines[0]}; no pictures: it {answer.died}"
        return DoctorFinding("robosuite", "optional", found, "for videos, see rendering below")
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
    """One small frame through one of MuJoCo's GL back-ends."""
    answer, name = probe(FRAME, {**environ, "MUJOCO_GL": backend}), f"rendering, {backend}"
    if answer.died:
        library = {"egl": "libegl1", "osmesa": "libosmesa6"}[backend]
        return DoctorFinding(
            name, "optional", answer.died, f"for videos, one of the two: apt install {library}"
        )
    return DoctorFinding(name, "ok", "renders", f"for videos: MUJOCO_GL={backend}")


# Three lines: threads, CUDA version and GPU; seconds of the best product in fp32; the same in bf16.
# What was printed survives a crash in what comes after.
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


def torch_back_ends(answer: ProbeResult) -> Iterator[DoctorFinding]:
    """Threads, CUDA and bf16, as far as the child came."""
    lines = answer.output.splitlines()
    if not lines:
        yield DoctorFinding("torch", "broken", f"the import {answer.died}", "reinstall torch")
        return
    threads, built_for, gpu = json.loads(lines[0])
    advice = "set OMP_NUM_THREADS=1 where several processes share the cores" if threads > 1 else ""
    yield DoctorFinding("torch threads", "ok", str(threads), advice)
    yield cuda(built_for, gpu)
    yield bf16(answer.died, [float(line) for line in lines[1:]])


def cuda(built_for: str | None, gpu: str | None) -> DoctorFinding:
    if gpu:
        return DoctorFinding("CUDA", "ok", f"{gpu}, CUDA {built_for}")
    if built_for:
        found = f"built for CUDA {built_for}, no GPU found"
        return DoctorFinding("CUDA", "optional", found, "look at the driver, if there is a GPU")
    return DoctorFinding(
        "CUDA", "optional", "missing: torch without CUDA", "nothing to do without a GPU"
    )


def bf16(died: str, seconds: Sequence[float]) -> DoctorFinding:
    """Whether bf16 works, and whether it pays. CPU flags do not tell: it may die by SIGILL."""
    advice = "nothing to do: fp32 is the default"
    if died:
        return DoctorFinding("bf16", "optional", died, advice)
    fp32, half = seconds
    found = f"works, {fp32 / half:.2g} times as fast as fp32"
    return (
        DoctorFinding("bf16", "ok", found)
        if half < fp32
        else DoctorFinding("bf16", "optional", found, advice)
    )


def ffmpeg(environ: Mapping[str, str]) -> DoctorFinding:
    answer = probe("import imageio_ffmpeg as i; print(i.get_ffmpeg_version())", environ)
    if answer.died:
        found = "missing" if "ModuleNotFoundError" in answer.died else answer.died
        return DoctorFinding("ffmpeg", "optional", found, "for videos: pip install imageio-ffmpeg")
    return DoctorFinding("ffmpeg", "ok", answer.output)


def disk(place: Path) -> DoctorFinding:
    free = shutil.disk_usage(place).free / 1e9
    if free < LEAST_DISK:
        return DoctorFinding(
            "disk", "broken", f"{free:.1f} GB free", f"free at least {LEAST_DISK:g} GB"
        )
    return DoctorFinding("disk", "ok", f"{free:.1f} GB free")


def cache_directory() -> Path:
    from m3pc.datasets import download

    return download.cache()


def cache(directory: Path) -> DoctorFinding:
    """Whether downloads can be kept: tried in the directory, or where it would be made."""
    place = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"m3pc")
    except OSError as error:
        advice = "make it writable, or set M3PC_CACHE"
        return DoctorFinding("cache", "broken", f"{directory}: {error.strerror}", advice)
    return DoctorFinding("cache", "ok", str(directory))


def probe(code: str, environ: Mapping[str, str], seconds: float = PROBE_SECONDS) -> ProbeResult:
    """Run Python code in a child that finds our packages and leaves no core file."""
    prelude = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    environ = {**environ, "PYTHONPATH": python_path(environ)}
    return run([sys.executable, "-P", "-c", prelude + code], environ, seconds)


def run(
    command: Sequence[str], environ: Mapping[str, str], seconds: float = PROBE_SECONDS
) -> ProbeResult:
    """Run a command to its end, or to the end of our patience, when its whole group is killed."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
        try:
            child = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,  # a file: a pipe that some grandchild keeps open would hang us
                stderr=complaints,
                start_new_session=True,
            )
        except OSError as error:
            return ProbeResult("", f"cannot be started: {error.strerror}")
        try:
            died = _death(child.wait(seconds), complaints)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            died = f"gives no answer in {seconds:g} s"
        return ProbeResult(_text(output), died)


def _death(code: int, complaints: IO[bytes]) -> str:
    if code == 0:
        return ""
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"dies with {names.get(-code, f'signal {-code}')}"
    lines = _text(complaints).splitlines() or [f"exit code {code}"]
    return f"fails: {lines[-1].strip()[:200]}"


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def _print_table(checks: Sequence[DoctorFinding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "missing": "red", "broken": "red", "optional": "yellow"}
    table = Table("check", "status", "found", "what to do")
    for check in checks:
        cells = check.name, Text(check.status, colours[check.status]), check.found, check.advice
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
    Console().print(table)
