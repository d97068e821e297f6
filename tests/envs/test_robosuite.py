"""robosuite's tasks as environments: sizes, the same seed to the bit, success, what is refused."""

import hashlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.utils.env_checker import check_env

from m3pc.cli import doctor
from m3pc.cli.doctor import ProbeResult
from m3pc.core.env_ids import refuse_foreign_code
from m3pc.core.manipulation_tasks import CONTROLLER, TASKS, key_part
from m3pc.envs import engine, make, normalised_score, step_limit
from m3pc.evaluation.statistics import wilson_interval
from m3pc.types import InputError
from tests.support.episodes.shared_data import ROOT, shared_file

if find_spec("robosuite") is None:
    pytest.skip("robosuite is not installed", allow_module_level=True)

LIFT, CAN, SQUARE, CAN_LIM = TASKS
SIZES = {LIFT: (19, 400), CAN: (23, 400), SQUARE: (23, 500), CAN_LIM: (12, 400)}  # S, limit


@pytest.fixture(scope="module", params=TASKS)
def env(request: pytest.FixtureRequest) -> Iterator[Any]:
    with closing(make(request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def can() -> Iterator[Any]:
    with closing(make(CAN)) as made:
        yield made


def digest(env: Any, seed: int, steps: int = 6) -> str:
    """Of all states and simulator states of an episode with the same actions."""
    rng = np.random.default_rng(1)
    state, _ = env.reset(seed=seed)
    sha256 = hashlib.sha256(state.tobytes())
    for _ in range(steps):
        state, *_ = env.step(rng.uniform(-1, 1, 7).astype(np.float32))
        sha256.update(state.tobytes() + env.unwrapped.sim_state().tobytes())
    return sha256.hexdigest()


def test_each_task_has_its_sizes_and_limit(env: Any) -> None:
    states, limit = SIZES[env.spec.id]
    assert env.observation_space == Box(-np.inf, np.inf, (states,), np.float32)
    assert env.action_space == Box(-1, 1, (7,), np.float32)
    assert step_limit(env) == limit
    assert engine(env) == f"mujoco {metadata.version('mujoco')}, robosuite 1.4.1"
    assert normalised_score(env.spec.id, 1.0) is None
    task = TASKS[env.spec.id]
    assert len(env.unwrapped.sim_state()) == task.sim_size


def test_a_seed_decides_an_episode_to_the_bit_whatever_came_before(env: Any) -> None:
    np.random.seed(3)  # noqa: NPY002  # robosuite draws from here; we must not
    expected = digest(env, seed=5)
    drawn = np.random.random()  # noqa: NPY002
    assert digest(env, seed=6) != expected
    assert digest(env, seed=5) == expected
    with closing(make(env.spec.id)) as fresh:
        assert digest(fresh, seed=5) == expected
    np.random.seed(3)  # noqa: NPY002
    assert np.random.random() == drawn  # noqa: NPY002


def test_the_state_is_a_function_of_the_simulators(env: Any) -> None:
    env.reset(seed=0)
    state, *_ = env.step(np.array([1, -1, -1, 0.5, 0, 0, 1], np.float32))
    inner = env.unwrapped
    again = inner.set_sim_state(inner.sim_state())
    np.testing.assert_array_equal(state, again)
    with pytest.raises(InputError, match=r"simulator states of \d+ numbers; found shape \[3\]"):
        inner.set_sim_state(np.zeros(3))


def test_gymnasiums_checker_finds_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*Box observation space m..imum value is -?infinity")
        with closing(gymnasium.make(CAN_LIM)) as env:
            check_env(env.unwrapped, skip_render_check=True)


def test_an_episode_of_lift_has_a_cube_of_its_own_size() -> None:
    with closing(make(LIFT)) as env:

        def size(seed: int) -> list[float]:
            env.reset(seed=seed)
            task: Any = env.unwrapped
            sides: list[float] = task.model.geom("cube_g0").size.tolist()
            return sides

        assert size(0) != size(1)
        assert size(0) == size(0)
        assert all(0.020 <= side <= 0.022 for side in size(2))


BOXES = {0: (0.0025, 0.1575), 1: (0.1975, 0.1575), 2: (0.0025, 0.4025), 3: (0.1975, 0.4025)}


@pytest.mark.parametrize("box", [*BOXES, -1])
def test_the_can_lies_in_a_box_and_belongs_in_the_last(can: Any, box: int) -> None:
    _, info = can.reset(seed=0)
    assert (info["success"], info["box"]) == (False, -1)
    sim = can.unwrapped.sim_state()
    if box >= 0:
        sim[31:33], sim[33] = BOXES[box], 0.86
    can.unwrapped.set_sim_state(sim)
    state, reward, terminated, truncated, info = can.step(np.zeros(7, np.float32))
    success = box == 3
    assert (info["box"], info["success"]) == (box, success)
    assert (reward, terminated, truncated) == (float(success), success, False)
    np.testing.assert_allclose(info["object_pos"], state[9:12], atol=1e-6)


def test_the_limited_can_shows_where_it_is_and_not_how_it_lies(can: Any) -> None:
    with closing(make(CAN_LIM)) as limited:
        np.testing.assert_array_equal(limited.reset(seed=4)[0], can.reset(seed=4)[0][:12])


def test_a_name_changes_the_controller() -> None:
    slow = f'{CAN} {{"controller": {{"kp": 20}}}}'
    moved = []
    for name in (CAN, slow):
        with closing(make(name)) as env:
            start, _ = env.reset(seed=0)
            state, *_ = env.step(np.array([1, 0, 0, 0, 0, 0, 0], np.float32))
            moved.append(float(state[0] - start[0]))
    assert moved[0] > 2 * moved[1] > 0


GOOD = ('{"control_freq": 10}', '{"controller": {"kp": 100, "output_max": [1, 1]}}', "")
BAD = (
    '{"camera_name": "x"}',
    '{"controller": {"file": 1}}',
    '{"controller": {"kp": "a.json"}}',
    '{"controller": {"type": "IK_POSE"}}',
    '{"controller": "a.json"}',
    '{"control_freq": 0}',
    '{"robots": "../x"}',
    '{"task": "robosuite/Lift"}',
)


@pytest.mark.parametrize("arguments", GOOD)
def test_a_file_may_name_numbers_of_these_environments(arguments: str) -> None:
    refuse_foreign_code(f"{LIFT} {arguments}".strip(), "runs/stranger")


@pytest.mark.parametrize("arguments", BAD)
def test_a_file_may_name_nothing_else_of_them(arguments: str) -> None:
    with pytest.raises(InputError, match="--env"):
        refuse_foreign_code(f"{LIFT} {arguments}", "runs/stranger")
    with pytest.raises(InputError, match="--env"):  # what is right for one is not for another
        refuse_foreign_code('d4rl/Hopper-v2 {"control_freq": 10}', "runs/stranger")


def test_our_controller_is_robosuites_own() -> None:
    from m3pc.envs.robosuite import robosuite

    assert robosuite().load_controller_config(default_controller="OSC_POSE") == CONTROLLER


QUIET = f"""
import os, sys
import numpy as np
import m3pc.envs
assert "robosuite" not in sys.modules and "mujoco" not in sys.modules
env = m3pc.envs.make("{CAN}")
env.reset(seed=0)
env.step(np.zeros(7))
assert "torch" not in sys.modules
assert not [name for name in sys.modules if name.startswith("robosuite.renderers.context.")]
assert "MUJOCO_GL" not in os.environ
env.close()
env.close()
"""


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "MUJOCO_GL"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=kept | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_loads_late_prints_nothing_and_leaves_the_environment_alone() -> None:
    done = python(QUIET)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FILM = f"""
import m3pc.envs
from m3pc.types import InputError
size = dict(render_mode="rgb_array", width=64, height=48)
env, other = (m3pc.envs.make(name, **size) for name in ("{LIFT}", "{CAN_LIM}"))
other.reset(seed=0)
env.reset(seed=0)
first = env.render()
print(first.shape, first.dtype, first.std() > 10, (other.render() == first).all())
print((env.render() == first).all())
env.reset(seed=1)
print((env.render() == first).all())
lost = m3pc.envs.make("{CAN}", **size, camera_name="moon")
lost.reset(seed=0)
try:
    lost.render()
except InputError as error:
    print(error)
for each in (env, other, lost):
    each.close()
"""


def test_it_renders_when_asked_to() -> None:
    done = python(FILM, MUJOCO_GL="egl")
    assert done.returncode == 0, done.stderr
    shape, again, next_episode, refused = done.stdout.splitlines()
    assert shape == "(48, 64, 3) uint8 True False"
    assert (again, next_episode) == ("True", "False")
    assert "no camera 'moon'" in refused and "agentview" in refused


def test_it_says_how_to_install_robosuite(monkeypatch: pytest.MonkeyPatch) -> None:
    from m3pc.envs import robosuite

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    for version, reason in ((absent, "not installed"), (lambda name: "1.5.2", "is installed")):
        robosuite.robosuite.cache_clear()
        monkeypatch.setattr(metadata, "version", version)
        with pytest.raises(
            InputError, match=rf"^robosuite .*{reason}.*pip install 'm3pc\[robosuite\]'"
        ):
            make(LIFT)
    robosuite.robosuite.cache_clear()


ANSWERS = {
    "works": (ProbeResult("mujoco 3, robosuite 1.4.1\nrenders"), "ok", "robosuite 1.4.1, renders"),
    "no pictures": (ProbeResult("robosuite 1.4.1", "dies"), "optional", "no pictures: it dies"),
    "not at all": (ProbeResult("", "fails: no numba"), "optional", "fails: no numba"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_the_doctor_reports_what_of_robosuite_works(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, status, detail = ANSWERS[case]
    monkeypatch.setattr(doctor, "probe", lambda *given: answer)
    check = doctor.robosuite({})
    assert check.status == status
    assert detail in check.detail


def test_the_doctor_does_not_need_robosuite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "package", lambda *given: doctor.DoctorFinding("x", "optional", "missing")
    )
    assert doctor.robosuite({}).status == "optional"
    assert "m3pc[robosuite]" in doctor.robosuite({}).advice


def test_the_doctors_probe_runs_here() -> None:
    answer = doctor.probe(doctor.ROBOSUITE, {**os.environ, "MUJOCO_GL": "egl"}, 120)
    assert answer.output.splitlines()[-1] == "renders", answer.failure


def test_a_key_may_be_a_part_of_an_observation() -> None:
    assert key_part("object") == ("object", slice(None, None))
    assert key_part("object[:3]") == ("object", slice(None, 3))
    assert key_part("robot0_eef_pos[1:2]") == ("robot0_eef_pos", slice(1, 2))
    for wrong in ("object[3]", "object[a:b]", "", "object[:3", "a b"):
        with pytest.raises(InputError, match=r"object\[:3\]"):
            key_part(wrong)


def test_wilsons_interval_has_the_published_values() -> None:
    # what R's prop.test says without its correction
    assert wilson_interval(0, 10) == pytest.approx((0, 0.2775328), abs=1e-6)
    assert wilson_interval(5, 10) == pytest.approx((0.2365931, 0.7634069), abs=1e-6)
    assert wilson_interval(49, 50) == pytest.approx((0.8950453, 0.9964606), abs=1e-6)


# Real recordings.

RECORDED = {
    "robomimic/square_ph_low_dim.hdf5": (SQUARE, 3),
    "robomimic/ph_lift_low_dim.hdf5": (LIFT, 2),
    "robomimic/mg_can_low_dim.hdf5": (CAN, 2),
    "robomimic/robomimic_test.hdf5": (LIFT, 2),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_states_follow_from_recorded_simulator_states(name: str) -> None:
    path, (env_id, demos) = shared_file(name), RECORDED[name]
    task = TASKS[env_id]
    parts = [key if key == "object" else f"robot0_{key}" for key in task.keys]
    with closing(make(env_id)) as env, h5py.File(path) as file:
        inner: Any = env.unwrapped
        inner.reset(seed=0)
        for demo in list(file["data"].values())[:demos]:
            recorded = np.concatenate([demo["obs"][part][()] for part in parts], axis=1)
            sims, rewards = demo["states"][()], demo["rewards"][()]
            for step in range(0, len(sims), 7):
                state = inner.set_sim_state(sims[step])
                np.testing.assert_allclose(state, recorded[step], atol=1e-6)
                np.testing.assert_array_equal(
                    sims[step, task.object_at : task.object_at + 3].astype(np.float32),
                    recorded[step, 9:12].astype(np.float32),
                )
            for step in range(len(sims) - 6, len(sims)):  # a reward is for what a step leads to
                inner.set_sim_state(sims[step])
                assert inner.observe()[1]["success"] == bool(rewards[step - 1])


def test_a_cloned_policy_lifts_the_cube() -> None:
    with np.load(shared_file("robomimic/bc_lift_ph.npz")) as arrays:
        layers = [(arrays[f"w{i}"], arrays[f"b{i}"]) for i in range(3)]

    def act(state: Any) -> Any:
        hidden = np.concatenate([state[9:], state[:9]])
        for weights, bias in layers[:-1]:
            hidden = np.maximum(weights @ hidden + bias, 0)
        weights, bias = layers[-1]
        return np.clip(weights @ hidden + bias, -1, 1).astype(np.float32)

    with closing(make(LIFT)) as env:
        for seed in (0, 1, 2):
            state, _ = env.reset(seed=seed)
            for _ in range(80):
                state, reward, terminated, _, info = env.step(act(state))
                if terminated:
                    break
            assert terminated and info["success"] and reward == 1.0
