"""One session: which steps are accepted, and what is recorded of the episode."""

import numpy as np
import pytest

from m3pc.serving.sessions import (
    Session,
    SessionConfig,
    SessionLimitError,
    Sessions,
    Sizes,
    StepConflictError,
    UnknownSessionError,
)
from m3pc.types import Floats, InputError
from tests.support.runs.refusals import sentence
from tests.support.servers.served import Clock, step_answer

SIZES = Sizes(window=8, horizon=4, states=2, actions=1)
CONFIG = SessionConfig(step_limit=5, deadline=0.05, seed=3)


def state(step: int) -> Floats:
    return np.asarray([step, -step], np.float32)


def new_session(*, record: bool = True, config: SessionConfig = CONFIG) -> Session:
    return Session(config, SIZES, record=record)


def walk(session: Session, steps: int, *, utility: float = 0.5) -> Session:
    """Step k brings a reward of k."""
    for step in range(steps):
        session.observe(step, state(step), step - 1.0 if step else None)
        session.record_answer(step_answer(step, version=7 + step, utility=utility))
    return session


def test_a_plan_request_holds_the_states_and_actions_so_far() -> None:
    session = walk(new_session(), 2)
    session.observe(2, state(2), 1.0)
    window = session.plan_request().window
    assert window.states[0, :4].tolist() == [[0, 0], [1, -1], [2, -2], [0, 0]]
    np.testing.assert_allclose(window.actions[0, :3, 0], [0, 0.1, 0])
    assert (window.now[0], window.steps[0], window.seeds[0]) == (2, 2, 3)


def test_a_repeated_step_changes_nothing() -> None:
    session = walk(new_session(), 2)
    before, total = session.answer, session.total_reward
    session.observe(1, state(1), 0.0)
    assert (session.answer, session.total_reward, session.steps) == (before, total, 2)
    assert len(session.partial_episode() or []) == 1


def test_a_step_without_an_answer_may_be_repeated() -> None:
    session = walk(new_session(), 1)
    session.observe(1, state(1), 0.0)
    assert (session.answer, session.steps) == (None, 1)
    session.observe(1, state(1), 0.0)
    session.record_answer(step_answer(1))
    assert session.steps == 2


@pytest.mark.parametrize(
    ("step", "reward", "words"),
    [
        (3, 1.0, "step 3 was sent, expected 2, or 1 again"),
        (0, None, "step 0 was sent, expected 2"),
        (1, 5.0, "step 1 was sent before with another observation or reward"),
    ],
)
def test_any_other_step_is_refused_with_the_expected_one(
    step: int, reward: float | None, words: str
) -> None:
    session = walk(new_session(), 2)
    with pytest.raises(StepConflictError) as refused:
        session.observe(step, state(step), reward)
    assert words in sentence(refused) and refused.value.expected == 2
    assert session.steps == 2


def test_a_step_repeated_with_other_numbers_is_refused() -> None:
    session = walk(new_session(), 2)
    with pytest.raises(StepConflictError, match="another observation"):
        session.observe(1, state(8), 0.0)


def test_the_next_step_waits_for_an_step_answer() -> None:
    session = walk(new_session(), 1)
    session.observe(1, state(1), 0.0)
    with pytest.raises(StepConflictError, match="expected 1: ") as refused:
        session.observe(2, state(2), 0.0)
    assert refused.value.expected == 1
    with pytest.raises(StepConflictError):
        session.episode_end(2, state(2), 0.0, terminated=True, truncated=False)


def test_an_episode_has_no_more_steps_than_its_limit() -> None:
    session = walk(new_session(), 5)
    with pytest.raises(StepConflictError, match="has its 5 steps"):
        session.observe(5, state(5), 4.0)
    episode = session.episode_end(5, state(5), 4.0, terminated=False, truncated=True).episode
    assert episode is not None and len(episode) == 5


def test_an_ended_episode_is_recorded_completely() -> None:
    session = walk(new_session(), 3)
    ending = session.episode_end(3, state(3), 2.0, terminated=True, truncated=False)
    episode = ending.episode
    assert episode is not None
    assert (ending.steps, ending.total_reward) == (3, 0 + 1 + 2)
    assert episode.states.tolist() == [[0, 0], [1, -1], [2, -2], [3, -3]]
    np.testing.assert_allclose(episode.actions[:, 0], [0, 0.1, 0.2])
    assert episode.rewards.tolist() == [0, 1, 2]
    assert (episode.terminated, episode.truncated, episode.seed) == (True, False, 3)
    assert (episode.version, episode.last_version) == (7, 9)
    assert (episode.target_return, episode.utility) == (100.0, 0.5)


def test_an_end_may_be_repeated() -> None:
    session = walk(new_session(), 3)
    first, again = (
        session.episode_end(3, state(3), 2.0, terminated=True, truncated=False) for _ in range(2)
    )
    assert first.episode is not None and again.episode is not None
    assert first.total_reward == again.total_reward
    assert first.episode.states.tolist() == again.episode.states.tolist()
    assert first.episode.rewards.tolist() == again.episode.rewards.tolist()


def test_an_episode_without_an_end_goes_as_far_as_is_known() -> None:
    """The outcome of the last step is unknown."""
    episode = walk(new_session(), 4).partial_episode()
    assert episode is not None and len(episode) == 3
    assert episode.states[-1].tolist() == [3, -3]
    assert episode.rewards.tolist() == [0, 1, 2]
    assert not episode.terminated and not episode.truncated
    assert walk(new_session(), 1).partial_episode() is None
    assert new_session().partial_episode() is None


def test_steps_without_a_plan_do_not_spoil_the_mean_utility() -> None:
    session = walk(new_session(), 1, utility=float("nan"))
    session.observe(1, state(1), 0.0)
    session.record_answer(step_answer(1, utility=4.0))
    episode = session.episode_end(2, state(2), 0.0, terminated=True, truncated=False).episode
    assert episode is not None and episode.utility == 4.0


def test_recorded_episodes_need_a_reward_at_every_step() -> None:
    session = walk(new_session(), 1)
    with pytest.raises(InputError, match="reward is missing"):
        session.observe(1, state(1), None)
    with pytest.raises(InputError, match="reward is missing"):
        session.episode_end(1, state(1), None, terminated=True, truncated=False)
    assert session.steps == 1
    session = walk(new_session(record=False), 1)
    session.observe(1, state(1), None)


def test_step_0_has_no_reward() -> None:
    with pytest.raises(InputError, match="no previous step"):
        new_session().observe(0, state(0), 1.0)


def test_the_executed_action_is_recorded_and_planned_from() -> None:
    session = walk(new_session(), 1)
    session.observe(1, state(1), 0.0, np.asarray([0.9], np.float32))
    assert session.plan_request().window.actions[0, 0, 0] == np.float32(0.9)
    with pytest.raises(StepConflictError, match="another observation"):
        session.observe(1, state(1), 0.0, np.asarray([0.8], np.float32))
    session.record_answer(step_answer(1))
    last = np.asarray([-0.9], np.float32)
    episode = session.episode_end(2, state(2), 1.0, last, terminated=True, truncated=False).episode
    assert episode is not None
    np.testing.assert_allclose(episode.actions[:, 0], [0.9, -0.9])
    with pytest.raises(StepConflictError, match="action is given at step 0"):
        new_session().observe(0, state(0), None, last)


@pytest.mark.parametrize("steps", [0, 1, 7], ids=["first", "second", "beyond a window"])
def test_a_step_without_a_decision_may_be_sent_anew(steps: int) -> None:
    """As if it had not been sent before."""
    config = SessionConfig(step_limit=20, deadline=0.05)
    tried, plain = (walk(new_session(config=config), steps) for _ in range(2))
    reward, action = (2.0, np.asarray([0.7], np.float32)) if steps else (None, None)
    tried.observe(steps, state(99), 5.0 if steps else None)
    with pytest.raises(StepConflictError, match="another observation"):
        tried.observe(steps, state(8), reward, action)
    tried.record_failure()
    for session in (tried, plain):
        session.observe(steps, state(8), reward, action)
        session.record_answer(step_answer(steps))
        session.observe(steps + 1, state(9), 1.0)
    windows = [session.plan_request().window for session in (tried, plain)]
    assert windows[0].states.tolist() == windows[1].states.tolist()
    assert windows[0].actions.tolist() == windows[1].actions.tolist()
    assert tried.total_reward == plain.total_reward
    episodes = [session.partial_episode() for session in (tried, plain)]
    assert episodes[0] is not None and episodes[1] is not None
    for name in ("states", "actions", "rewards"):
        assert getattr(episodes[0], name).tolist() == getattr(episodes[1], name).tolist()


def test_an_episode_may_end_at_a_step_without_a_decision() -> None:
    session = walk(new_session(), 2)
    session.observe(2, state(2), 5.0)
    session.record_failure()
    ending = session.episode_end(2, state(3), 1.0, terminated=True, truncated=False)
    assert (ending.steps, ending.total_reward) == (2, 0 + 1)
    assert ending.episode is not None
    assert ending.episode.states.tolist() == [[0, 0], [1, -1], [3, -3]]


def test_the_remaining_target_shrinks_by_the_rewards() -> None:
    session = new_session(
        record=False, config=SessionConfig(step_limit=5, deadline=1.0, target=10.0)
    )
    walk(session, 3)
    assert session.plan_request().target_remaining == 10 - (0 + 1)
    session.observe(3, state(3), 4.0)
    assert session.plan_request().target_remaining == 10 - (0 + 1 + 4)
    session.record_answer(step_answer(3))
    with pytest.raises(StepConflictError, match="reward is missing; a target was given"):
        session.observe(4, state(4), None)


def test_waypoints_lie_ahead_in_the_window() -> None:
    table = np.asarray([[k, k] for k in range(20)], np.float32)
    session = new_session(
        config=SessionConfig(step_limit=5, deadline=1.0, mode="goal", waypoints=table)
    )
    session.observe(0, state(0), None)
    request = session.plan_request()
    assert request.mode == "goal"
    assert request.window.states[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


# Several sessions


def test_the_number_of_sessions_is_limited() -> None:
    sessions = Sessions(SIZES, max_sessions=2, idle_seconds=10.0, record=False)
    first, _ = sessions.open(CONFIG), sessions.open(CONFIG)
    with pytest.raises(SessionLimitError, match="2 sessions are open"):
        sessions.open(CONFIG)
    sessions.remove(first)
    assert sessions.open(CONFIG).id != first.id and len(sessions) == 2


def test_a_removed_session_is_unknown() -> None:
    sessions = Sessions(SIZES, max_sessions=2, idle_seconds=10.0, record=False)
    gone = sessions.open(CONFIG)
    sessions.remove(gone)
    for id in (gone.id, "", "../etc"):
        with pytest.raises(UnknownSessionError, match="no such session"):
            sessions.find(id)


def test_sessions_expire_when_idle_for_too_long() -> None:
    clock = Clock()
    clock.now = 0.0
    sessions = Sessions(SIZES, max_sessions=3, idle_seconds=10.0, record=False, clock=clock)
    idle, used = sessions.open(CONFIG), sessions.open(CONFIG)
    clock.now = 6.0
    sessions.find(used.id)
    clock.now = 9.9
    assert sessions.expired() == []
    clock.now = 10.0
    assert sessions.expired() == [idle]


def test_a_session_is_found_by_its_name() -> None:
    sessions = Sessions(SIZES, max_sessions=3, idle_seconds=10.0, record=False)
    sessions.open(CONFIG)
    named = sessions.open(SessionConfig(step_limit=5, deadline=1.0, name="arm"))
    assert sessions.find_by_name("arm") is named and sessions.find_by_name("leg") is None
