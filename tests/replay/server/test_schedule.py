"""Owed updates are integers."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3pc.config.schema import OnlineConfig
from m3pc.types import InputError
from replay.server.sample_ratio import SampleInsertRatio
from replay.server.schedule import UpdateSchedule, schedule_of


def schedule(
    per_step: float, per_episode: int, *, slack: int = 0, limit: int = 100
) -> UpdateSchedule:
    return UpdateSchedule(
        updates_per_step=per_step,
        updates_per_episode=per_episode,
        max_episode_steps=limit,
        slack=slack,
    )


@pytest.mark.parametrize(
    ("per_step", "per_episode", "units", "update"),
    [
        (0.2, 0, 7, 5),  # a step is a unit, five of them an update
        (0.2, 200, 7 + 1000, 5),
        (1.0, 0, 7, 1),
        (0.0, 200, 200, 1),
        (0.75, 1, 21 + 4, 4),
        (20.0, 0, 140, 1),
    ],
)
def test_an_episode_of_seven_steps(
    per_step: float, per_episode: int, units: int, update: int
) -> None:
    updates = schedule(per_step, per_episode)
    assert updates.units(7) == units
    assert updates.limits().samples_per_insert == Fraction(1, update)


@given(
    st.fractions(0, 1000, max_denominator=1000),
    st.integers(0, 1000),
    st.lists(st.integers(1, 100), min_size=1),
)
def test_owed_updates_add_up_exactly(
    per_step: Fraction, per_episode: int, lengths: list[int]
) -> None:
    if not per_step + per_episode:
        return
    updates = schedule(float(per_step), per_episode)
    one_by_one = sum(map(updates.units, lengths))
    assert one_by_one == updates.units(sum(lengths), len(lengths))
    owed = one_by_one * updates.limits().samples_per_insert
    assert owed == sum(lengths) * per_step + len(lengths) * per_episode


def test_slack_is_in_steps_and_lets_collecting_run_ahead() -> None:
    narrow, wide = schedule(0.2, 0).limits(), schedule(0.2, 0, slack=50).limits()
    assert [narrow.min_diff, narrow.max_diff] == [0, 21]
    assert [wide.min_diff, wide.max_diff] == [0, 31]


def test_a_rate_below_one_update_an_episode_leaves_room_for_an_update() -> None:
    limits = schedule(0.001, 0).limits()  # a tenth of an update an episode
    assert [limits.min_diff, limits.max_diff] == [0, Fraction(11, 10)]


def test_the_learner_is_never_ahead_of_what_is_owed() -> None:
    limits = schedule(0.2, 0, slack=50).limits()
    allowed = [SampleInsertRatio(limits, inserts=steps).max_samples for steps in (0, 4, 5, 1004)]
    assert allowed == [0, 0, 1, 200]


def test_owed_updates_are_those_of_steps_and_of_episodes_rounded_down() -> None:
    assert [schedule(0.2, 0).owed(steps, 1) for steps in (0, 4, 5, 1004)] == [0, 0, 1, 200]
    assert schedule(0.0, 200).owed(999, 3) == 600


@pytest.mark.parametrize(("per_step", "per_episode"), [(0.0, 0), (1e-9, 0)])
def test_a_schedule_without_updates_is_refused(per_step: float, per_episode: int) -> None:
    with pytest.raises(InputError, match="at least one of them above 0"):
        schedule(per_step, per_episode)


def test_a_schedule_comes_from_the_settings_of_a_run() -> None:
    online = OnlineConfig(updates_per_step=0.5, updates_per_episode=3, slack=20)
    assert schedule_of(online, 100) == schedule(0.5, 3, slack=20)
