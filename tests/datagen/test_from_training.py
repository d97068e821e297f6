"""The SAC that trains behaviour policies, and the data sets made with it."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.single_env import SinglePolicy
from m3pc.datagen.collect import collect
from m3pc.datagen.from_training import thin
from m3pc.datagen.policies.networks import Linear, TanhGaussian
from m3pc.datagen.sac import SAC, ReplayRing, SACConfig, forward_actor, forward_critics, squash
from m3pc.datagen.sac_training import SACTraining, target_return_of, train
from m3pc.types import Episode, Floats, InputError

TINY = SACConfig(hidden=(64, 64), batch=64, capacity=20_000)


def episode(length: int, *, terminated: bool = False, first: float = 0.0) -> Episode:
    """States count up from `first`, one action, reward 1 a step."""
    return Episode(
        states=np.arange(first, first + length + 1, dtype=np.float32)[:, None],
        actions=np.zeros((length, 1), np.float32),
        rewards=np.ones(length, np.float32),
        terminated=terminated,
        truncated=not terminated,
    )


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def test_log_density_of_a_squashed_gaussian_is_the_analytic_one() -> None:
    mean, std, action = 0.3, 0.5, 0.4
    noise = (math.atanh(action) - mean) / std
    actions, log_probs = squash(*(torch.tensor([x]) for x in (mean, math.log(std), noise)))
    assert actions.item() == pytest.approx(action, abs=1e-6)
    assert log_probs.item() == pytest.approx(-0.0820161, abs=1e-6)


def test_log_density_stays_finite_far_from_zero() -> None:
    _, log_probs = squash(torch.tensor([[30.0], [-30.0]]), torch.zeros(2, 1), torch.zeros(2, 1))
    # 1 - tanh(u)^2 tends to 4 exp(-2 |u|)
    expected = -0.5 * math.log(2 * math.pi) - math.log(4) + 60
    assert log_probs.tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize(("terminated", "expected"), [(True, 1.0), (False, 2.0)])
def test_truncation_bootstraps_and_termination_does_not(terminated: bool, expected: float) -> None:
    """One state, reward 1, discount 1/2: 1 if it ends there, 1 + 1/2 + 1/4 + ... = 2 if not."""
    here = episode(1, terminated=terminated)
    here.states[:] = 0
    settings = SACConfig(
        hidden=(16, 16),
        batch=32,
        discount=0.5,
        rate=3e-3,
        temperature=1e-6,  # no reward for entropy
        temperature_rate=0,
        target_rate=0.05,
        capacity=10,
    )
    sac = SAC(1, 1, settings, seed=0)
    sac.add(here)
    sac.update(1_000)
    zeros = torch.zeros(1, 1)
    values = forward_critics(sac.critics, zeros, zeros).detach()
    np.testing.assert_allclose(values, expected, atol=0.05)


def test_the_ring_keeps_the_newest_transitions_and_where_they_end() -> None:
    ring = ReplayRing(1, 1, capacity=5)
    ring.add(episode(4, terminated=True))
    ring.add(episode(3, first=10))
    assert len(ring) == 5
    batch = ring.sample(200, np.random.default_rng(0))
    seen = {(float(s), float(g)) for s, g in zip(batch.states[:, 0], batch.continues, strict=True)}
    assert seen == {(2, 1), (3, 0), (10, 1), (11, 1), (12, 1)}
    np.testing.assert_array_equal(batch.next_states, batch.states + 1)


def test_the_ring_takes_an_episode_longer_than_itself() -> None:
    ring = ReplayRing(1, 1, capacity=3)
    ring.add(episode(10))
    assert set(ring.sample(100, np.random.default_rng(0)).states[:, 0].tolist()) == {7, 8, 9}


def test_the_exported_policy_acts_like_the_actor() -> None:
    sac = SAC(3, 2, SACConfig(hidden=(32, 16), batch=64, capacity=64), seed=0)
    *hidden, mean, log_std = (Linear(weight=w, bias=b) for w, b in sac.layers())
    policy = TanhGaussian(hidden=tuple(hidden), mean=mean, log_std=log_std)
    states = normal(64, 3)
    with torch.no_grad():
        mean_tensor, log_std_tensor = forward_actor(sac.actor, torch.from_numpy(states))
    means, log_stds = mean_tensor.numpy(), log_std_tensor.numpy()
    for state, its_mean, its_log_std in zip(states, means, log_stds, strict=True):
        np.testing.assert_allclose(policy.act(state, None), np.tanh(its_mean), atol=1e-5)
        noise = np.random.default_rng(7).standard_normal(2, dtype=np.float32)
        drawn = np.tanh(its_mean + np.exp(its_log_std) * noise)
        np.testing.assert_allclose(policy.act(state, np.random.default_rng(7)), drawn, atol=1e-5)


def short_training() -> SACTraining:
    return train(
        "Pendulum-v1",
        target_return=0.0,
        max_steps=600,
        seed=3,
        evaluate_every=200,
        random_steps=200,
        settings=TINY,
        clock=lambda: 0.0,
    )


def digest(training: SACTraining) -> str:
    """A digest of every number in the episodes, the curve and the policy."""
    sha = hashlib.sha256(repr(training.curve).encode())
    policy = training.policy
    for linear in (*policy.hidden, policy.mean, policy.log_std):
        sha.update(linear.weight.tobytes() + linear.bias.tobytes())
    for e in training.episodes:
        sha.update(e.states.tobytes() + e.actions.tobytes() + e.rewards.tobytes())
        sha.update(f"{e.terminated} {e.truncated} {e.seed} {e.version}".encode())
    return sha.hexdigest()


def test_the_same_seed_gives_the_same_bits_in_another_process() -> None:
    script = (
        "from tests.datagen.test_from_training import *; sys.stdout.write(digest(short_training()))"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert elsewhere.stdout == digest(short_training())


def test_a_training_keeps_every_episode_with_the_version_that_acted() -> None:
    training = short_training()
    assert not training.reached
    assert [len(e) for e in training.episodes] == [200, 200, 200]
    assert [e.version for e in training.episodes] == [0, 200, 400]  # updates start after 200 steps
    assert training.version == 600
    assert [point.steps for point in training.curve] == [200, 400, 600]
    assert all(np.abs(e.actions).max() <= 1 for e in training.episodes)


def test_sac_learns_to_swing_a_pendulum_up() -> None:
    """Random actions return about -1200, and no ten episodes of them come near -400."""
    training = train(
        "Pendulum-v1",
        target_return=-300.0,
        max_steps=8_000,
        seed=0,
        evaluate_every=1_000,
        settings=TINY,
    )
    assert training.reached
    drawn = list(
        collect("Pendulum-v1", SinglePolicy(training.policy), steps=1_900, seed=1, version=5)
    )
    assert [(len(e), e.version) for e in drawn] == [(200, 5)] * 10  # complete episodes only
    assert np.mean([e.rewards.sum() for e in drawn]) > -500
    assert np.mean([e.rewards.sum() for e in training.episodes[:5]]) < -800


def test_target_returns_follow_from_the_reference_scores() -> None:
    assert target_return_of("d4rl/Hopper-v2", "medium") == pytest.approx(1281.56, abs=0.01)
    assert target_return_of("d4rl/Hopper-v2", "medium-replay") == target_return_of(
        "Hopper-v4", "medium"
    )
    assert target_return_of("d4rl/HalfCheetah-v2", "expert") == pytest.approx(10893.48, abs=0.01)
    assert target_return_of("Pendulum-v1", "expert", -200.0) == -200.0


@pytest.mark.parametrize(
    ("env_id", "quality", "words"),
    [("Pendulum-v1", "medium", "reference score"), ("Hopper-v4", "great", "medium-replay")],
)
def test_a_quality_without_a_return_is_refused(env_id: str, quality: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        target_return_of(env_id, quality)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 1_500))
def test_thinning_keeps_order_and_never_exceeds_the_steps(lengths: list[int], steps: int) -> None:
    episodes = [episode(length) for length in lengths]
    kept = thin(episodes, steps)
    places = [next(i for i, e in enumerate(episodes) if e is k) for k in kept]
    assert places == sorted(set(places))
    assert len(kept) == 1 or sum(map(len, kept)) <= steps
    if sum(lengths) <= steps:
        assert len(kept) == len(episodes)


@given(st.integers(1, 200), st.integers(1, 30), st.integers(1, 6_000))
def test_thinning_equal_episodes_fills_the_steps_evenly(
    count: int, length: int, steps: int
) -> None:
    episodes = [episode(length) for _ in range(count)]
    kept = thin(episodes, steps)
    assert len(kept) == max(min(count, steps // length), 1)
    places = [next(i for i, e in enumerate(episodes) if e is k) for k in kept]
    gaps = np.diff(places)
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1
