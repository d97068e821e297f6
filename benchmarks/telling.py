"""How much the next state tells of an action: what inverse dynamics can be learned from.

python -m benchmarks.telling STORE [STORE ...] [--steps 400]

From states of the data the simulator goes a step with the action that was taken, and with that
action a little changed. What changes of the next state, in standard deviations of the data, is a
matrix; its singular values are how much each direction of an action shows. Hopper, Walker2d and
HalfCheetah, whose observation is their state but for the place and what is cut. S state, A action.
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
CHANGE = 0.05  # of a number of an action, up and down
SAME = 1e-3  # standard deviations within which a step comes out as recorded
HEAD = ("set", "strongest direction", "weakest direction", "steps that come out as recorded")

Doubles = NDArray[np.float64]
Numbers = NDArray[np.floating[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    print("Standard deviations of the next state by 1 of an action: median (quartiles)\n")
    table(HEAD, [_row(path, given.steps) for path in given.stores])


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
        found = np.stack([shown(env, befores[k], actions[k], unit) for k in chosen])
        apart = [np.abs((after(env, befores[k], actions[k]) - afters[k]) / unit) for k in chosen]
    same = np.mean([one.max() < SAME for one in apart])
    return [path.name, _quartiles(found[:, 0]), _quartiles(found[:, -1]), f"{same:.2f}"]


def after(env: gymnasium.Env[Any, Any], state: Numbers, action: Numbers) -> Doubles:
    """The state [S] that follows; what an observation leaves out is 0."""
    body: Any = env.unwrapped
    places = body.model.nq - 1
    body.set_state(np.append(0.0, state[:places]), state[places:].astype(np.float64))
    body.data.qacc_warmstart[:] = 0  # of the step before, which was another's
    return np.asarray(body.step(action)[0], np.float64)


def shown(env: gymnasium.Env[Any, Any], state: Floats, action: Floats, unit: Doubles) -> Doubles:
    """Singular values [A], the largest first, of the change of the next state by that of the
    action."""
    middle = action.clip(CHANGE - 1, 1 - CHANGE).astype(np.float64)
    columns = [
        (after(env, state, middle + step) - after(env, state, middle - step)) / (2 * CHANGE * unit)
        for step in CHANGE * np.eye(len(action))
    ]
    return np.linalg.svd(np.stack(columns, axis=1), compute_uv=False)


def _quartiles(values: Doubles) -> str:
    low, middle, high = quartiles(values.tolist())
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
