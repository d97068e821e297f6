"""Recorded D4RL steps, repeated: the proof that ours is the physics in which they were recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import m3pc.envs  # noqa: F401  registers d4rl/*
from tests.support.episodes.shared_data import ROOT, shared_file
from tests.tools.physics_check import ROBOTS, check

OTHER = "M3PC_OTHER_MUJOCO"  # a folder with another mujoco: pip install --no-deps --target
ROWS = {  # robot: steps in the file, those with no velocity clipped before, terminal ones of these
    "hopper": (911, 761, 2),
    "walker2d": (2000, 1419, 0),
    "halfcheetah": (2000, 2000, 0),
}


def recording(robot: str) -> Path:
    return shared_file(f"d4rl/{robot}_medium-v2.hdf5")


def assert_recorded_physics(robot: str, result: dict[str, Any]) -> None:
    assert (result["steps"], result["compared"], result["terminals"]) == ROWS[robot]
    assert result["recorded"]["states"] <= 1e-4
    assert result["recorded"]["rewards"] <= 1e-5
    assert result["recorded"]["terminals"] == 0
    # The unchanged model must fail, or the lines above would prove nothing.
    assert result["modern"]["missed"] > 0.9 * result["compared"]
    assert result["modern"]["rewards"] > 1e-3


@pytest.mark.parametrize("robot", ROBOTS)
def test_every_repeatable_step_is_repeated(robot: str) -> None:
    assert_recorded_physics(robot, check(recording(robot)))


def test_every_repeatable_step_is_repeated_by_another_engine() -> None:
    folder = os.environ.get(OTHER)
    if not folder or not Path(folder, "mujoco").is_dir():
        pytest.skip(f"{OTHER} is {folder!r}; set it to a folder with mujoco 3.9 to run this test")
    files = [str(recording(robot)) for robot in ROBOTS]
    path = os.pathsep.join(filter(None, [os.path.abspath(folder), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, "-m", "tests.tools.physics_check", *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["engine"].startswith("mujoco 3.9")
    assert report["files"].keys() == ROWS.keys()
    for robot, result in report["files"].items():
        assert_recorded_physics(robot, result)


@pytest.mark.parametrize("robot", ROBOTS)
def test_a_capsule_weighs_as_the_longer_cylinder(robot: str) -> None:
    model = mujoco_env(robot).model
    radius, half_length = model.geom_size[1:, 0], model.geom_size[1:, 1]  # geom 0 is the floor
    length = 2 * half_length + radius
    mass = 1000 * np.pi * radius**2 * length  # density 1000 kg/m3
    scale = model.body_mass.sum() / mass.sum()  # 1 but for HalfCheetah, whose XML gives the sum
    bodies = model.geom_bodyid[1:]
    np.testing.assert_allclose(
        model.body_mass, scale * np.bincount(bodies, mass, model.nbody), rtol=1e-12
    )
    # A body of one capsule: m (3 r^2 + L^2) / 12 across its axis, m r^2 / 2 along it.
    across, along = mass * (3 * radius**2 + length**2) / 12, mass * radius**2 / 2
    alone = np.bincount(bodies)[bodies] == 1
    inertia = scale * np.stack([across, across, along], axis=1)
    np.testing.assert_allclose(model.body_inertia[bodies][alone], inertia[alone], rtol=1e-9)


@pytest.mark.parametrize(
    ("robot", "mass"), [("hopper", 15.264999), ("walker2d", 22.698007), ("halfcheetah", 14.0)]
)
def test_the_robots_weigh_what_they_weighed(robot: str, mass: float) -> None:
    assert mujoco_env(robot).model.body_mass.sum() == pytest.approx(mass, abs=1e-6)


@pytest.mark.parametrize(("gap", "touches"), [(0.0008, True), (0.0012, False)])
def test_hopper_touches_the_floor_below_its_margin_of_a_millimetre(
    gap: float, touches: bool
) -> None:
    env = mujoco_env("hopper")
    upright = env.init_qpos - [0, 0.04 - gap, 0, 0, 0, 0]  # it starts 0.04 m above the floor
    env.set_state(upright, np.zeros(6))
    assert (env.data.ncon > 0) == touches


def mujoco_env(robot: str) -> Any:
    return gymnasium.make(ROBOTS[robot].recorded).unwrapped
