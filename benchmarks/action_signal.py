"""How much the next state depends on the action: the signal from which inverse dynamics learn.

python -m benchmarks.action_signal STORE [STORE ...] [--steps 400]

From states of the data, the simulator takes a step with the recorded action and with slightly
changed ones. The change of the next state, in standard deviations of the data, is a matrix; its
singular values say how much each direction of an action shows. For Hopper, Walker2d and
HalfCheetah, whose observation is the state without the position, clipped. S state, A action.
"""

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import m3pc.envs
from benchmarks.tables import quartiles, table
from m3pc.types import Floats
from replay.store.store import Store

SEED = 0
CHANGE = 0.05  # of one number of an action, up and down
MAX_ERROR = 1e-3  # standard deviations by which a repeated step may differ from the recorded one
HEAD = ("set", "strongest direction", "weakest direction", "steps that come out as recorded")

Doubles = NDArray[np.float64]
Numbers = NDArray[np.floating[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    print("Standard deviations of the next state by 1 of an action: median (quartiles)\n")
    table(HEAD, [_row(path, options.steps) for path in options.stores])


def _row(path: Path, count: int) -> list[str]:
    store = Store(path)
    assert store.header.env
    episodes = list(store.episodes())
    befores = np.concatenate([episode.states[:-1] for episode in episodes])
    actions = np.concatenate([episode.actions for episode in episodes])
    afters = np.concatenate([episode.states[1:] for episode in episodes])
    unit = befores.std(axis=0, dtype=np.float64)
    chosen = np.random.default_rng(SEED).choice(len(befores), min(count, len(befores)), False)
    with closing(m3pc.envs.make(store.header.env)) as env:
        env.reset(seed=SEED)
        gains = np.stack([sensitivity(env, befores[k], actions[k], unit) for k in chosen])
        errors = [
            np.abs((next_state(env, befores[k], actions[k]) - afters[k]) / unit) for k in chosen
        ]
    repeated = np.mean([error.max() < MAX_ERROR for error in errors])
    return [path.name, _quartiles(gains[:, 0]), _quartiles(gains[:, -1]), f"{repeated:.2f}"]


def next_state(env: gymnasium.Env[Any, Any], state: Numbers, action: Numbers) -> Doubles:
    """The state [S] after a step; the position, which no observation has, is set to 0."""
    body: Any = env.unwrapped
    positions = body.model.nq - 1
    body.set_state(np.append(0.0, state[:positions]), state[positions:].astype(np.float64))
    body.data.qacc_warmstart[:] = 0  # from the previous step, which was of another state
    return np.asarray(body.step(action)[0], np.float64)


def sensitivity(
    env: gymnasium.Env[Any, Any], state: Floats, action: Floats, unit: Doubles
) -> Doubles:
    """Singular values [A], the largest first, of the next state's derivative by the action."""
    middle = action.clip(CHANGE - 1, 1 - CHANGE).astype(np.float64)
    columns = [
        (next_state(env, state, middle + step) - next_state(env, state, middle - step))
        / (2 * CHANGE * unit)
        for step in CHANGE * np.eye(len(action))
    ]
    return np.linalg.svd(np.stack(columns, axis=1), compute_uv=False)


def _quartiles(values: Doubles) -> str:
    low, middle, high = quartiles(values.tolist())
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
