"""Data sets of random actions."""

from pathlib import Path

import numpy as np
import pytest

from m3pc.core.progress import ignore_progress
from m3pc.datagen.policies.random_hold import RandomHoldPolicy, RandomHoldSchedule
from m3pc.datagen.random_actions import QUALITY, make_random_dataset
from m3pc.types import Floats
from replay.store.store import Store
from tests.support.runs.commands import Command, assert_one_sentence

NO_STATE = np.zeros(3, np.float32)


def actions_of(policy: RandomHoldPolicy, rng: np.random.Generator, steps: int) -> Floats:
    return np.stack([policy.act(NO_STATE, rng) for _ in range(steps)])


def test_an_action_is_held_for_a_while_and_then_another() -> None:
    rng = np.random.default_rng(0)
    policy = RandomHoldPolicy(
        schedule=RandomHoldSchedule(actions=2, max_hold=64, noise=0.0),
        strength=0.5,
        mean_hold=10.0,
        action=np.zeros(2),
    )
    actions = actions_of(policy, rng, 10_000)
    changes = (np.diff(actions, axis=0) != 0).all(axis=1).sum()
    assert 900 < changes < 1100
    assert 0.49 < abs(actions).max() <= 0.5


def test_noise_comes_on_top_and_stays_within_the_bounds() -> None:
    rng = np.random.default_rng(0)
    calm = RandomHoldPolicy(
        schedule=RandomHoldSchedule(actions=1, max_hold=64),
        strength=0.0,
        mean_hold=64.0,
        action=np.zeros(1),
    )
    assert actions_of(calm, rng, 5_000).std() == pytest.approx(0.1, rel=0.05)
    wild = RandomHoldPolicy(
        schedule=RandomHoldSchedule(actions=1, max_hold=64, noise=3.0),
        strength=1.0,
        mean_hold=1.0,
        action=np.zeros(1),
    )
    assert abs(actions_of(wild, rng, 100)).max() == 1.0


def test_episodes_differ_in_strength_and_in_how_long_actions_are_held() -> None:
    policies = [
        RandomHoldSchedule(actions=1, max_hold=64).policy_of(0, np.random.default_rng(seed))
        for seed in range(300)
    ]
    strengths, held = (
        np.array([getattr(policy, name) for policy in policies])
        for name in ("strength", "mean_hold")
    )
    assert strengths.min() < 0.05 and strengths.max() > 0.95
    assert held.min() < 1.2 and 50 < held.max() <= 64 and 6 < np.median(held) < 10


def test_no_episode_exceeds_the_maximum_strength() -> None:
    schedule = RandomHoldSchedule(actions=1, max_hold=64, max_strength=0.25)
    strengths = [schedule.policy_of(0, np.random.default_rng(seed)).strength for seed in range(300)]
    assert min(strengths) < 0.02 and 0.24 < max(strengths) <= 0.25


def test_an_episode_ends_at_its_step_limit() -> None:
    policy = RandomHoldSchedule(actions=1, max_hold=64, max_steps=3).policy_of(
        0, np.random.default_rng(0)
    )
    rng = np.random.default_rng(0)
    ends = []
    for _ in range(3):
        policy.act(NO_STATE, rng)
        ends.append(policy.stops())
    assert ends == [False, False, True]


def test_one_process_and_two_make_the_same_set_and_describe_it_in_the_header(
    tmp_path: Path,
) -> None:
    stores = [
        make_random_dataset(
            "Pendulum-v1",
            tmp_path / f"{workers}",
            steps=900,
            max_strength=0.5,
            seed=1,
            workers=workers,
            on_progress=ignore_progress,
        )
        for workers in (1, 2)
    ]
    assert stores[0].checksum == stores[1].checksum
    assert stores[0].lengths.tolist() == [200] * 5
    source = stores[0].header.source
    assert (source["kind"], source["quality"], source["algorithm"]) == (
        "made",
        "babble",
        "babbling",
    )
    assert (source["noise"], source["longest"]) == (0.1, 15.0)  # 0.5 s at 30 Hz
    assert (source["strongest"], source["patience"]) == (0.5, 200)
    assert (source["seed"], source["steps"]) == (1, 900)


def test_the_command_makes_a_set_of_random_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, m3pc: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    done = m3pc(
        *("data", "make", "Pendulum-v1", "--quality", "babble"),
        *("--steps", "150", "--strength", "0.5"),
    )
    assert done.code == 0 and f"data/pendulum-v1-{QUALITY}: 1 episodes, 200 steps" in done.out
    store = Store(tmp_path / f"data/pendulum-v1-{QUALITY}")
    assert store.lengths.tolist() == [200]
    assert store.header.source["strongest"] == 0.5


@pytest.mark.parametrize(
    "option",
    [("--episodes", "3"), ("--target-return", "1"), ("--png", "a.png"), ("--noise", "0.1")],
)
def test_options_of_other_qualities_are_refused(
    option: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, m3pc: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("data", "make", "Pendulum-v1", "--quality", "babble", *option)
    assert_one_sentence(m3pc(*words), f"{option[0]} given, but Pendulum-v1")
    assert list(tmp_path.iterdir()) == []
