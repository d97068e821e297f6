"""Collecting: halves take turns, nothing is lost at the end, nothing unsound is acted on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, repeat

import numpy as np
import pytest

from actors.fault_tolerant_envs import BrokenEnvError, FaultTolerantEnvs
from actors.outbox import Outbox
from actors.rollout_loop import ExplorationConfig, RolloutLoop
from actors.vector_rollout import BoolArray, Stepped, VectorEnvs
from m3pc.core.seeding import evaluation_episode, rollout_episodes
from m3pc.envs import make
from m3pc.telemetry.catalogue import ACTOR_BLOCKED, ENV_STEPS, EPISODES
from m3pc.telemetry.recorder import Recorder, value
from m3pc.types import AckStatus, Episode, EpisodeSink, Floats, Version
from replay.format.payload import decode, encode
from tests.support.envs.countdown import COUNTDOWN
from tests.support.envs.faulty_env import FAULTY, forget
from tests.support.episodes.episodes import header
from tests.support.fakes.sinks import Kept, Scripted, Shut, ack
from tests.support.fakes.slow_planner import SlowPlanner
from tests.support.servers.waiting import PATIENCE, eventually

ACTING = ExplorationConfig(window=8, horizon=4)


class Noted:
    """Environments that tell when they step."""

    def __init__(self, envs: VectorEnvs, on_step: Callable[[int], None]) -> None:
        self._envs, self._on_step = envs, on_step
        self.count, self.state_size = envs.count, envs.state_size
        self.action_size = envs.action_size

    def reset(self, seeds: list[int | None], mask: BoolArray) -> tuple[Floats, BoolArray]:
        return self._envs.reset(seeds, mask)

    def step(self, actions: Floats) -> Stepped:
        self._on_step(self.count)
        return self._envs.step(actions)


@dataclass
class Desk:
    """A worker and all that it works with."""

    sizes: tuple[int, ...] = (2, 2)
    env_id: str = COUNTDOWN
    options: dict[str, object] = field(default_factory=dict)
    acting: ExplorationConfig = ACTING
    planner: SlowPlanner = field(default_factory=SlowPlanner)
    sink: EpisodeSink = field(default_factory=Kept)
    newest: Callable[[], int | None] = lambda: None
    most: int = 32
    on_step: Callable[[int], None] = lambda count: None
    seeds: Iterator[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        self.recorder = Recorder()
        making = partial(make, self.env_id, **self.options)
        self.envs = [FaultTolerantEnvs(making, size, recorder=self.recorder) for size in self.sizes]
        self.outbox = Outbox(
            self.sink, 0, 0, recorder=self.recorder, most=self.most, pauses=(0.001, 0.01)
        )
        self.worker = RolloutLoop(
            [Noted(envs, self.on_step) for envs in self.envs],  # type: ignore[misc]
            self.acting,
            planner=self.planner,
            outbox=self.outbox,
            encode=encode,
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
        assert isinstance(self.sink, Kept)
        return [decode(p, header(horizon=10**6)) for p in self.sink.payloads.values()]


def test_one_half_steps_while_the_request_of_the_other_is_open() -> None:
    planner = SlowPlanner()
    beside: list[tuple[int, list[int]]] = []  # who steps, whose requests are open

    def note(size: int) -> None:
        beside.append((size, [len(ask.window) for ask in planner.open]))

    desk = Desk(sizes=(2, 1), planner=planner, on_step=note)
    with desk.running():
        assert eventually(lambda: len(beside) >= 40)
    assert beside[:40] == [(2, [1]), (1, [2])] * 20


def test_a_single_environment_is_a_half_of_its_own() -> None:
    desk = Desk(sizes=(1,), seeds=((1, n) for n in range(10**9)))
    with desk.running() as worker:
        assert eventually(lambda: desk.count("terminated") >= 5)
        assert worker.drain(PATIENCE) == 0
    assert {len(ask.window) for ask in desk.planner.asks} == {1}
    assert [len(episode) for episode in desk.stored()[:5]] == [3] * 5


def test_what_is_stored_is_what_happened() -> None:
    desk = Desk(planner=SlowPlanner(versions=chain(range(5, 7), repeat(8))))
    with desk.running() as worker:
        assert eventually(lambda: desk.count("terminated") >= 20)
        assert worker.drain(PATIENCE) == 0
    whole = [episode for episode in desk.stored() if episode.terminated]
    assert len(whole) == desk.count("terminated")
    assert sum(map(len, desk.stored())) == desk.steps
    for episode in whole:
        assert len(episode) == 2 + episode.seed
        assert episode.states.tolist() == [[episode.seed, n] for n in range(len(episode) + 1)]
    assert [episode.version for episode in whole[:3]] == [5, 5, 6]  # halves take turns


def test_an_episode_tells_versions_condition_and_utility() -> None:
    told: list[Episode] = []
    desk = Desk(sizes=(1,), planner=SlowPlanner(versions=iter(range(7, 10**9))))
    desk.worker._encode = lambda episode: told.append(episode) or encode(episode)  # type: ignore[func-returns-value]
    with desk.running():
        assert eventually(lambda: len(told) >= 3)
    first, second = told[:2]  # 2 and 3 steps, planning seeds 0 and 1
    assert (first.version, first.last_version, first.target_return, first.utility) == (7, 8, 100, 0)
    assert (second.version, second.last_version, second.target_return) == (9, 11, 100)
    assert second.utility == 1


def test_draining_stores_what_is_unfinished() -> None:
    desk = Desk(  # in which none ends by itself
        seeds=((10**6, n) for n in range(10**9)), options={"max_episode_steps": 10**9}
    )
    with desk.running() as worker:
        assert eventually(lambda: desk.steps >= 20)
        assert worker.drain(PATIENCE) == 0
        steps = desk.steps
    stored = desk.stored()
    assert [(e.terminated, e.truncated) for e in stored] == [(False, False)] * 4
    assert sum(map(len, stored)) == steps == desk.steps  # and no step was taken after it
    assert desk.count("aborted") == 4


def test_draining_tells_how_much_the_store_did_not_take() -> None:
    sink = Shut(Kept())
    desk = Desk(sink=sink, most=3)
    with desk.running() as worker:
        assert eventually(lambda: desk.outbox.unacked == 3 and worker.unacked > 3)
        ended = desk.count("terminated")
        left = worker.drain(0.5)
        assert left == ended + desk.count("aborted")
        assert desk.count("aborted") > 0
        sink.open.set()


def test_a_full_outbox_stops_the_environments_until_the_store_goes_on() -> None:
    sink = Shut(Kept())
    desk = Desk(sink=sink, most=2)
    with desk.running() as worker:
        assert eventually(lambda: desk.blocked("replay") > 0)
        steps, asked = desk.steps, len(desk.planner.asks)
        assert not eventually(lambda: desk.steps > steps, patience=0.2)
        assert len(desk.planner.asks) == asked
        sink.open.set()
        assert eventually(lambda: desk.steps > steps + 50)
        assert worker.drain(PATIENCE) == 0


def test_a_worker_that_was_shut_out_ends() -> None:
    sink = Scripted(
        lambda key, _: ack(AckStatus.FENCED if key.sequence == 4 else AckStatus.DURABLE)
    )
    desk = Desk(sink=sink)
    desk.worker.run()
    assert desk.outbox.fenced
    assert sink.sent == [0, 1, 2, 3, 4]
    desk.close()


def test_a_planner_that_is_gone_is_asked_until_it_is_back() -> None:
    desk = Desk(planner=SlowPlanner(gone=3))
    with desk.running():
        assert eventually(lambda: desk.count("terminated") > 5)
    asks = desk.planner.asks
    assert all(again.window is asks[0].window for again in asks[2:4])
    assert desk.blocked("planner") > 0
    assert desk.stored()[0].states.tolist() == [[0, 0], [0, 1], [0, 2]]


def test_a_policy_too_far_behind_the_learner_is_not_acted_by() -> None:
    versions = [Version(epoch=2, number=n).packed for n in (4, 4, 5)]
    desk = Desk(
        planner=SlowPlanner(versions=chain(versions, repeat(versions[-1]))),
        acting=replace(ACTING, pause_after=95),
        newest=lambda: 100,
    )
    with desk.running():
        assert eventually(lambda: desk.count("terminated") > 5)
    assert desk.stored()[0].version == versions[-1]
    assert {episode.version for episode in desk.stored()} == {versions[-1]}
    assert desk.blocked("stale") > 0


@pytest.mark.parametrize(("newest", "version"), [(None, 0), (10**6, -1), (3, 2)])
def test_acting_goes_on_where_nobody_knows_or_the_policy_is_ahead(
    newest: int | None, version: int
) -> None:
    desk = Desk(
        planner=SlowPlanner(versions=repeat(version)),
        acting=replace(ACTING, pause_after=1),
        newest=lambda: newest,
    )
    with desk.running():
        assert eventually(lambda: desk.count("terminated") > 5)
    assert desk.blocked("stale") == 0


def test_noise_is_of_the_episode_and_its_step_and_stays_in_bounds() -> None:
    desks = {}
    for sizes, noise in (((2, 2), 0.5), ((1,), 0.5), ((2, 2), 0.0)):
        desk = Desk(
            sizes=sizes,
            acting=replace(ACTING, noise=noise),
            seeds=((30, n) for n in range(10**9)),
        )
        with desk.running() as worker:
            assert eventually(lambda: len(worker.finished()) >= 4)
        asked = {(ask.mode, ask.explore, ask.mean) for ask in desk.planner.asks}
        assert asked == {("rcbc", True, True) if noise else (None, True, False)}
        desks[sizes, noise] = [episode.actions for episode in desk.stored()[:4]]
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
    desk = Desk(planner=planner)
    with pytest.raises(ValueError, match="2 numbers of them NaN"):
        desk.worker.run()
    assert desk.outbox.unacked == 0
    assert sum(map(len, desk.stored())) == desk.steps == 12  # six rounds of two, all stored
    desk.close()


def test_a_broken_environment_ends_the_worker_but_not_the_episodes_of_others() -> None:
    forget()
    desk = Desk(env_id=FAULTY, options={"at": 1, "only_env": 3, "makes": 4}, sizes=(2, 2))
    with pytest.raises(BrokenEnvError):
        desk.worker.run()
    assert [(int(e.states[0, 0]), len(e)) for e in desk.stored()] == [(0, 1), (1, 1)]
    desk.close()


def test_finished_episodes_are_numbered_and_told_from_any_number_on() -> None:
    desk = Desk()
    with desk.running() as worker:
        assert eventually(lambda: len(worker.finished()) >= 10)
    finished = worker.finished()
    assert [found.number for found in finished] == list(range(len(finished)))
    assert worker.finished(after=6) == finished[7:]
    stored = desk.stored()
    assert [found.length for found in finished] == [len(episode) for episode in stored]
    assert [found.total for found in finished] == [float(e.rewards.sum()) for e in stored]
    assert finished[-1].steps == desk.steps
    assert [found.outcome for found in finished[:3]] == ["terminated"] * 3


def test_no_start_is_ever_repeated() -> None:
    turns = [
        (seed, slot, turn) for seed in (0, 1) for slot in (0, 1, 2) for turn in (0, 1, 1 << 40)
    ]
    drawn = [start for turn in turns for start in islice(rollout_episodes(*turn), 50)]
    evaluations = [evaluation_episode(seed, number) for seed in (0, 1) for number in range(50)]
    assert len({planning for _, planning in drawn + evaluations}) == len(turns) * 50 + 100
    assert len({reset for reset, _ in drawn + evaluations}) == len(turns) * 50 + 100
    assert list(islice(rollout_episodes(1, 2, 3), 5)) == list(islice(rollout_episodes(1, 2, 3), 5))
