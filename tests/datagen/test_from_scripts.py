"""`m3pc data make` by script, and `m3pc data regenerate` with a policy for robosuite."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from m3pc.core.progress import ignore_progress
from m3pc.datagen.collect import collect
from m3pc.datagen.from_scripts import ScriptedDataRequest, make_scripted_dataset, tally
from m3pc.datagen.policies.networks import AdaptedPolicy, Linear, RegressionPolicy
from m3pc.datagen.policies.scripted import SCHEDULES
from m3pc.datagen.regenerate import columns
from m3pc.types import Floats, InputError
from replay.store.store import Store
from tests.support.episodes.shared_data import shared_file
from tests.support.runs.commands import Command, assert_one_sentence

needs_robosuite = pytest.mark.skipif(
    find_spec("robosuite") is None,
    reason="robosuite is not installed: pip install 'm3pc[robosuite]'",
)
LIFT, CAN, SQUARE = "robosuite/Lift", "robosuite/PickPlaceCan", "robosuite/NutAssemblySquare"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([LIFT, "--quality", "medium"], "give one of good, noisy"),
        ([LIFT, "--quality", "paired"], "give one of good, noisy"),
        ([CAN, "--quality", "great"], "give one of good, noisy, paired"),
        (["d4rl/Hopper-v2", "--quality", "good"], "is for robosuite/Lift, robosuite/PickPlaceCan"),
        (["d4rl/Hopper-v2", "--quality", "paired"], "medium, medium-replay, expert or babble"),
        ([SQUARE, "--quality", "noisy"], "there is no script for robosuite/NutAssemblySquare"),
        ([SQUARE, "--quality", "medium"], "m3pc data import robomimic:square/ph OUT"),
        ([CAN, "--quality", "paired", "--episodes", "3"], "give a multiple of 2"),
        ([CAN, "--quality", "good", "--episodes", "2", "--steps", "9"], "give one of them"),
        ([CAN, "--quality", "good", "--target-return", "1"], "played by script; leave it out"),
        ([CAN, "--quality", "good", "--max-steps", "9", "--replay", "r"], "--max-steps, --replay"),
        (["d4rl/Hopper-v2", "--quality", "expert", "--episodes", "9"], "whose size is --steps"),
        (["d4rl/Hopper-v2", "--quality", "expert", "--noise", "1"], "--noise given, but d4rl/Hop"),
        (["d4rl/Hopper-v2", "--quality", "expert", "--strays", "1"], "--strays given, but d4rl/Ho"),
        ([CAN, "--quality", "good", "--strength", "1"], "--strength given, but robosuite/PickPl"),
    ],
)
def test_conflicting_options_are_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, m3pc: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_sentence(m3pc("data", "make", *arguments), words)
    assert list(tmp_path.iterdir()) == []


def test_each_variant_is_counted_by_itself() -> None:
    schedule = SCHEDULES[CAN]["paired"]
    place, throw = tally(schedule, [100, 90, 110, 95], [True, False, True, False])
    assert (place.name, place.lengths, place.successes) == ("place", [100, 110], 2)
    assert (throw.name, throw.lengths, throw.successes) == ("throw", [90, 95], 0)


@needs_robosuite
def test_one_process_and_two_make_the_same_bytes(tmp_path: Path) -> None:
    requests = [
        ScriptedDataRequest(
            env_id=LIFT,
            out=tmp_path / f"{workers}",
            quality="good",
            episodes=6,
            seed=2,
            picture=tmp_path / f"{workers}.png",
        )
        for workers in (1, 2)
    ]
    one, two = (
        make_scripted_dataset(request, ignore_progress, workers=int(request.out.name))[0]
        for request in requests
    )
    assert one.totals.episodes == 6
    assert one.checksum == two.checksum


@needs_robosuite
def test_given_noise_and_path_noise_replace_those_of_every_variant(tmp_path: Path) -> None:
    request = ScriptedDataRequest(
        env_id=LIFT,
        out=tmp_path / "set",
        quality="good",
        episodes=1,
        noise=0.0,
        path_noise=0.5,
        seed=2,
        picture=tmp_path / "roles.png",
    )
    store, _ = make_scripted_dataset(request, ignore_progress, workers=1)
    (variant,) = store.header.source["roles"]
    assert (variant["noise"], variant["strays"]) == (0.0, 0.5)
    (episode,) = store.episodes()
    assert set(episode.actions[:, 6].tolist()) <= {-1.0, 1.0}  # the gripper opens or closes


@dataclass(frozen=True)
class RoundsOfThree:
    """Three policies that share an initial state; they stop after 1, 2 and 3 steps."""

    episodes_per_round: int = 3

    def initial_state(self, number: int) -> int:
        return number // self.episodes_per_round

    def policy_of(self, number: int, rng: np.random.Generator) -> "ShortPolicy":
        return ShortPolicy(number % self.episodes_per_round + 1)


@dataclass
class ShortPolicy:
    left: int  # steps

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        self.left -= 1
        return np.zeros(1, np.float32)

    def stops(self) -> bool:
        return self.left == 0


@pytest.mark.parametrize(
    ("size", "lengths"),
    [
        ({"steps": 1}, [1, 2, 3]),
        ({"steps": 7}, [1, 2, 3, 1, 2, 3]),
        ({"episodes": 3}, [1, 2, 3]),
        ({"episodes": 4}, [1, 2, 3, 1, 2, 3]),
    ],
)
def test_a_collection_completes_its_last_round(size: dict[str, int], lengths: list[int]) -> None:
    episodes = list(collect("Pendulum-v1", RoundsOfThree(), seed=0, workers=1, **size))
    assert [len(episode) for episode in episodes] == lengths
    for one in episodes:
        assert (one.terminated, one.truncated) == (False, False)
    for first in range(0, len(episodes), 3):
        assert len({one.states[0].tobytes() for one in episodes[first : first + 3]}) == 1
    starts = len({one.states[0].tobytes() for one in episodes})
    assert starts == len(lengths) // 3


@needs_robosuite
def test_the_command_makes_a_pair_and_describes_it_in_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, m3pc: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    order = ["data", "make", "robosuite/CanLim", "--quality", "paired", "--episodes", "2"]
    done = m3pc(*order)
    assert done.code == 0, done.errors
    assert "place: 1 of 1 succeed" in done.out
    assert "throw: 0 of 1 succeed" in done.out
    assert (tmp_path / "canlim-paired-roles.png").read_bytes().startswith(b"\x89PNG")
    store = Store(tmp_path / "data" / "canlim-paired")
    header = store.header
    assert (header.states, header.actions, header.max_episode_steps) == (12, 7, 400)
    assert header.env == "robosuite/CanLim"
    source = header.source
    engine = source.pop("engine")
    assert engine.startswith("mujoco") and "robosuite 1.4" in engine
    assert [variant["name"] for variant in source.pop("roles")] == ["place", "throw"]
    assert source == {
        "kind": "made",
        "quality": "paired",
        "algorithm": "scripted",
        "share": 0.5,
        "same_starts": True,
        "seed": 0,
        "episodes": 2,
    }
    good, bad = store.episodes()
    assert (good.terminated, bad.terminated) == (True, False)


def test_a_regression_policy_returns_its_clipped_last_layer() -> None:
    """Hidden: relu(2 s0, -s1); action: their sum and their difference, clipped."""
    one = Linear(weight=np.array([[2, 0], [0, -1]], np.float32), bias=np.zeros(2, np.float32))
    top = Linear(weight=np.array([[1, 1], [1, -1]], np.float32), bias=np.zeros(2, np.float32))
    policy = RegressionPolicy(hidden=(one,), mean=top)
    assert policy.act(np.array([0.25, 1.0], np.float32), None).tolist() == [0.5, 0.5]
    assert policy.act(np.array([0.25, -2.0], np.float32), None).tolist() == [1.0, -1.0]
    swapped = AdaptedPolicy(policy=policy, columns=(1, 0), noise=0.1)
    assert swapped.act(np.array([1.0, 0.25], np.float32), None).tolist() == [0.5, 0.5]
    rng = np.random.default_rng(0)
    noisy = np.stack([swapped.act(np.array([1.0, 0.25], np.float32), rng) for _ in range(400)])
    assert noisy.std(axis=0) == pytest.approx([0.1, 0.1], rel=0.15)


@needs_robosuite
def test_an_order_of_observations_becomes_columns_of_the_state() -> None:
    order = ("object", "eef_pos", "eef_quat", "gripper_qpos")
    assert columns(LIFT, order) == (*range(9, 19), *range(9))
    with pytest.raises(InputError, match="expected eef_pos,eef_quat,gripper_qpos,object"):
        columns(LIFT, order[:3])
    with pytest.raises(InputError, match="not joined from observations"):
        columns("d4rl/Hopper-v2", order)


@pytest.mark.long
@needs_robosuite
def test_a_cloned_policy_is_rolled_out_where_its_order_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, m3pc: Command
) -> None:
    policy = str(shared_file("robomimic/bc_lift_ph.npz"))
    monkeypatch.chdir(tmp_path)
    order = ["data", "regenerate", policy, "out", "--steps", "60", "--env", LIFT]
    more = ["--order", "object,eef_pos,eef_quat,gripper_qpos", "--noise", "0.05"]
    done = m3pc(*order, *more)
    assert done.code == 0, done.errors
    store = Store(tmp_path / "out")
    assert store.episode_returns.tolist() == [1.0] * store.totals.episodes
    assert store.header.source["noise"] == 0.05
    assert store.header.source["order"] == ["object", "eef_pos", "eef_quat", "gripper_qpos"]
