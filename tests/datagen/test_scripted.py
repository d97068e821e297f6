"""Scripts: what they do in states made by hand, without a simulator."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from m3pc.datagen.policies.scripted import (
    AFTER_FALL,
    BOX,
    CAN,
    CASTS,
    CLOSE,
    CUBE,
    LIFT,
    LOOSE,
    OPEN,
    PLACE,
    STILL,
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
    return ArmView.of(state(hand, thing, width))


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


def test_what_is_held_is_lifted_and_what_was_dropped_is_fetched_again() -> None:
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
    found = action(here, (np.array([0.05, -0.025, 1.0]), CLOSE))
    assert found == pytest.approx([1.0, -0.5, 0.0, 0.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_tilted_hand_is_turned_back(sign: int) -> None:
    """Half a turn about x points it down; a tenth of a radian more is a tenth to turn back."""
    half = (math.pi + 0.1) / 2
    tilted = state((0.0, 0.0, 1.0), (0.0, 0.0, 0.82))
    tilted[3:7] = sign * np.array([math.sin(half), 0.0, 0.0, math.cos(half)])
    assert ArmView.of(tilted).tilt == pytest.approx([-0.1, 0.0, 0.0], abs=1e-6)


def player(role: Any = LIFT, **changes: Any) -> Any:
    cast = ScriptSchedule(task=CUBE, roles=(replace(role, **changes),))
    return cast.player(0, np.random.default_rng(0))


def test_noise_is_part_of_the_action_and_the_action_within_its_bounds() -> None:
    there = state((0.0, 0.0, 0.825), (0.0, 0.0, 0.82))
    calm, wild = player(noise=0.0), player(noise=2.0)
    rng = np.random.default_rng(1)
    assert calm.act(there, rng).tolist() == player(noise=2.0).act(there, None).tolist()
    drawn = np.stack([wild.act(there, rng) for _ in range(200)])
    assert np.abs(drawn).max() == 1.0
    assert drawn[:, 0].std() > 0.5


def test_a_pace_bounds_displacements_and_nothing_else() -> None:
    away = state((0.2, 0.0, 1.0), (0.0, 0.0, 0.82))
    fast, slow = (player(noise=0.0, pace=pace).act(away, None) for pace in (1.0, 0.25))
    assert fast.tolist() == [-1.0, 0.0, -1.0, 0.0, 0.0, 0.0, OPEN]
    assert slow.tolist() == [-0.25, 0.0, -0.25, 0.0, 0.0, 0.0, OPEN]


def test_who_hesitates_holds_still_and_who_lets_go_opens_for_some_steps() -> None:
    away = state((0.2, 0.0, 1.0), (0.0, 0.0, 0.82))
    rng = np.random.default_rng(0)
    slow = player(noise=0.0, hesitates=1.0)
    assert slow.act(away, rng)[:6].tolist() == [0.0] * 6
    slow.role = replace(slow.role, hesitates=0.0)
    rested = [not slow.act(away, rng)[:6].any() for _ in range(STILL)]
    assert rested == [True] * (STILL - 1) + [False]

    held = state((0.0, 0.0, 0.82), (0.0, 0.0, 0.82), HELD)
    loose = player(noise=0.0, lets_go=1.0)
    assert loose.act(held, rng)[6] == OPEN
    loose.role = replace(loose.role, lets_go=0.0)
    assert [loose.act(held, rng)[6] for _ in range(LOOSE)] == [OPEN] * (LOOSE - 1) + [CLOSE]


def test_who_strays_is_pushed_the_further_the_faster_it_moves_and_for_a_while() -> None:
    away, near = (state((x, 0.0, 1.0), (0.0, 0.0, 0.92)) for x in (0.2, 0.002))

    def pushed(where: Floats, seed: int) -> Any:
        """[200, 3] What is added to the hand's displacement, in which nothing is cut."""
        rng = np.random.default_rng(seed)
        calm, straying = (player(noise=0.0, pace=0.25, strays=strays) for strays in (0.0, 0.5))
        acted = [straying.act(where, rng) - calm.act(where, None) for _ in range(200)]
        assert not np.any(np.stack(acted)[:, 3:])
        return np.stack(acted)[:, :3] / np.abs(calm.act(where, None)[:3]).max()

    far = np.concatenate([pushed(away, seed) for seed in range(20)])
    assert far.std() == pytest.approx(0.5, rel=0.1)
    assert pushed(near, 0) == pytest.approx(pushed(away, 0), abs=1e-5)
    alone = pushed(away, 0)
    together = np.corrcoef(alone[:-1].ravel(), alone[1:].ravel())[0, 1]
    assert 0.8 < together < 0.95


def test_a_player_stops_when_it_loses_patience_or_the_object() -> None:
    patient, impatient = player(patience=None), player(patience=3)
    there, fallen = (state((0.0, 0.0, 1.0), (0.0, 0.0, height)) for height in (0.82, 0.5))
    for _ in range(3):
        assert not impatient.stops()
        for one in (patient, impatient):
            one.act(there, None)
    assert (patient.stops(), impatient.stops()) == (False, True)
    for _ in range(AFTER_FALL):
        assert not patient.stops()
        patient.act(fallen, None)
    assert patient.stops()


def test_roles_take_turns_and_those_of_a_pair_share_their_start() -> None:
    noisy, paired = CASTS["robosuite/Lift"]["noisy"], CASTS["robosuite/CanLim"]["paired"]
    assert [noisy.start(number) for number in range(4)] == [0, 1, 2, 3]
    assert [paired.role(number).name for number in range(4)] == ["place", "throw"] * 2
    assert [paired.start(number) for number in range(6)] == [0, 0, 1, 1, 2, 2]
    assert (noisy.round, paired.round) == (1, 2)


def test_a_role_says_what_makes_it_what_it_is() -> None:
    assert replace(PLACE, name="short", noise=0.2, astray=(-0.03, 0.0, 0.0)).numbers() == {
        "name": "short",
        "noise": 0.2,
        "targets": BOX,
        "astray": (-0.03, 0.0, 0.0),
    }
    assert PLACE.numbers() == {"name": "place", "noise": 0.1, "targets": BOX}


def test_playing_by_script_loads_no_torch() -> None:
    code = "import sys; import m3pc.datagen.from_scripts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
