"""Three lines from a checkpoint to an action."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import m3pc
from m3pc.core.history import HistoryBuffer
from m3pc.evaluation.agent import Agent
from m3pc.model import checkpoint
from m3pc.model.weights import Weights
from m3pc.types import Decision, Floats, InputError
from planner.policy import Policy
from tests.support.models.small_weights import (
    ACTIONS,
    MAX_EPISODE_STEPS,
    STATES,
    tiny_config,
    tiny_weights,
)
from tests.support.runs.refusals import sentence

STEPS = 11  # the context is 4: windows fill up, then move on


@pytest.fixture(scope="module")
def weights() -> Weights:
    return tiny_weights(tiny_config())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, weights: Weights) -> Path:
    """A run that holds them."""
    run = tmp_path_factory.mktemp("agent") / "run"
    (run / "checkpoints").mkdir(parents=True)
    checkpoint.write_next(run / "checkpoints", weights, {}, {}, number=70, keep=3)
    return run


def observations(seed: int = 0, count: int = STEPS) -> Floats:
    return np.random.default_rng(seed).standard_normal((count, STATES)).astype(np.float32)


def played(agent: Agent, states: Floats, *, explore: bool = False) -> Floats:
    return np.stack([agent.act(state, explore=explore) for state in states])


def by_windows(
    policy: Policy, states: Floats, *, seed: int = 0, explore: bool = False
) -> list[Decision]:
    """The same episode, asked as `actors` ask."""
    config = policy.config
    histories = HistoryBuffer(
        1,
        window=config.model.window,
        horizon=config.planner.horizon,
        state_size=STATES,
        action_size=ACTIONS,
    )
    histories.begin(0, states[0], seed)
    decisions = [policy.decide(histories.window([0]), explore=explore)]
    for state in states[1:]:
        histories.record(0, decisions[-1].actions[0], state)
        decisions.append(policy.decide(histories.window([0]), explore=explore))
    return decisions


@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("mode", ["rcbc", "m", "q", "q0"])
def test_an_agent_does_what_its_policy_says_to_its_history(
    mode: str, explore: bool, path: Path, weights: Weights
) -> None:
    agent = m3pc.load(path, sets=[f"planner.mode={mode}"])
    agent.reset(seed=3)
    states = observations()
    actions = played(agent, states, explore=explore)
    policy = Policy(weights, tiny_config(planner__mode=mode))
    expected = by_windows(policy, states, seed=3, explore=explore)
    assert (
        actions.tobytes() == np.concatenate([decision.actions for decision in expected]).tobytes()
    )
    assert actions.shape == (STEPS, ACTIONS)
    assert actions.dtype == np.float32
    assert np.abs(actions).max() <= 1
    assert len(np.unique(actions, axis=0)) == STEPS
    last = agent.last
    assert last is not None
    for name in last.__slots__:
        decision, other = (np.asarray(getattr(d, name)) for d in (last, expected[-1]))
        assert decision.tobytes() == other.tobytes(), name


def test_an_action_depends_on_the_past_steps(path: Path) -> None:
    """The same last state after another past is answered differently."""
    one, other = (m3pc.load(path, sets=["planner.mode=rcbc"]) for _ in range(2))
    first, second = observations(0), observations(1)
    second[-1] = first[-1]
    assert not np.array_equal(played(one, first)[-1], played(other, second)[-1])


def test_a_run_a_folder_and_a_checkpoint_make_the_same_agent(path: Path) -> None:
    states = observations(count=2)
    ways = (path, str(path), path / "checkpoints", path / "checkpoints" / "000000070")
    actions = [played(m3pc.load(way), states).tobytes() for way in ways]
    assert len(set(actions)) == 1


def test_reset_forgets_the_episode(path: Path) -> None:
    agent, states = m3pc.load(path), observations()
    once = played(agent, states)
    on = played(agent, states)  # the episode goes on
    agent.reset()
    assert agent.last is None
    again = played(agent, states)
    assert again.tobytes() == once.tobytes()
    assert not np.array_equal(on[0], once[0])


def test_the_seed_of_an_episode_is_that_of_its_candidates(path: Path) -> None:
    agent, (state,) = m3pc.load(path), observations(count=1)
    actions = []
    for seed in (0, 1, 0):
        agent.reset(seed=seed)
        actions.append(agent.act(state).tobytes())
    assert actions[0] == actions[2] != actions[1]
    assert m3pc.load(path).act(state).tobytes() == actions[0]  # 0 without a reset


def test_other_kinds_of_numbers_are_taken_as_float32(path: Path) -> None:
    (state,) = observations(count=1)
    kinds: Sequence[Any] = (state, state.astype(np.float64), state.tolist(), tuple(state))
    actions = {m3pc.load(path).act(kind).tobytes() for kind in kinds}
    assert len(actions) == 1


BAD: dict[str, Any] = {
    "too few": np.zeros(STATES - 1),
    "too many": np.zeros(STATES + 1),
    "a batch": np.zeros((1, STATES)),
    "a number": 1.0,
    "none": [],
    "NaN": [0, 0, np.nan, 0, 0],
    "infinity": [0, 0, 0, 0, -np.inf],
    "more than float32 holds": [0, 1e39, 0, 0, 0],
}


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_observation_is_refused_and_changes_nothing(name: str, path: Path) -> None:
    states = observations(count=4)
    agent = m3pc.load(path)
    actions = []
    for state in states:
        with pytest.raises(InputError) as refused:
            agent.act(BAD[name])
        assert f"expected {STATES} finite numbers" in sentence(refused)
        actions.append(agent.act(state))
    assert np.stack(actions).tobytes() == played(m3pc.load(path), states).tobytes()


@pytest.mark.parametrize("mode", ["goal", "goal-mask"])
def test_a_plan_towards_states_is_refused_where_there_are_none(mode: str, path: Path) -> None:
    with pytest.raises(InputError) as refused:
        m3pc.load(path, sets=[f"planner.mode={mode}"])
    assert f"planner.mode is {mode}, which needs states to reach" in sentence(refused)


def test_settings_change_how_it_plans(path: Path, weights: Weights) -> None:
    (state,) = observations(count=1)
    sets = ["planner.candidates=3", "planner.m.inverse_temperature=0"]
    agent = m3pc.load(path, sets=sets)
    agent.act(state)
    assert agent.last is not None
    assert agent.last.effective_candidates.tolist() == pytest.approx([3])  # three, weighed alike
    assert agent.last.version == weights.version
    without = m3pc.load(path, sets=["planner.mode=rcbc"])
    without.act(state)
    assert without.last is not None
    assert np.isnan(without.last.effective_candidates).all()
    half = m3pc.load(path, sets=["conditioning.evaluation_ratio=0.5"])
    half.act(state)
    assert half.last is not None
    assert half.last.target_returns.tolist() == [float(weights.envelope[0]) / 2]


def test_a_shorter_horizon_remembers_more(path: Path, weights: Weights) -> None:
    states = observations()
    agent = m3pc.load(path, sets=["planner.horizon=2"])
    expected = by_windows(Policy(weights, tiny_config(planner__horizon=2)), states)
    actions = np.concatenate([decision.actions for decision in expected])
    assert played(agent, states).tobytes() == actions.tobytes()
    assert not np.array_equal(actions, played(m3pc.load(path), states))


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["model.width=32"], "model was settled by training; what may change"),
        (["returns.mode=sum"], "returns was settled by training; what may change"),
        (["planner.candidate=3"], "planner.candidates"),
        (["planner.mode=best"], "give one of rcbc, m, q"),
        (["planner.candidates"], "is not a setting"),
        (["compute.device=mps"], "compute.device is mps, which is not here"),
    ],
)
def test_impossible_settings_are_refused(sets: list[str], words: str, path: Path) -> None:
    if "mps" in sets[0]:
        torch = pytest.importorskip("torch")
        if torch.mps.is_available():
            pytest.skip("this machine has it")
    with pytest.raises(InputError) as refused:
        m3pc.load(path, sets=sets)
    assert words in sentence(refused)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a checkpoint"):
        m3pc.load(tmp_path)


def test_an_episode_may_be_longer_than_the_step_limit(path: Path) -> None:
    """From then on the target is the last return of the envelope."""
    agent = m3pc.load(path, sets=["planner.mode=rcbc"])
    targets = []
    for state in observations(count=MAX_EPISODE_STEPS + 3):
        agent.act(state)
        assert agent.last is not None
        targets.append(float(agent.last.target_returns[0]))
    assert (
        targets[:MAX_EPISODE_STEPS]
        == np.linspace(2, 1, MAX_EPISODE_STEPS, dtype=np.float32).tolist()
    )
    assert targets[MAX_EPISODE_STEPS:] == [1, 1, 1]


def test_what_is_done_to_an_action_does_not_reach_the_history(path: Path) -> None:
    states = observations()
    agent, actions = m3pc.load(path, sets=["planner.mode=rcbc"]), []
    for state in states:
        action = agent.act(state)
        actions.append(action.copy())
        action *= -1  # as a caller does that scales actions in place
    expected = played(m3pc.load(path, sets=["planner.mode=rcbc"]), states)
    assert np.stack(actions).tobytes() == expected.tobytes()
