"""Collecting and regenerating: the same data whatever the number of processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from actors.single_env import SinglePolicy
from m3pc.core.files import sha256
from m3pc.core.progress import ignore_progress
from m3pc.core.seeding import data_episode
from m3pc.datagen.collect import collect
from m3pc.datagen.policies.networks import Linear, TanhGaussian
from m3pc.datagen.regenerate import load_policy, regenerate
from m3pc.datasets.sandbox import SandboxLimits
from m3pc.types import InputError
from tests.support.episodes.shared_data import shared_file

# Mean returns of 300 rollouts and their standard errors, measured when the files were packed.
RECORDED = {"hopper": (1389, 22), "walker2d": (2743, 64), "halfcheetah": (4778, 22)}


def small_policy(*, states: int = 3, actions: int = 1) -> TanhGaussian:
    rng = np.random.default_rng(0)

    def layer(inputs: int, outputs: int) -> Linear:
        weight = rng.standard_normal((outputs, inputs)) / 4
        return Linear(weight=weight.astype(np.float32), bias=np.zeros(outputs, np.float32))

    return TanhGaussian(
        hidden=(layer(states, 8),), mean=layer(8, actions), log_std=layer(8, actions)
    )


def test_without_noise_the_policy_gives_the_tanh_of_its_mean() -> None:
    policy, state = small_policy(), np.array([1, 2, 3], np.float32)
    hidden = np.maximum(policy.hidden[0].weight @ state, 0)
    expected = np.tanh(policy.mean.weight @ hidden)
    assert policy.act(state, None).tolist() == expected.tolist()
    draws = np.array([policy.act(state, np.random.default_rng(i))[0] for i in range(500)])
    std = float(np.exp(policy.log_std.weight @ hidden)[0])
    assert np.arctanh(draws).std() == pytest.approx(std, rel=0.15)


def test_one_process_and_two_collect_the_same_episodes() -> None:
    schedule = SinglePolicy(small_policy())
    sets = [
        list(collect("Pendulum-v1", schedule, steps=900, seed=3, workers=workers))
        for workers in (1, 2)
    ]
    assert [len(episode) for episode in sets[0]] == [200] * 5
    for one, other in zip(*sets, strict=True):
        assert one.states.tobytes() == other.states.tobytes()
        assert one.actions.tobytes() == other.actions.tobytes()
        assert one.seed == other.seed
    assert len({episode.states[0].tobytes() for episode in sets[0]}) == 5


def test_seeds_of_episodes_do_not_depend_on_what_came_before() -> None:
    assert data_episode(1, 5)[0] == data_episode(1, 5)[0]
    assert len({data_episode(run, episode)[0] for run in range(9) for episode in range(9)}) == 81


def test_a_policy_file_for_another_robot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the policy in hopper_medium-v2"):
        regenerate(
            str(shared_file("d4rl/hopper_medium-v2.hdf5")),
            tmp_path / "out",
            steps=10,
            seed=0,
            env_id="d4rl/Walker2d-v2",
            limits=SandboxLimits(),
            on_progress=ignore_progress,
        )
    assert list(tmp_path.iterdir()) == []


def test_the_stored_policy_gives_the_recorded_log_probabilities() -> None:
    """The file keeps log p(a | s) of every recorded action: an independent check of the network."""
    import h5py

    path = shared_file("d4rl/hopper_medium-v2.hdf5")
    policy = load_policy(path, SandboxLimits())
    assert isinstance(policy, TanhGaussian)
    with h5py.File(path) as file:
        states, actions = file["observations"][()], file["actions"][()]
        recorded = file["infos/action_log_probs"][()]
    log_probs = np.array([log_prob(policy, s, a) for s, a in zip(states, actions, strict=True)])
    inside = (np.abs(actions) < 0.999).all(axis=1)  # atanh of a rounded action is ill-conditioned
    assert inside.sum() > 800
    assert np.abs(log_probs - recorded)[inside].max() < 0.02


def log_prob(policy: TanhGaussian, state: np.ndarray, action: np.ndarray) -> float:
    x = state
    for layer in policy.hidden:
        x = np.maximum(layer(x), 0)
    mean, log_std = policy.mean(x), policy.log_std(x)
    u = np.arctanh(action.astype(np.float64))
    gaussian = -0.5 * ((u - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    return float((gaussian - np.log(1 - action.astype(np.float64) ** 2 + 1e-6)).sum())


@pytest.mark.parametrize("field", ["nonlinearity", "output_distribution"])
def test_another_kind_of_network_is_refused(field: str, tmp_path: Path) -> None:
    import h5py

    path = tmp_path / "hopper.hdf5"
    path.write_bytes(shared_file("d4rl/hopper_medium-v2.hdf5").read_bytes())
    with h5py.File(path, "r+") as file:
        del file[f"metadata/policy/{field}"]
        file[f"metadata/policy/{field}"] = np.bytes_("other")
    with pytest.raises(InputError, match=field):
        load_policy(path, SandboxLimits())


def test_a_dope_checkpoint_is_read_too() -> None:
    policy = load_policy(shared_file("dope/walker_online_3.npz"), SandboxLimits())
    assert isinstance(policy, TanhGaussian)
    assert [layer.weight.shape for layer in policy.hidden] == [(256, 17), (256, 256)]
    assert policy.mean.bias.shape == policy.log_std.bias.shape == (6,)


def test_rollouts_load_no_torch() -> None:
    code = (
        "import sys; import m3pc.datagen.collect, m3pc.envs;"
        "m3pc.envs.make('d4rl/Hopper-v2').close();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def constant_policy(path: Path, action: float, *, states: int = 3) -> str:
    """A policy of Pendulum that takes the same action at every step."""
    layers = {"w0": np.zeros((2, states)), "b0": np.zeros(2), "w1": np.zeros((1, 2))}
    np.savez(path, **layers, b1=np.array([action]))  # type: ignore[arg-type]
    return str(path)


def test_several_policies_take_turns_and_the_header_names_them(tmp_path: Path) -> None:
    files = [constant_policy(tmp_path / f"{name}.npz", at) for name, at in (("a", 0.5), ("b", -1))]
    store = regenerate(
        files[0],
        tmp_path / "out",
        steps=700,
        seed=0,
        env_id="Pendulum-v1",
        limits=SandboxLimits(),
        on_progress=ignore_progress,
        also=files[1:],
        still=True,
        workers=1,
    )
    actions = [set(episode.actions.ravel().tolist()) for episode in store.episodes()]
    assert actions == [{0.5}, {-1.0}, {0.0}, {0.5}]
    source = store.header.source
    assert source["still"] is True
    assert (source["name"], source["also"]) == ("a.npz", {"b.npz": sha256(Path(files[1]))})


def test_each_of_several_policies_has_to_fit(tmp_path: Path) -> None:
    fits = constant_policy(tmp_path / "fits.npz", 0.5)
    wide = constant_policy(tmp_path / "wide.npz", 0.5, states=4)
    with pytest.raises(InputError, match=r"the policy in wide\.npz"):
        regenerate(
            fits,
            tmp_path / "out",
            steps=10,
            seed=0,
            env_id="Pendulum-v1",
            limits=SandboxLimits(),
            on_progress=ignore_progress,
            also=[wide],
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize("robot", RECORDED)
def test_a_regenerated_set_has_the_recorded_mean_return(robot: str, tmp_path: Path) -> None:
    store = regenerate(
        str(shared_file(f"d4rl/{robot}_medium-v2.hdf5")),
        tmp_path / "out",
        steps=200_000,
        seed=0,
        env_id=None,
        limits=SandboxLimits(),
        on_progress=ignore_progress,
        workers=len(os.sched_getaffinity(0)),
    )
    returns = store.episode_returns
    mean, error = RECORDED[robot]
    own_error = returns.std(ddof=1) / len(returns) ** 0.5
    assert abs(returns.mean() - mean) < 3 * np.hypot(error, own_error)
