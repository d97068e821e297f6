"""Collecting: halves take turns, nothing is lost at the end, nothing unsound is acted on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, repeat

import numpy as np
import pytest

from actors.fault_tolerant_envs import BrokenEnvError, FaultTolerantEnvs
from actors.outbox import Outbox
from actors.rollout_loop import ExplorationConfig, RolloutLoop
from actors.vector_rollout import VectorEnvs, VectorStep
from m3pc.core.backoff import Backoff
from m3pc.core.seeding import evaluation_episode, rollout_episodes
from m3pc.envs import make
from m3pc.telemetry.catalogue import ACTOR_BLOCKED, ENV_STEPS, EPISODES
from m3pc.telemetry.recorder import Recorder, value
from m3pc.types import AckStatus, Booleans, Episode, EpisodeSink, Floats, Version
from replay.format.payload import decode, encode
from tests.support.envs.countdown import COUNTDOWN
from tests.support.envs.faulty_env import FAULTY, forget
from tests.support.episodes.episodes import header
from tests.support.fakes.sinks import BlockedSink, InMemorySink, ScriptedSink, ack
from tests.support.fakes.slow_planner import SlowPlanner
from tests.support.servers.waiting import PATIENCE, eventually

PAUSES = Backoff(first=0.001, longest=0.01)


class NotedEnvs:
    """Environments that tell when they step."""

    def __init__(self, envs: VectorEnvs, on_step: Callable[[int], None]) -> None:
        self._envs, self._on_step = envs, on_step
        self.count, self.state_size = envs.count, envs.state_size
        self.action_size = envs.action_size

    def reset(self, seeds: list[int | None], mask: Booleans) -> tuple[Floats, Booleans]:
        return self._envs.reset(seeds, mask)

    def step(self, actions: Floats) -> VectorStep:
        self._on_step(self.count)
        return self._envs.step(actions)


@dataclass
class LoopBench:
    """A worker and all that it works with."""

    sizes: tuple[int, ...] = (2, 2)
    env_id: str = COUNTDOWN
    options: dict[str, object] = field(default_factory=dict)
    exploration: ExplorationConfig = field(default_factory=ExplorationConfig)
    planner: SlowPlanner = field(default_factory=SlowPlanner)
    sink: EpisodeSink = field(default_factory=InMemorySink)
    newest: Callable[[], int | None] = lambda: None
    max_unacked: int = 32
    on_step: Callable[[int], None] = lambda count: None
    encode: Callable[[Episode], bytes] = encode
    seeds: Iterator[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        self.recorder = Recorder()
        make_env = partial(make, self.env_id, **self.options)
        self.envs = [
            FaultTolerantEnvs(make_env, size, recorder=self.recorder) for size in self.sizes
        ]
        self.outbox = Outbox(
            self.sink, 0, 0, recorder=self.recorder, max_episodes=self.max_unacked, backoff=PAUSES
        )
        self.worker = RolloutLoop(
            [NotedEnvs(envs, self.on_step) for envs in self.envs],  # type: ignore[misc]
            self.exploration,
            planner=self.planner,
            outbox=self.outbox,
            encode=self.encode,
            starts=self.seeds or ((n % 5, n) for n in range(10**9)),  # 2 to 6 steps
            recorder=self.recorder,
            newest=self.newest,
        )

    @contextmanager
    def running(self) -> Iterator[RolloutLoop]:
        thread = threading.Thread(target=self.worker.run, daemon=True)
        thread.start()
        try:
            yield self.worker
        finally:
            self.worker.drain(PATIENCE)
            thread.join(PATIENCE)
            self.close()
        assert not thread.is_alive()

    def close(self) -> None:
        self.outbox.close()
        for envs in self.envs:
            envs.close()

    def count(self, outcome: str) -> float:
        return value(self.recorder.snapshot(), EPISODES, outcome)

    @property
    def steps(self) -> float:
        return value(self.recorder.snapshot(), ENV_STEPS)

    def blocked(self, on: str) -> float:
        return value(self.recorder.snapshot(), ACTOR_BLOCKED, on)

    def stored(self) -> list[Episode]:
        assert isinstance(self.sink, InMemorySink)
        return [decode(p, header(max_episode_steps=10**6)) for p in self.sink.payloads.values()]


def test_one_buffer_steps_while_the_request_of_the_other_is_open() -> None:
    planner = SlowPlanner()
    beside: list[tuple[int, list[int]]] = []  # who steps, whose requests are open

    def note(size: int) -> None:
        beside.append((size, [len(ask.window) for ask in planner.open]))

    bench = LoopBench(sizes=(2, 1), planner=planner, on_step=note)
    with bench.running():
        assert eventually(lambda: len(beside) >= 40)
    assert beside[:40] == [(2, [1]), (1, [2])] * 20


def test_a_single_environment_is_a_buffer_alone() -> None:
    bench = LoopBench(sizes=(1,), seeds=((1, n) for n in range(10**9)))
    with bench.running() as worker:
        assert eventually(lambda: bench.count("terminated") >= 5)
        assert worker.drain(PATIENCE) == 0
    assert {len(ask.window) for ask in bench.planner.requests} == {1}
    assert [len(episode) for episode in bench.stored()[:5]] == [3] * 5


def test_what_is_stored_is_what_happened() -> None:
    bench = LoopBench(planner=SlowPlanner(versions=chain(range(5, 7), repeat(8))))
    with bench.running() as worker:
        assert eventually(lambda: bench.count("terminated") >= 20)
        assert worker.drain(PATIENCE) == 0
    complete = [episode for episode in bench.stored() if episode.terminated]
    assert len(complete) == bench.count("terminated")
    assert sum(map(len, bench.stored())) == bench.steps
    for episode in complete:
        assert len(episode) == 2 + episode.seed
        assert episode.states.tolist() == [[episode.seed, n] for n in range(len(episode) + 1)]
    assert [episode.version for episode in complete[:3]] == [5, 5, 6]  # halves take turns


def test_an_episode_has_versions_target_return_and_utility() -> None:
    episodes: list[Episode] = []

    def keep(episode: Episode) -> bytes:
        episodes.append(episode)
        return encode(episode)

    planner = SlowPlanner(versions=iter(range(7, 10**9)))
    bench = LoopBench(sizes=(1,), planner=planner, encode=keep)
    with bench.running():
        assert eventually(lambda: len(episodes) >= 3)
    first, second = episodes[:2]  # 2 and 3 steps, planning seeds 0 and 1
    assert (first.version, first.last_version, first.target_return, first.utility) == (7, 8, 100, 0)
    assert (second.version, second.last_version, second.target_return) == (9, 11, 100)
    assert second.utility == 1


def test_draining_stores_what_is_unfinished() -> None:
    bench = LoopBench(  # in which none ends by itself
        seeds=((10**6, n) for n in range(10**9)), options={"max_episode_steps": 10**9}
    )
    with bench.running() as worker:
        assert eventually(lambda: bench.steps >= 20)
        assert worker.drain(PATIENCE) == 0
        steps = bench.steps
    stored = bench.stored()
    assert [(e.terminated, e.truncated) for e in stored] == [(False, False)] * 4
    assert sum(map(len, stored)) == steps == bench.steps  # and no step was taken after it
    assert bench.count("aborted") == 4


def test_draining_counts_the_episodes_that_the_store_did_not_take() -> None:
    sink = BlockedSink(InMemorySink())
    bench = LoopBench(sink=sink, max_unacked=3)
    with bench.running() as worker:
        assert eventually(lambda: bench.outbox.unacked == 3 and worker.unacked > 3)
        ended = bench.count("terminated")
        unacked = worker.drain(0.5)
        assert unacked == ended + bench.count("aborted")
        assert bench.count("aborted") > 0
        sink.open.set()


def test_a_full_outbox_stops_the_environments_until_the_store_goes_on() -> None:
    sink = BlockedSink(InMemorySink())
    bench = LoopBench(sink=sink, max_unacked=2)
    with bench.running() as worker:
        assert eventually(lambda: bench.blocked("replay") > 0)
        steps, requests = bench.steps, len(bench.planner.requests)
        assert not eventually(lambda: bench.steps > steps, patience=0.2)
        assert len(bench.planner.requests) == requests
        sink.open.set()
        assert eventually(lambda: bench.steps > steps + 50)
        assert worker.drain(PATIENCE) == 0


def test_a_fenced_loop_ends() -> None:
    sink = ScriptedSink(
        lambda key, _: ack(AckStatus.FENCED if key.sequence == 4 else AckStatus.DURABLE)
    )
    bench = LoopBench(sink=sink)
    bench.worker.run()
    assert bench.outbox.fenced
    assert sink.sent == [0, 1, 2, 3, 4]
    bench.close()


def test_a_planner_that_is_gone_is_asked_until_it_is_back() -> None:
    bench = LoopBench(planner=SlowPlanner(gone=3))
    with bench.running():
        assert eventually(lambda: bench.count("terminated") > 5)
    asks = bench.planner.requests
    assert all(again.window is asks[0].window for again in asks[2:4])
    assert bench.blocked("planner") > 0
    assert bench.stored()[0].states.tolist() == [[0, 0], [0, 1], [0, 2]]


def test_a_policy_too_far_behind_the_learner_is_not_acted_by() -> None:
    versions = [Version(epoch=2, number=n).packed for n in (4, 4, 5)]
    bench = LoopBench(
        planner=SlowPlanner(versions=chain(versions, repeat(versions[-1]))),
        exploration=ExplorationConfig(max_policy_lag=95),
        newest=lambda: 100,
    )
    with bench.running():
        assert eventually(lambda: bench.count("terminated") > 5)
    assert bench.stored()[0].version == versions[-1]
    assert {episode.version for episode in bench.stored()} == {versions[-1]}
    assert bench.blocked("stale") > 0


@pytest.mark.parametrize(("newest", "version"), [(None, 0), (10**6, -1), (3, 2)])
def test_acting_goes_on_where_the_newest_version_is_unknown_or_older(
    newest: int | None, version: int
) -> None:
    bench = LoopBench(
        planner=SlowPlanner(versions=repeat(version)),
        exploration=ExplorationConfig(max_policy_lag=1),
        newest=lambda: newest,
    )
    with bench.running():
        assert eventually(lambda: bench.count("terminated") > 5)
    assert bench.blocked("stale") == 0


def test_noise_depends_on_episode_and_step_alone_and_actions_stay_in_bounds() -> None:
    desks = {}
    for sizes, noise in (((2, 2), 0.5), ((1,), 0.5), ((2, 2), 0.0)):
        bench = LoopBench(
            sizes=sizes,
            exploration=ExplorationConfig(noise_scale=noise),
            seeds=((30, n) for n in range(10**9)),
        )
        with bench.running() as worker:
            assert eventually(lambda: len(worker.finished()) >= 4)
        requests = {(ask.mode, ask.explore, ask.mean) for ask in bench.planner.requests}
        assert requests == {("rcbc", True, True) if noise else (None, True, False)}
        desks[sizes, noise] = [episode.actions for episode in bench.stored()[:4]]
    beside, alone, plain = desks.values()
    for one, other in zip(beside, alone, strict=True):
        assert one.tobytes() == other.tobytes()
    added = np.concatenate([one - other for one, other in zip(beside, plain, strict=True)])
    inside = np.abs(np.concatenate(beside)) < 1
    assert np.abs(np.concatenate(beside)).max() == 1 and 0.5 < inside.mean() < 1
    assert len(np.unique(added[inside])) == inside.sum()  # no draw twice
    assert 0.2 < added[inside].std() < 0.6


def test_an_answer_that_is_not_finite_is_never_acted_on() -> None:
    planner = SlowPlanner()
    planner.spoil = 7
    bench = LoopBench(planner=planner)
    with pytest.raises(ValueError, match="2 numbers of them NaN"):
        bench.worker.run()
    assert bench.outbox.unacked == 0
    assert sum(map(len, bench.stored())) == bench.steps == 12  # six rounds of two, all stored
    bench.close()


def test_a_broken_environment_ends_the_loop_after_the_episodes_of_others_are_stored() -> None:
    forget()
    bench = LoopBench(env_id=FAULTY, options={"at": 1, "only_env": 3, "makes": 4}, sizes=(2, 2))
    with pytest.raises(BrokenEnvError):
        bench.worker.run()
    assert [(int(e.states[0, 0]), len(e)) for e in bench.stored()] == [(0, 1), (1, 1)]
    bench.close()


def test_finished_episodes_are_numbered_and_reported_from_any_number_on() -> None:
    bench = LoopBench()
    with bench.running() as worker:
        assert eventually(lambda: len(worker.finished()) >= 10)
    finished = worker.finished()
    assert [episode.number for episode in finished] == list(range(len(finished)))
    assert worker.finished(after=6) == finished[7:]
    stored = bench.stored()
    assert [episode.length for episode in finished] == [len(episode) for episode in stored]
    assert [episode.total for episode in finished] == [float(e.rewards.sum()) for e in stored]
    assert finished[-1].steps == bench.steps
    assert [episode.outcome for episode in finished[:3]] == ["terminated"] * 3


def test_no_start_is_ever_repeated() -> None:
    turns = [
        (seed, slot, turn) for seed in (0, 1) for slot in (0, 1, 2) for turn in (0, 1, 1 << 40)
    ]
    drawn = [start for turn in turns for start in islice(rollout_episodes(*turn), 50)]
    evaluations = [evaluation_episode(seed, number) for seed in (0, 1) for number in range(50)]
    assert len({planning for _, planning in drawn + evaluations}) == len(turns) * 50 + 100
    assert len({reset for reset, _ in drawn + evaluations}) == len(turns) * 50 + 100
    assert list(islice(rollout_episodes(1, 2, 3), 5)) == list(islice(rollout_episodes(1, 2, 3), 5))
