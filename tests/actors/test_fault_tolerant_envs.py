"""Environments that fail one by one: only their own episodes end, nothing unsound comes out."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest

from actors.fault_tolerant_envs import (
    MAKE_ATTEMPTS,
    MAX_FAULTS_IN_A_ROW,
    MAX_VALUE,
    BrokenEnvError,
    FaultTolerantEnvs,
)
from actors.vector_rollout import GymVectorAdapter, Rollout, VectorRollout
from m3pc.core.seeding import evaluation_episode
from m3pc.envs import make, make_vector
from m3pc.telemetry.catalogue import ENV_FAULTS
from m3pc.telemetry.recorder import Recorder, value
from m3pc.types import InputError
from tests.support.envs.faulty_env import FAULTY, LIMIT, REASONS, Faulty, forget
from tests.support.fakes.fake_planner import FakePlanner


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget()
    yield
    assert Faulty.open == 0  # whatever was made was closed


def faulty_envs(recorder: Recorder, count: int = 1, **options: object) -> FaultTolerantEnvs:
    return FaultTolerantEnvs(partial(make, FAULTY, **options), count, recorder=recorder)


def play(
    envs: FaultTolerantEnvs | GymVectorAdapter, rounds: int, *, actions: int = 1
) -> list[Rollout]:
    """Endless episodes for so many steps of all environments; the last ones are cut."""
    vector, planner = VectorRollout(envs, window=8, horizon=4), FakePlanner(actions)
    numbered = enumerate(evaluation_episode(0, number) for number in count())
    free, rollouts = np.ones(envs.count, np.bool_), list[Rollout]()
    for _ in range(rounds):
        vector.begin(free, numbered)
        step = vector.step(planner.decide(vector.window()))
        rollouts += vector.ended(step)
        free = step.ended
    return [*rollouts, *vector.cut()]


def faults(recorder: Recorder) -> dict[str, float]:
    snapshot = recorder.snapshot()
    counts = {reason: value(snapshot, ENV_FAULTS, reason) for reason in ("nan", "crash", "shape")}
    return {reason: times for reason, times in counts.items() if times}


@pytest.mark.parametrize("kind", ["crash", *REASONS])
def test_a_fault_drops_its_step_and_keeps_those_before(kind: str) -> None:
    recorder = Recorder()
    with closing(faulty_envs(recorder, at=4, kind=kind, only_env=0)) as envs:
        cut, complete = play(envs, 4 + LIMIT)
    assert cut.episode.states.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert (cut.episode.terminated, cut.episode.truncated) == (False, False)
    assert complete.episode.states[:, 0].tolist() == [1] * (LIMIT + 1)  # made anew
    assert (len(complete.episode), complete.episode.truncated) == (LIMIT, True)
    assert faults(recorder) == {REASONS.get(kind, "crash"): 1}


def test_a_fault_does_not_disturb_the_other_environments() -> None:
    recorder = Recorder()
    with closing(faulty_envs(recorder, 3, at=4, only_env=1)) as envs:
        rollouts = play(envs, LIMIT)
    ends = {(int(r.episode.states[0, 0]), len(r.episode), r.episode.truncated) for r in rollouts}
    assert ends == {(0, LIMIT, True), (1, 3, False), (3, LIMIT - 4, False), (2, LIMIT, True)}
    assert faults(recorder) == {"crash": 1}


def test_an_episode_that_fails_in_its_first_step_is_dropped() -> None:
    recorder = Recorder()
    with closing(faulty_envs(recorder, at=1, only_env=0)) as envs:
        (rollout,) = play(envs, 3)
    assert (rollout.number, rollout.episode.states.tolist()) == (1, [[1, 0], [1, 1], [1, 2]])


@pytest.mark.parametrize("kind", ["crash", "nan-state", "long-state"])
def test_a_fault_in_a_reset_takes_the_next_episode(kind: str) -> None:
    recorder = Recorder()
    with closing(faulty_envs(recorder, 2, at=0, kind=kind, on_reset=True, only_env=0)) as envs:
        rollouts = play(envs, 2)
    assert sorted((r.number, int(r.episode.states[0, 0])) for r in rollouts) == [(1, 1), (2, 2)]
    assert faults(recorder) == {REASONS.get(kind, "crash"): 1}


def test_ten_thousand_steps_with_faults_hand_out_nothing_unsound() -> None:
    recorder = Recorder()
    with closing(faulty_envs(recorder, 4, chance=0.01, kind="any")) as envs:
        rollouts = play(envs, 2500)
    happened: dict[str, int] = {}
    for kind, times in Faulty.faults.items():
        reason = REASONS.get(kind, "crash")
        happened[reason] = happened.get(reason, 0) + times
    assert faults(recorder) == happened
    assert set(happened) == {"crash", "nan", "shape"} and sum(happened.values()) > 50
    arrays = [(r.episode.states, r.episode.rewards, r.episode.actions) for r in rollouts]
    assert all((np.abs(array) <= MAX_VALUE).all() for triple in arrays for array in triple)
    assert sum(len(r.episode) for r in rollouts) == Faulty.steps - sum(happened.values())
    assert Faulty.steps == 10_000
    aborted = [r for r in rollouts if not r.episode.truncated]
    assert len(aborted) <= sum(happened.values()) + 4


class Note:
    """A Watch that knows which environment is called."""

    called: int | None = None

    def arm(self, slot: int) -> None:
        self.called = slot

    def disarm(self) -> None:
        self.called = None


class Watched(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Tells each call, and which environment was being watched in it."""

    def __init__(self, note: Note, calls: set[tuple[str, int | None]], **options: object) -> None:
        calls.add(("make", note.called))
        super().__init__(make(FAULTY, **options))
        self._note, self._calls = note, calls

    def reset(self, **options: Any) -> Any:
        self._calls.add(("reset", self._note.called))
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self._calls.add(("step", self._note.called))
        return super().step(action)

    def close(self) -> None:
        self._calls.add(("close", self._note.called))
        super().close()  # type: ignore[no-untyped-call]


def test_every_call_into_an_environment_is_watched() -> None:
    note, calls = Note(), set[tuple[str, int | None]]()
    make_watched = partial(Watched, note, calls, at=3, only_env=1)
    with closing(
        FaultTolerantEnvs(make_watched, 2, recorder=Recorder(), watchdog=note, first=4)
    ) as envs:
        play(envs, 2)
        expected = {(name, slot) for name in ("make", "reset", "step") for slot in (4, 5)}
        assert calls == expected
        play(envs, 3)
        assert calls == expected | {("close", 5)}  # it failed, and was made anew
    assert calls == expected | {("close", 4), ("close", 5)}
    assert note.called is None


def test_an_environment_that_always_fails_is_given_up() -> None:
    recorder = Recorder()
    with (
        closing(faulty_envs(recorder, 2, at=1, kind="nan-reward")) as envs,
        pytest.raises(BrokenEnvError, match=r"environment 0 failed 11 times .*nan: a reward"),
    ):
        play(envs, 100)
    assert faults(recorder)["nan"] == 2 * MAX_FAULTS_IN_A_ROW + 1


def test_a_sound_step_resets_the_count_of_faults_in_a_row() -> None:
    recorder = Recorder()
    with closing(faulty_envs(recorder, at=2)) as envs:
        play(envs, 4 * MAX_FAULTS_IN_A_ROW)
    assert faults(recorder) == {"crash": 2 * MAX_FAULTS_IN_A_ROW}


def test_an_environment_that_cannot_be_made_again_is_given_up() -> None:
    with (
        closing(faulty_envs(Recorder(), at=3, makes=1)) as envs,
        pytest.raises(BrokenEnvError, match=f"could not be made {MAKE_ATTEMPTS} times"),
    ):
        play(envs, 9)


def test_environments_without_a_limit_of_steps_are_refused_and_closed() -> None:
    with pytest.raises(InputError, match="max_episode_steps"):
        faulty_envs(Recorder(), max_episode_steps=-1)


def test_fault_tolerant_environments_play_the_episodes_of_a_gymnasium_vector() -> None:
    env_id = "d4rl/Hopper-v2"
    with (
        closing(FaultTolerantEnvs(partial(make, env_id), 3, recorder=Recorder())) as envs,
        closing(make_vector(env_id, 3)) as vector,
    ):
        one, other = (
            play(vector_envs, 60, actions=3) for vector_envs in (envs, GymVectorAdapter(vector))
        )
    assert len(one) > 3
    assert [r.number for r in one] == [r.number for r in other]
    for name in ("states", "actions", "rewards"):
        pairs = zip(one, other, strict=True)
        assert all(
            getattr(a.episode, name).tobytes() == getattr(b.episode, name).tobytes()
            for a, b in pairs
        )


def test_physics_that_became_unstable_are_a_fault_though_the_numbers_are_finite() -> None:
    recorder, hoppers = Recorder(), list[Any]()

    def make_hopper() -> Any:
        hoppers.append(make("d4rl/Hopper-v2"))
        return hoppers[-1]

    with closing(FaultTolerantEnvs(make_hopper, 2, recorder=recorder)) as envs:
        envs.reset([0, 1], np.ones(2, np.bool_))
        data = hoppers[1].unwrapped.data
        data.qacc_warmstart[:] = data.qvel[:] = 1e9
        stepped = envs.step(np.zeros((2, 3), np.float32))
        assert stepped.faulty.tolist() == [False, True]
        assert np.isfinite(stepped.states).all()
        assert data.warning[mujoco.mjtWarning.mjWARN_BADQACC].number > 0
    assert len(hoppers) == 3  # it was made again
    assert faults(recorder) == {"nan": 1}
