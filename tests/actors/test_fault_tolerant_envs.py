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
    LARGEST,
    MAKE_TRIES,
    MOST_IN_A_ROW,
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


def guarded(recorder: Recorder, count: int = 1, **options: object) -> FaultTolerantEnvs:
    return FaultTolerantEnvs(partial(make, FAULTY, **options), count, recorder=recorder)


def play(
    envs: FaultTolerantEnvs | GymVectorAdapter, rounds: int, *, actions: int = 1
) -> list[Rollout]:
    """Endless episodes for so many steps of all environments; the last ones are cut."""
    fleet, planner = VectorRollout(envs, window=8, horizon=4), FakePlanner(actions)
    numbered = enumerate(evaluation_episode(0, number) for number in count())
    free, found = np.ones(envs.count, np.bool_), list[Rollout]()
    for _ in range(rounds):
        fleet.begin(free, numbered)
        stepped = fleet.step(planner.decide(fleet.question()))
        found += fleet.ended(stepped)
        free = stepped.ended
    return [*found, *fleet.cut()]


def faults(recorder: Recorder) -> dict[str, float]:
    snapshot = recorder.snapshot()
    found = {reason: value(snapshot, ENV_FAULTS, reason) for reason in ("nan", "crash", "shape")}
    return {reason: times for reason, times in found.items() if times}


@pytest.mark.parametrize("kind", ["crash", *REASONS])
def test_a_fault_drops_its_step_and_keeps_those_before(kind: str) -> None:
    recorder = Recorder()
    with closing(guarded(recorder, at=4, kind=kind, only_env=0)) as envs:
        cut, whole = play(envs, 4 + LIMIT)
    assert cut.episode.states.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert (cut.episode.terminated, cut.episode.truncated) == (False, False)
    assert whole.episode.states[:, 0].tolist() == [1] * (LIMIT + 1)  # made anew
    assert (len(whole.episode), whole.episode.truncated) == (LIMIT, True)
    assert faults(recorder) == {REASONS.get(kind, "crash"): 1}


def test_the_others_go_on() -> None:
    recorder = Recorder()
    with closing(guarded(recorder, 3, at=4, only_env=1)) as envs:
        found = play(envs, LIMIT)
    ends = {(int(r.episode.states[0, 0]), len(r.episode), r.episode.truncated) for r in found}
    assert ends == {(0, LIMIT, True), (1, 3, False), (3, LIMIT - 4, False), (2, LIMIT, True)}
    assert faults(recorder) == {"crash": 1}


def test_an_episode_that_fails_in_its_first_step_is_nothing() -> None:
    recorder = Recorder()
    with closing(guarded(recorder, at=1, only_env=0)) as envs:
        (found,) = play(envs, 3)
    assert (found.number, found.episode.states.tolist()) == (1, [[1, 0], [1, 1], [1, 2]])


@pytest.mark.parametrize("kind", ["crash", "nan-state", "long-state"])
def test_a_fault_in_a_reset_takes_the_next_episode(kind: str) -> None:
    recorder = Recorder()
    with closing(guarded(recorder, 2, at=0, kind=kind, on_reset=True, only_env=0)) as envs:
        found = play(envs, 2)
    assert sorted((r.number, int(r.episode.states[0, 0])) for r in found) == [(1, 1), (2, 2)]
    assert faults(recorder) == {REASONS.get(kind, "crash"): 1}


def test_ten_thousand_steps_with_faults_hand_out_nothing_unsound() -> None:
    recorder = Recorder()
    with closing(guarded(recorder, 4, chance=0.01, kind="any")) as envs:
        found = play(envs, 2500)
    happened: dict[str, int] = {}
    for kind, times in Faulty.faults.items():
        reason = REASONS.get(kind, "crash")
        happened[reason] = happened.get(reason, 0) + times
    assert faults(recorder) == happened
    assert set(happened) == {"crash", "nan", "shape"} and sum(happened.values()) > 50
    arrays = [(r.episode.states, r.episode.rewards, r.episode.actions) for r in found]
    assert all((np.abs(array) <= LARGEST).all() for triple in arrays for array in triple)
    assert sum(len(r.episode) for r in found) == Faulty.steps - sum(happened.values())
    assert Faulty.steps == 10_000
    aborted = [r for r in found if not r.episode.truncated]
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
    making = partial(Watched, note, calls, at=3, only_env=1)
    with closing(FaultTolerantEnvs(making, 2, recorder=Recorder(), watch=note, first=4)) as envs:
        play(envs, 2)
        whole = {(name, slot) for name in ("make", "reset", "step") for slot in (4, 5)}
        assert calls == whole
        play(envs, 3)
        assert calls == whole | {("close", 5)}  # it failed, and was made anew
    assert calls == whole | {("close", 4), ("close", 5)}
    assert note.called is None


def test_an_environment_that_fails_for_ever_is_given_up() -> None:
    recorder = Recorder()
    with (
        closing(guarded(recorder, 2, at=1, kind="nan-reward")) as envs,
        pytest.raises(BrokenEnvError, match=r"environment 0 failed 11 times .*nan: a reward"),
    ):
        play(envs, 100)
    assert faults(recorder)["nan"] == 2 * MOST_IN_A_ROW + 1


def test_sound_steps_between_faults_are_patience_for_the_next() -> None:
    recorder = Recorder()
    with closing(guarded(recorder, at=2)) as envs:
        play(envs, 4 * MOST_IN_A_ROW)
    assert faults(recorder) == {"crash": 2 * MOST_IN_A_ROW}


def test_an_environment_that_cannot_be_made_again_is_given_up() -> None:
    with (
        closing(guarded(Recorder(), at=3, makes=1)) as envs,
        pytest.raises(BrokenEnvError, match=f"could not be made {MAKE_TRIES} times"),
    ):
        play(envs, 9)


def test_environments_without_a_limit_of_steps_are_refused_and_closed() -> None:
    with pytest.raises(InputError, match="max_episode_steps"):
        guarded(Recorder(), max_episode_steps=-1)


def test_guarded_environments_play_the_episodes_of_a_vector() -> None:
    env_id = "d4rl/Hopper-v2"
    with (
        closing(FaultTolerantEnvs(partial(make, env_id), 3, recorder=Recorder())) as envs,
        closing(make_vector(env_id, 3)) as vector,
    ):
        one, other = (play(found, 60, actions=3) for found in (envs, GymVectorAdapter(vector)))
    assert len(one) > 3
    assert [r.number for r in one] == [r.number for r in other]
    for name in ("states", "actions", "rewards"):
        pairs = zip(one, other, strict=True)
        assert all(
            getattr(a.episode, name).tobytes() == getattr(b.episode, name).tobytes()
            for a, b in pairs
        )


def test_physics_that_became_unstable_are_a_fault_though_the_numbers_are_finite() -> None:
    recorder = Recorder()
    with closing(FaultTolerantEnvs(partial(make, "d4rl/Hopper-v2"), 2, recorder=recorder)) as envs:
        envs.reset([0, 1], np.ones(2, np.bool_))
        data = envs._envs[1].unwrapped.data  # type: ignore[attr-defined]
        data.qacc_warmstart[:] = data.qvel[:] = 1e9
        stepped = envs.step(np.zeros((2, 3), np.float32))
        assert stepped.faulty.tolist() == [False, True]
        assert np.isfinite(stepped.states).all()
        assert data.warning[mujoco.mjtWarning.mjWARN_BADQACC].number > 0
        assert envs._envs[1].unwrapped.data is not data  # type: ignore[attr-defined]
    assert faults(recorder) == {"nan": 1}
