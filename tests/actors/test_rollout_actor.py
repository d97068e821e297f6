"""Rollout processes under Ray: what they load, how they come back, how they leave."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from actors.remote import RolloutActor
from actors.reports import RolloutStatus
from actors.rollout_loop import ExplorationConfig
from actors.rollout_worker import RolloutConfig
from m3pc.coordinator import connect
from m3pc.telemetry.process_report import ProcessReport
from m3pc.types import Episode
from replay.format.payload import decode, encode
from tests.support.envs.faulty_env import FAULTY
from tests.support.episodes.episodes import header
from tests.support.episodes.shared_data import ROOT
from tests.support.fakes.sinks import FolderSink
from tests.support.fakes.slow_planner import SlowPlanner
from tests.support.servers.waiting import eventually

SECONDS = 60  # for an answer


@pytest.fixture
def actor(ray_cluster: None) -> Iterator[Any]:
    handle = cast(Any, RolloutActor).remote(7)
    yield handle
    ray.kill(handle)


def rollout_config(folder: Path) -> RolloutConfig:
    return RolloutConfig(
        env_id=FAULTY,
        seed=0,
        exploration=ExplorationConfig(),
        planner=SlowPlanner(),
        sink=FolderSink(folder / "store"),
        encode=encode,
        connect=partial(
            connect, folder / "coordinator.sqlite", run="ray", generations=folder / "generations"
        ),
        envs=4,
    )


def answer(call: Any) -> Any:
    return ray.get(call, timeout=SECONDS)


def report(actor: Any) -> ProcessReport[RolloutStatus]:
    reply: ProcessReport[RolloutStatus] = answer(actor.report.remote())
    return reply


def collecting(actor: Any, folder: Path) -> ProcessReport[RolloutStatus]:
    """Start it; once it has finished some episodes, what it says."""
    answer(actor.start.remote(rollout_config(folder)))
    assert eventually(lambda: len(report(actor).detail.finished) >= 8)
    return report(actor)


def restarted(actor: Any, pid: int) -> ProcessReport[RolloutStatus]:
    """What the process says that Ray started in the place of another."""

    def renewed() -> bool:
        try:
            return report(actor).pid != pid
        except ray.exceptions.RayActorError:
            return False

    assert eventually(renewed)
    return report(actor)


def stored(folder: Path, incarnation: int) -> list[Episode]:
    payloads = FolderSink(folder / "store").payloads()
    by_sequence = {k.sequence: p for k, p in payloads.items() if k.incarnation == incarnation}
    assert list(by_sequence) == list(range(len(by_sequence)))
    return [decode(payload, header(max_episode_steps=100)) for payload in by_sequence.values()]


@pytest.mark.ray
def test_a_rollout_actor_collects_without_torch_and_drains(actor: Any, tmp_path: Path) -> None:
    first = report(actor)
    assert (first.detail.state, first.detail.slot, first.detail.incarnation) == ("idle", 7, -1)
    running = collecting(actor, tmp_path)
    assert (running.detail.state, running.pid) == ("running", first.pid)
    libraries = Path(f"/proc/{first.pid}/maps").read_text()
    assert "_multiarray_umath" in libraries and "libtorch" not in libraries
    assert answer(actor.drain.remote(20.0)) == 0
    ended = report(actor)
    assert (ended.detail.state, ended.detail.reason, ended.detail.unacked) == (
        "ended",
        "drained",
        0,
    )
    episodes = stored(tmp_path, ended.detail.incarnation)
    assert len(episodes) == ended.detail.finished[-1].number + 1
    assert sum(map(len, episodes)) == ended.detail.finished[-1].steps


@pytest.mark.ray
def test_a_rollout_actor_that_was_killed_comes_back_idle_as_another(
    actor: Any, tmp_path: Path
) -> None:
    before = collecting(actor, tmp_path)
    assert eventually(lambda: len(stored(tmp_path, before.detail.incarnation)) >= 8)
    os.kill(before.pid, signal.SIGKILL)
    again = restarted(actor, before.pid)
    assert (again.detail.state, again.detail.slot, again.detail.incarnation) == ("idle", 7, -1)
    after = collecting(actor, tmp_path)
    assert after.detail.incarnation > before.detail.incarnation
    assert answer(actor.drain.remote(20.0)) == 0
    one, other = (stored(tmp_path, worker.detail.incarnation) for worker in (before, after))
    assert len(one) >= 8 and len(other) >= 8
    assert not {episode.seed for episode in one} & {episode.seed for episode in other}


@pytest.mark.ray
def test_a_rollout_actor_that_is_asked_to_end_drains_first(actor: Any, tmp_path: Path) -> None:
    before = collecting(actor, tmp_path)
    os.kill(before.pid, signal.SIGTERM)
    assert restarted(actor, before.pid).detail.state == "idle"
    episodes = stored(tmp_path, before.detail.incarnation)
    assert len(episodes) >= before.detail.finished[-1].number + 1
    truncated = [episode.truncated for episode in episodes]
    assert all(truncated[:-4]), "what was cut came last, at most one of each environment"


def test_the_actor_module_loads_no_numpy_so_that_its_constructor_can_set_the_threads() -> None:
    script = "import sys, actors.remote; assert 'ray' in sys.modules and not 'numpy' in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=True)
