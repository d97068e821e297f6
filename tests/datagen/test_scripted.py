"""Scripts: what they do in states made by hand, without a simulator."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from m3pc.datagen.policies.scripted import (
    BOX,
    CAN,
    CLOSE,
    CUBE,
    LIFT,
    OPEN,
    PAUSE_STEPS,
    PLACE,
    RELEASE_STEPS,
    SCHEDULES,
    STEPS_AFTER_FALL,
    ArmView,
    EpisodeTargets,
    ScriptSchedule,
    action,
    carry,
    fetch,
    lift,
)
from m3pc.types import Floats

AIM = EpisodeTargets(offset=np.zeros(3), target=np.array(BOX[0]), height=1.0)
SHOWN, HELD = 0.078, 0.045  # metres between open fingers, and between fingers that hold


def state(hand: tuple[float, ...], thing: tuple[float, ...], width: float = SHOWN) -> Floats:
    """[12] The hand points down."""
    down = (1.0, 0.0, 0.0, 0.0)
    return np.array([*hand, *down, width / 2, -width / 2, *thing], np.float32)


def view(hand: tuple[float, ...], thing: tuple[float, ...], width: float = SHOWN) -> ArmView:
    return ArmView.from_state(state(hand, thing, width))


def test_beside_the_object_the_hand_goes_above_it_and_opens() -> None:
    place, grip = fetch(view((0.2, 0.0, 1.0), (0.0, 0.0, 0.82)), CUBE, AIM)
    assert place == pytest.approx([0.0, 0.0, 0.9], abs=1e-6)
    assert grip == OPEN


def test_over_the_object_it_goes_down_and_at_it_it_closes() -> None:
    place, grip = fetch(view((0.0, 0.0, 0.9), (0.0, 0.0, 0.82)), CUBE, AIM)
    assert (place[2], grip) == (pytest.approx(0.82), OPEN)
    place, grip = fetch(view((0.0, 0.0, 0.825), (0.0, 0.0, 0.82)), CUBE, AIM)
    assert (place[2], grip) == (pytest.approx(0.82), CLOSE)


def test_fingers_that_close_go_on_where_open_ones_would_not_begin() -> None:
    beside = (0.016, 0.0, 0.82)
    assert fetch(view(beside, (0.0, 0.0, 0.82), SHOWN), CUBE, AIM)[1] == OPEN
    assert fetch(view(beside, (0.0, 0.0, 0.82), 0.07), CUBE, AIM)[1] == CLOSE


def test_a_held_object_is_lifted_and_a_dropped_one_is_fetched_again() -> None:
    place, grip = lift(view((0.0, 0.0, 0.82), (0.0, 0.0, 0.82), HELD), CUBE, AIM)
    assert (place[2], grip) == (pytest.approx(0.87), CLOSE)
    place, grip = lift(view((0.0, 0.0, 0.9), (0.0, 0.0, 0.82), HELD), CUBE, AIM)
    assert (place[2], grip) == (pytest.approx(0.82), OPEN)


def test_a_can_is_lifted_over_the_wall_before_it_moves_sideways() -> None:
    low, _ = carry(view((0.1, -0.2, 0.875), (0.1, -0.2, 0.86), HELD), CAN, AIM)
    assert low == pytest.approx([0.1, -0.2, 1.015], abs=1e-6)
    high, grip = carry(view((0.1, -0.2, 1.015), (0.1, -0.2, 1.0), HELD), CAN, AIM)
    assert high == pytest.approx([0.18, 0.37, 1.015], abs=1e-6)
    assert grip == CLOSE


def test_over_its_target_a_can_is_let_go() -> None:
    over = view((0.18, 0.36, 1.015), (0.18, 0.36, 1.0), HELD)
    assert carry(over, CAN, AIM)[1] == OPEN


def test_a_can_outside_the_bins_is_left_alone() -> None:
    outside = view((0.0, -0.5, 1.0), (0.0, -0.6, 0.5))
    place, grip = carry(outside, CAN, AIM)
    assert (place.tolist(), grip) == (outside.hand.tolist(), OPEN)


def test_an_action_of_one_asks_for_five_centimetres() -> None:
    here = view((0.0, 0.0, 1.0), (0.0, 0.0, 0.82))
    moved = action(here, (np.array([0.05, -0.025, 1.0]), CLOSE))
    assert moved == pytest.approx([1.0, -0.5, 0.0, 0.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_tilted_hand_is_turned_back(sign: int) -> None:
    """Half a turn about x points it down; a tenth of a radian more is a tenth to turn back."""
    half = (math.pi + 0.1) / 2
    tilted = state((0.0, 0.0, 1.0), (0.0, 0.0, 0.82))
    tilted[3:7] = sign * np.array([math.sin(half), 0.0, 0.0, math.cos(half)])
    assert ArmView.from_state(tilted).tilt == pytest.approx([-0.1, 0.0, 0.0], abs=1e-6)


def policy(**changes: Any) -> Any:
    """The script that lifts, changed."""
    schedule = ScriptSchedule(task=CUBE, variants=(replace(LIFT, **changes),))
    return schedule.policy_of(0, np.random.default_rng(0))


def test_noise_is_part_of_the_action_and_the_action_within_its_bounds() -> None:
    there = state((0.0, 0.0, 0.825), (0.0, 0.0, 0.82))
    calm, wild = policy(noise=0.0), policy(noise=2.0)
    rng = np.random.default_rng(1)
    assert calm.act(there, rng).tolist() == policy(noise=2.0).act(there, None).tolist()
    drawn = np.stack([wild.act(there, rng) for _ in range(200)])
    assert np.abs(drawn).max() == 1.0
    assert drawn[:, 0].std() > 0.5


def test_the_maximum_displacement_bounds_displacements_and_nothing_else() -> None:
    away = state((0.2, 0.0, 1.0), (0.0, 0.0, 0.82))
    fast, slow = (
        policy(noise=0.0, max_displacement=limit).act(away, None) for limit in (1.0, 0.25)
    )
    assert fast.tolist() == [-1.0, 0.0, -1.0, 0.0, 0.0, 0.0, OPEN]
    assert slow.tolist() == [-0.25, 0.0, -0.25, 0.0, 0.0, 0.0, OPEN]


def test_a_pause_and_an_early_opening_last_for_some_steps() -> None:
    away = state((0.2, 0.0, 1.0), (0.0, 0.0, 0.82))
    rng = np.random.default_rng(0)
    slow = policy(noise=0.0, pause_probability=1.0)
    assert slow.act(away, rng)[:6].tolist() == [0.0] * 6
    slow.variant = replace(slow.variant, pause_probability=0.0)
    paused = [not slow.act(away, rng)[:6].any() for _ in range(PAUSE_STEPS)]
    assert paused == [True] * (PAUSE_STEPS - 1) + [False]

    held = state((0.0, 0.0, 0.82), (0.0, 0.0, 0.82), HELD)
    loose = policy(noise=0.0, release_probability=1.0)
    assert loose.act(held, rng)[6] == OPEN
    loose.variant = replace(loose.variant, release_probability=0.0)
    assert [loose.act(held, rng)[6] for _ in range(RELEASE_STEPS)] == [OPEN] * (
        RELEASE_STEPS - 1
    ) + [CLOSE]


def test_path_noise_is_slow_and_proportional_to_the_displacement() -> None:
    away, near = (state((x, 0.0, 1.0), (0.0, 0.0, 0.92)) for x in (0.2, 0.002))

    def pushed(where: Floats, seed: int) -> Any:
        """[200, 3] The push on the hand, relative to its displacement; small enough not to clip."""
        rng = np.random.default_rng(seed)
        calm, noisy = (
            policy(noise=0.0, max_displacement=0.25, path_noise=noise) for noise in (0.0, 0.5)
        )
        pushes = [noisy.act(where, rng) - calm.act(where, None) for _ in range(200)]
        assert not np.any(np.stack(pushes)[:, 3:])
        return np.stack(pushes)[:, :3] / np.abs(calm.act(where, None)[:3]).max()

    far = np.concatenate([pushed(away, seed) for seed in range(20)])
    assert far.std() == pytest.approx(0.5, rel=0.1)
    assert pushed(near, 0) == pytest.approx(pushed(away, 0), abs=1e-5)
    pushes = pushed(away, 0)
    correlation = np.corrcoef(pushes[:-1].ravel(), pushes[1:].ravel())[0, 1]
    assert 0.8 < correlation < 0.95


def test_a_policy_stops_at_its_step_limit_or_after_the_object_fell() -> None:
    unlimited, limited = policy(max_steps=None), policy(max_steps=3)
    there, fallen = (state((0.0, 0.0, 1.0), (0.0, 0.0, height)) for height in (0.82, 0.5))
    for _ in range(3):
        assert not limited.stops()
        for one in (unlimited, limited):
            one.act(there, None)
    assert (unlimited.stops(), limited.stops()) == (False, True)
    for _ in range(STEPS_AFTER_FALL):
        assert not unlimited.stops()
        unlimited.act(fallen, None)
    assert unlimited.stops()


def test_variants_take_turns_and_those_of_a_pair_share_their_initial_state() -> None:
    noisy, paired = SCHEDULES["robosuite/Lift"]["noisy"], SCHEDULES["robosuite/CanLim"]["paired"]
    assert [noisy.initial_state(number) for number in range(4)] == [0, 1, 2, 3]
    assert [paired.variant(number).name for number in range(4)] == ["place", "throw"] * 2
    assert [paired.initial_state(number) for number in range(6)] == [0, 0, 1, 1, 2, 2]
    assert (noisy.episodes_per_round, paired.episodes_per_round) == (1, 2)


def test_a_headers_metadata_has_the_settings_that_differ_from_the_defaults() -> None:
    assert replace(PLACE, name="short", noise=0.2, aim_error=(-0.03, 0.0, 0.0)).metadata() == {
        "name": "short",
        "noise": 0.2,
        "targets": BOX,
        "astray": (-0.03, 0.0, 0.0),
    }
    assert PLACE.metadata() == {"name": "place", "noise": 0.1, "targets": BOX}


def test_scripts_load_no_torch() -> None:
    code = "import sys; import m3pc.datagen.from_scripts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
