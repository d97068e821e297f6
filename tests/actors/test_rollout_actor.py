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
from actors.reports import RolloutReport
from actors.rollout_loop import ExplorationConfig
from actors.rollout_worker import RolloutConfig
from m3pc.coordinator import connect
from m3pc.types import Episode
from replay.format.payload import decode, encode
from tests.support.envs.faulty_env import FAULTY
from tests.support.episodes.episodes import header
from tests.support.episodes.shared_data import ROOT
from tests.support.fakes.sinks import InFolder
from tests.support.fakes.slow_planner import SlowPlanner
from tests.support.servers.waiting import eventually

SECONDS = 60  # for an answer


@pytest.fixture
def actor(ray_cluster: None) -> Iterator[Any]:
    found = cast(Any, RolloutActor).remote(7)
    yield found
    ray.kill(found)


def order(folder: Path) -> RolloutConfig:
    return RolloutConfig(
        env_id=FAULTY,
        seed=0,
        acting=ExplorationConfig(window=8, horizon=4),
        planner=SlowPlanner(),
        sink=InFolder(folder / "store"),
        encode=encode,
        connect=partial(
            connect, folder / "coordinator.sqlite", run="ray", generations=folder / "generations"
        ),
        envs=4,
    )


def told(call: Any) -> Any:
    return ray.get(call, timeout=SECONDS)


def report(actor: Any) -> RolloutReport:
    found: RolloutReport = told(actor.report.remote())
    return found


def collecting(actor: Any, folder: Path) -> RolloutReport:
    """Start it; once it has finished some episodes, what it says."""
    told(actor.start.remote(order(folder)))
    assert eventually(lambda: len(report(actor).finished) >= 8)
    return report(actor)


def back(actor: Any, pid: int) -> RolloutReport:
    """What the process says that Ray started in the place of another."""

    def renewed() -> bool:
        try:
            return report(actor).pid != pid
        except ray.exceptions.RayActorError:
            return False

    assert eventually(renewed)
    return report(actor)


def stored(folder: Path, incarnation: int) -> list[Episode]:
    payloads = InFolder(folder / "store").payloads()
    found = {k.sequence: p for k, p in payloads.items() if k.incarnation == incarnation}
    assert list(found) == list(range(len(found)))
    return [decode(payload, header(horizon=100)) for payload in found.values()]


@pytest.mark.ray
def test_a_rollout_actor_collects_without_torch_and_drains(actor: Any, tmp_path: Path) -> None:
    first = report(actor)
    assert (first.state, first.slot, first.incarnation) == ("idle", 7, -1)
    begun = collecting(actor, tmp_path)
    assert (begun.state, begun.pid) == ("running", first.pid)
    assert told(actor.loaded.remote("actors.rollout_worker"))
    assert not told(actor.loaded.remote("torch"))
    assert told(actor.drain.remote(20.0)) == 0
    ended = report(actor)
    assert (ended.state, ended.reason, ended.unacked) == ("ended", "drained", 0)
    episodes = stored(tmp_path, ended.incarnation)
    assert len(episodes) == ended.finished[-1].number + 1
    assert sum(map(len, episodes)) == ended.finished[-1].steps


@pytest.mark.ray
def test_a_rollout_actor_that_was_killed_comes_back_idle_as_another(
    actor: Any, tmp_path: Path
) -> None:
    before = collecting(actor, tmp_path)
    assert eventually(lambda: len(stored(tmp_path, before.incarnation)) >= 8)
    os.kill(before.pid, signal.SIGKILL)
    again = back(actor, before.pid)
    assert (again.state, again.slot, again.incarnation) == ("idle", 7, -1)
    after = collecting(actor, tmp_path)
    assert after.incarnation > before.incarnation
    assert told(actor.drain.remote(20.0)) == 0
    one, other = (stored(tmp_path, found.incarnation) for found in (before, after))
    assert len(one) >= 8 and len(other) >= 8
    assert not {episode.seed for episode in one} & {episode.seed for episode in other}


@pytest.mark.ray
def test_a_rollout_actor_that_is_asked_to_end_drains_first(actor: Any, tmp_path: Path) -> None:
    before = collecting(actor, tmp_path)
    os.kill(before.pid, signal.SIGTERM)
    assert back(actor, before.pid).state == "idle"
    episodes = stored(tmp_path, before.incarnation)
    assert len(episodes) >= before.finished[-1].number + 1
    whole = [episode.truncated for episode in episodes]
    assert all(whole[:-4]), "what was cut came last, at most one of each environment"


def test_the_shell_loads_no_numpy_so_that_its_constructor_can_set_the_number_of_threads() -> None:
    script = "import sys, actors.remote; assert 'ray' in sys.modules and not 'numpy' in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=True)
