"""A robot's episode in the server: which steps are taken, what is kept of it."""

import numpy as np
import pytest

from m3pc.serving.sessions import (
    ConflictError,
    NoRoomError,
    Session,
    SessionConfig,
    Sessions,
    Sizes,
    StepAnswer,
    UnknownSessionError,
)
from m3pc.types import Decision, Floats, InputError
from tests.support.runs.refusals import sentence

SIZES = Sizes(window=8, horizon=4, states=2, actions=1)
TERMS = SessionConfig(step_limit=5, deadline=0.05, seed=3)


def state(step: int) -> Floats:
    return np.asarray([step, -step], np.float32)


def answer(step: int, *, version: int = 7, utility: float = 0.5) -> StepAnswer:
    def row(value: float) -> Floats:
        return np.asarray([value], np.float32)

    decision = Decision(
        actions=np.asarray([[step / 10]], np.float32),
        target_returns=row(100.0 + step),
        utilities=row(utility),
        effective_candidates=row(2.0),
        utility_std=row(1.0),
        version=version,
    )
    return StepAnswer(
        decision=decision, candidates=8, hurried=False, seconds=0.01, deadline=0.05, late=False
    )


def session(*, keep: bool = True, terms: SessionConfig = TERMS) -> Session:
    return Session(terms, SIZES, keep=keep)


def walk(found: Session, steps: int, *, utility: float = 0.5) -> Session:
    """Step k brings a reward of k."""
    for step in range(steps):
        found.observe(step, state(step), step - 1.0 if step else None)
        found.answered(answer(step, version=7 + step, utility=utility))
    return found


def test_a_question_holds_what_was_seen_and_done() -> None:
    found = walk(session(), 2)
    found.observe(2, state(2), 1.0)
    window = found.ask().window
    assert window.states[0, :4].tolist() == [[0, 0], [1, -1], [2, -2], [0, 0]]
    np.testing.assert_allclose(window.actions[0, :3, 0], [0, 0.1, 0])
    assert (window.now[0], window.steps[0], window.seeds[0]) == (2, 2, 3)


def test_a_step_that_is_repeated_changes_nothing() -> None:
    found = walk(session(), 2)
    before, total = found.answer, found.total
    found.observe(1, state(1), 0.0)
    assert (found.answer, found.total, found.steps) == (before, total, 2)
    assert len(found.abandoned() or []) == 1


def test_a_step_without_an_answer_may_be_asked_again() -> None:
    found = walk(session(), 1)
    found.observe(1, state(1), 0.0)
    assert (found.answer, found.steps) == (None, 1)
    found.observe(1, state(1), 0.0)
    found.answered(answer(1))
    assert found.steps == 2


@pytest.mark.parametrize(
    ("step", "reward", "words"),
    [
        (3, 1.0, "step 3 was sent, expected 2, or 1 again"),
        (0, None, "step 0 was sent, expected 2"),
        (1, 5.0, "step 1 was sent before with another observation or reward"),
    ],
)
def test_any_other_step_is_refused_and_says_which_is_next(
    step: int, reward: float | None, words: str
) -> None:
    found = walk(session(), 2)
    with pytest.raises(ConflictError) as refused:
        found.observe(step, state(step), reward)
    assert words in sentence(refused) and refused.value.expected == 2
    assert found.steps == 2


def test_a_step_that_is_repeated_with_other_numbers_is_refused() -> None:
    found = walk(session(), 2)
    with pytest.raises(ConflictError, match="another observation"):
        found.observe(1, state(8), 0.0)


def test_the_next_step_waits_for_an_answer() -> None:
    found = walk(session(), 1)
    found.observe(1, state(1), 0.0)
    with pytest.raises(ConflictError, match="expected 1: ") as refused:
        found.observe(2, state(2), 0.0)
    assert refused.value.expected == 1
    with pytest.raises(ConflictError):
        found.end(2, state(2), 0.0, terminated=True, truncated=False)


def test_an_episode_has_no_more_steps_than_its_limit() -> None:
    found = walk(session(), 5)
    with pytest.raises(ConflictError, match="has its 5 steps"):
        found.observe(5, state(5), 4.0)
    whole = found.end(5, state(5), 4.0, terminated=False, truncated=True).episode
    assert whole is not None and len(whole) == 5


def test_an_episode_that_ended_is_kept_whole() -> None:
    found = walk(session(), 3)
    ending = found.end(3, state(3), 2.0, terminated=True, truncated=False)
    episode = ending.episode
    assert episode is not None
    assert (ending.steps, ending.total) == (3, 0 + 1 + 2)
    assert episode.states.tolist() == [[0, 0], [1, -1], [2, -2], [3, -3]]
    np.testing.assert_allclose(episode.actions[:, 0], [0, 0.1, 0.2])
    assert episode.rewards.tolist() == [0, 1, 2]
    assert (episode.terminated, episode.truncated, episode.seed) == (True, False, 3)
    assert (episode.version, episode.last_version) == (7, 9)
    assert (episode.target_return, episode.utility) == (100.0, 0.5)


def test_an_end_may_be_asked_for_again() -> None:
    found = walk(session(), 3)
    one, other = (found.end(3, state(3), 2.0, terminated=True, truncated=False) for _ in range(2))
    assert one.episode is not None and other.episode is not None
    assert one.total == other.total
    assert one.episode.states.tolist() == other.episode.states.tolist()
    assert one.episode.rewards.tolist() == other.episode.rewards.tolist()


def test_an_episode_that_nobody_ended_goes_as_far_as_is_known() -> None:
    """Of the last step nobody told what it led to."""
    episode = walk(session(), 4).abandoned()
    assert episode is not None and len(episode) == 3
    assert episode.states[-1].tolist() == [3, -3]
    assert episode.rewards.tolist() == [0, 1, 2]
    assert not episode.terminated and not episode.truncated
    assert walk(session(), 1).abandoned() is None
    assert session().abandoned() is None


def test_steps_without_a_plan_do_not_spoil_the_mean_utility() -> None:
    found = walk(session(), 1, utility=float("nan"))
    found.observe(1, state(1), 0.0)
    found.answered(answer(1, utility=4.0))
    episode = found.end(2, state(2), 0.0, terminated=True, truncated=False).episode
    assert episode is not None and episode.utility == 4.0


def test_where_episodes_are_kept_every_step_needs_a_reward() -> None:
    found = walk(session(), 1)
    with pytest.raises(InputError, match="reward is missing"):
        found.observe(1, state(1), None)
    with pytest.raises(InputError, match="reward is missing"):
        found.end(1, state(1), None, terminated=True, truncated=False)
    assert found.steps == 1
    walk(found := session(keep=False), 1)
    found.observe(1, state(1), None)


def test_nothing_was_earned_before_the_first_step() -> None:
    with pytest.raises(InputError, match="before anything was done"):
        session().observe(0, state(0), 1.0)


def test_what_was_really_done_is_kept_and_planned_from() -> None:
    found = walk(session(), 1)
    found.observe(1, state(1), 0.0, np.asarray([0.9], np.float32))
    assert found.ask().window.actions[0, 0, 0] == np.float32(0.9)
    with pytest.raises(ConflictError, match="another observation"):
        found.observe(1, state(1), 0.0, np.asarray([0.8], np.float32))
    found.answered(answer(1))
    last = np.asarray([-0.9], np.float32)
    episode = found.end(2, state(2), 1.0, last, terminated=True, truncated=False).episode
    assert episode is not None
    np.testing.assert_allclose(episode.actions[:, 0], [0.9, -0.9])
    with pytest.raises(ConflictError, match="action is given at step 0"):
        session().observe(0, state(0), None, last)


@pytest.mark.parametrize("steps", [0, 1, 7], ids=["first", "second", "beyond a window"])
def test_a_step_at_which_nothing_was_decided_may_be_told_anew(steps: int) -> None:
    """It is then as if the first trial had not been."""
    terms = SessionConfig(step_limit=20, deadline=0.05)
    tried, plain = (walk(session(terms=terms), steps) for _ in range(2))
    reward, action = (2.0, np.asarray([0.7], np.float32)) if steps else (None, None)
    tried.observe(steps, state(99), 5.0 if steps else None)
    with pytest.raises(ConflictError, match="another observation"):
        tried.observe(steps, state(8), reward, action)
    tried.failed()
    for found in (tried, plain):
        found.observe(steps, state(8), reward, action)
        found.answered(answer(steps))
        found.observe(steps + 1, state(9), 1.0)
    one, other = tried.ask().window, plain.ask().window
    assert one.states.tolist() == other.states.tolist()
    assert one.actions.tolist() == other.actions.tolist()
    assert tried.total == plain.total
    kept = [found.abandoned() for found in (tried, plain)]
    assert kept[0] is not None and kept[1] is not None
    for name in ("states", "actions", "rewards"):
        assert getattr(kept[0], name).tolist() == getattr(kept[1], name).tolist()


def test_an_episode_may_end_where_nothing_was_decided() -> None:
    found = walk(session(), 2)
    found.observe(2, state(2), 5.0)
    found.failed()
    ending = found.end(2, state(3), 1.0, terminated=True, truncated=False)
    assert (ending.steps, ending.total) == (2, 0 + 1)
    assert ending.episode is not None
    assert ending.episode.states.tolist() == [[0, 0], [1, -1], [3, -3]]


def test_of_a_target_that_is_asked_for_which_is_still_to_come() -> None:
    found = session(keep=False, terms=SessionConfig(step_limit=5, deadline=1.0, target=10.0))
    walk(found, 3)
    assert found.ask().target_remaining == 10 - (0 + 1)
    found.observe(3, state(3), 4.0)
    assert found.ask().target_remaining == 10 - (0 + 1 + 4)
    found.answered(answer(3))
    with pytest.raises(ConflictError, match="reward is missing; a target was given"):
        found.observe(4, state(4), None)


def test_waypoints_lie_ahead_in_the_window() -> None:
    table = np.asarray([[k, k] for k in range(20)], np.float32)
    found = session(terms=SessionConfig(step_limit=5, deadline=1.0, mode="goal", waypoints=table))
    found.observe(0, state(0), None)
    ask = found.ask()
    assert ask.mode == "goal"
    assert ask.window.states[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


# Several


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_there_are_only_so_many_and_a_place_that_is_left_is_free() -> None:
    found = Sessions(SIZES, most=2, idle=10.0, keep=False)
    first, _ = found.open(TERMS), found.open(TERMS)
    with pytest.raises(NoRoomError, match="2 sessions are open"):
        found.open(TERMS)
    found.remove(first)
    assert found.open(TERMS).id != first.id and len(found) == 2


def test_a_session_that_is_not_there_is_unknown() -> None:
    found = Sessions(SIZES, most=2, idle=10.0, keep=False)
    gone = found.open(TERMS)
    found.remove(gone)
    for id in (gone.id, "", "../etc"):
        with pytest.raises(UnknownSessionError, match="no such session"):
            found.find(id)


def test_sessions_expire_when_they_were_idle_for_too_long() -> None:
    clock = Clock()
    found = Sessions(SIZES, most=3, idle=10.0, keep=False, clock=clock)
    idle, used = found.open(TERMS), found.open(TERMS)
    clock.now = 6.0
    found.find(used.id)
    clock.now = 9.9
    assert found.expired() == []
    clock.now = 10.0
    assert found.expired() == [idle]


def test_a_robot_is_found_by_its_name() -> None:
    found = Sessions(SIZES, most=3, idle=10.0, keep=False)
    found.open(TERMS)
    named = found.open(SessionConfig(step_limit=5, deadline=1.0, name="arm"))
    assert found.named("arm") is named and found.named("leg") is None
