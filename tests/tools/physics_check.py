"""Compare recorded D4RL steps with steps of our environments; print JSON.

    python -m tests.tools.physics_check FILE...

R recorded steps, S state. The state before a step is set from infos/qpos and infos/qvel. The files
have qvel as the observation shows it, so where it is clipped, the true velocity is lost and the
step cannot be repeated. A velocity clipped after the step does not matter: ours is clipped, too.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import h5py
import mujoco
import numpy as np

import m3pc.envs  # noqa: F401 - registers d4rl/*

MAX_ERROR = 1e-3  # larger errors mean other physics; rounding to float32 gives less than 1e-4


class Robot(NamedTuple):
    recorded: str  # our environment
    modern: str  # gymnasium's, with unchanged physics
    clip: float  # bound of the velocities in an observation


ROBOTS = {
    "hopper": Robot("d4rl/Hopper-v2", "Hopper-v4", 10),
    "walker2d": Robot("d4rl/Walker2d-v2", "Walker2d-v4", 10),
    "halfcheetah": Robot("d4rl/HalfCheetah-v2", "HalfCheetah-v4", np.inf),
}


def check(path: Path) -> dict[str, Any]:
    """Compare both physics with the steps in the file; its name contains that of the robot."""
    robot = ROBOTS[_robot(path)]
    with h5py.File(path) as file:
        names = ("infos/qpos", "infos/qvel", "actions", "next_observations", "rewards", "terminals")
        qpos, qvel, actions, states, rewards, terminals = (file[name][:] for name in names)
    usable = (np.abs(qvel) < robot.clip).all(axis=1)  # [R]
    steps = (qpos[usable], qvel[usable], actions[usable])
    recorded = (states[usable], rewards[usable], terminals[usable])
    return {
        "steps": len(usable),
        "compared": int(usable.sum()),
        "terminals": int(terminals[usable].sum()),
        "recorded": _errors(robot.recorded, steps, recorded),
        "modern": _errors(robot.modern, steps, recorded),
    }


def _robot(path: Path) -> str:
    robot = next((name for name in ROBOTS if name in path.name.lower()), None)
    return robot or sys.exit(f"{path.name} names none of {', '.join(ROBOTS)}")


def _errors(env_id: str, steps: tuple[Any, ...], recorded: tuple[Any, ...]) -> dict[str, float]:
    states, rewards, terminals = _replay(env_id, *steps)
    state_errors = np.abs(states - recorded[0]).max(axis=1)  # [R]
    return {
        "states": float(state_errors.max()),
        "rewards": float(np.abs(rewards - recorded[1]).max()),
        "terminals": int((terminals != recorded[2]).sum()),
        "missed": int((state_errors > MAX_ERROR).sum()),
    }


def _replay(env_id: str, qpos: Any, qvel: Any, actions: Any) -> tuple[Any, Any, Any]:
    """One step from each of R states: next states [R, S], rewards [R], terminals [R]."""
    with warnings.catch_warnings():  # gymnasium's own v4 is the comparison, not a choice
        warnings.filterwarnings("ignore", ".*is out of date", DeprecationWarning)
        env: Any = gymnasium.make(env_id).unwrapped
    env.reset(seed=0)
    results = []
    for position, velocity, action in zip(qpos, qvel, actions, strict=True):
        env.set_state(position, velocity)
        results.append(env.step(action)[:3])
    env.close()
    states, rewards, terminals = zip(*results, strict=True)
    return np.stack(states), np.array(rewards), np.array(terminals)


if __name__ == "__main__":
    files = {_robot(path): check(path) for path in map(Path, sys.argv[1:])}
    report = {"engine": f"mujoco {mujoco.__version__}", "files": files}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
