"""Data sets of random actions."""

from pathlib import Path

import numpy as np
import pytest

from m3pc.datagen.policies.random_hold import RandomHoldPolicy, RandomHoldSchedule
from m3pc.datagen.random_actions import babble
from m3pc.types import Floats
from replay.store.store import Store
from tests.support.runs.commands import assert_one_sentence, invoke

NOTHING = np.zeros(3, np.float32)


def acted(player: RandomHoldPolicy, rng: np.random.Generator, steps: int) -> Floats:
    return np.stack([player.act(NOTHING, rng) for _ in range(steps)])


def test_an_action_is_held_for_a_while_and_then_another() -> None:
    rng = np.random.default_rng(0)
    player = RandomHoldPolicy(
        babble=RandomHoldSchedule(actions=2, longest=64, noise=0.0),
        strength=0.5,
        held=10.0,
        action=np.zeros(2),
    )
    found = acted(player, rng, 10_000)
    changes = (np.diff(found, axis=0) != 0).all(axis=1).sum()
    assert 900 < changes < 1100
    assert 0.49 < abs(found).max() <= 0.5


def test_noise_comes_on_top_and_stays_within_the_bounds() -> None:
    rng = np.random.default_rng(0)
    calm = RandomHoldPolicy(
        babble=RandomHoldSchedule(actions=1, longest=64),
        strength=0.0,
        held=64.0,
        action=np.zeros(1),
    )
    assert acted(calm, rng, 5_000).std() == pytest.approx(0.1, rel=0.05)
    wild = RandomHoldPolicy(
        babble=RandomHoldSchedule(actions=1, longest=64, noise=3.0),
        strength=1.0,
        held=1.0,
        action=np.zeros(1),
    )
    assert abs(acted(wild, rng, 100)).max() == 1.0


def test_episodes_differ_in_strength_and_in_how_long_actions_are_held() -> None:
    players = [
        RandomHoldSchedule(actions=1, longest=64).player(0, np.random.default_rng(seed))
        for seed in range(300)
    ]
    strengths, held = (
        np.array([getattr(one, name) for one in players]) for name in ("strength", "held")
    )
    assert strengths.min() < 0.05 and strengths.max() > 0.95
    assert held.min() < 1.2 and 50 < held.max() <= 64 and 6 < np.median(held) < 10


def test_no_episode_is_stronger_than_the_strongest() -> None:
    babble = RandomHoldSchedule(actions=1, longest=64, strongest=0.25)
    strengths = [babble.player(0, np.random.default_rng(seed)).strength for seed in range(300)]
    assert min(strengths) < 0.02 and 0.24 < max(strengths) <= 0.25


def test_an_episode_ends_after_so_many_steps() -> None:
    player = RandomHoldSchedule(actions=1, longest=64, patience=3).player(
        0, np.random.default_rng(0)
    )
    rng = np.random.default_rng(0)
    ends = []
    for _ in range(3):
        player.act(NOTHING, rng)
        ends.append(player.stops())
    assert ends == [False, False, True]


def test_one_process_and_two_make_the_same_set_and_it_says_what_it_is(tmp_path: Path) -> None:
    stores = [
        babble(
            "Pendulum-v1",
            tmp_path / f"{workers}",
            steps=900,
            strongest=0.5,
            seed=1,
            workers=workers,
            on_progress=lambda numbers: None,
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


def test_the_command_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(
        *(capsys, monkeypatch, "data", "make", "Pendulum-v1", "--quality", "babble"),
        *("--steps", "150", "--strength", "0.5"),
    )
    assert done.code == 0 and "data/pendulum-v1-babble: 1 episodes, 200 steps" in done.out
    store = Store(tmp_path / "data/pendulum-v1-babble")
    assert store.lengths.tolist() == [200]
    assert store.header.source["strongest"] == 0.5


@pytest.mark.parametrize(
    "given",
    [("--episodes", "3"), ("--target-return", "1"), ("--png", "a.png"), ("--noise", "0.1")],
)
def test_options_of_other_qualities_are_refused(
    given: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("data", "make", "Pendulum-v1", "--quality", "babble", *given)
    assert_one_sentence(invoke(capsys, monkeypatch, *words), f"{given[0]} given, but Pendulum-v1")
    assert list(tmp_path.iterdir()) == []
