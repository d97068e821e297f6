"""An arm at 20 Hz, pretended by a simulator: what it sees goes to `m3pc serve`, which says what to
do.

    pip install 'm3pc[robosuite]'
    m3pc serve runs/lift --token-file token --record data/robot
    python examples/robot_loop.py --token-file token

runs/lift is a model of robosuite/Lift; docs/MANIPULATION.md says how to make one. The environment
is the one that the served model was trained for, an arm or not: with runs/quickstart/hopper it is a
hopper, and nothing of robosuite is needed. A real robot has the same loop, around its own sensors
and motors: all that it needs of this repository is the file m3pc/robot_client.py.
"""

import argparse
import time
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import gymnasium

from m3pc.core.env_ids import refuse_strangers
from m3pc.envs import make
from m3pc.robot_client import ClientAnswer, Planner

ARM = "robosuite/Lift"  # where a model does not say what it was trained for


class Played(NamedTuple):
    total: float  # reward
    stored: str
    round_trips: list[float]  # seconds
    answers: list[ClientAnswer]
    overruns: int  # steps that began later than they should
    success: bool | None  # where the task says so


class Clock:
    """Ticks `hz` times a second; a tick that is missed is not made up for."""

    def __init__(self, hz: float) -> None:
        self._period, self._next = 1 / hz, time.perf_counter()
        self.overruns = 0

    def tick(self) -> None:
        self._next += self._period
        left = self._next - time.perf_counter()
        if left > 0:
            time.sleep(left)
        else:
            self.overruns += 1
            self._next -= left


def play(planner: Planner, env: gymnasium.Env[Any, Any], hz: float, **terms: Any) -> Played:
    """One episode, one step a tick."""
    observation, _ = env.reset(seed=terms["seed"])
    clock, answers, round_trips, total = Clock(hz), [], [], 0.0
    reward: float | None = None
    with planner.session(**terms) as session:
        while True:
            begin = time.perf_counter()
            answers.append(session.act(observation, reward))
            round_trips.append(time.perf_counter() - begin)
            observation, found, terminated, truncated, info = env.step(
                [min(max(number, -1.0), 1.0) for number in answers[-1].action]
            )
            reward = float(found)
            total += reward
            over = session.steps >= session.told["step_limit"]
            if terminated or truncated or over:
                ended = session.end(
                    observation, reward, terminated=terminated, truncated=truncated or over
                )
                return Played(
                    total=total,
                    stored=ended["stored"],
                    round_trips=round_trips,
                    answers=answers,
                    overruns=clock.overruns,
                    success=bool(info["success"]) if "success" in info else None,
                )
            clock.tick()


def shown(played: Played) -> str:
    cuts = quantiles([1000 * each for each in played.round_trips] * 2, n=100)
    late = sum(answer.late for answer in played.answers)
    mean = sum(answer.candidates for answer in played.answers) / len(played.answers)
    success = "" if played.success is None else f"success {'yes' if played.success else 'no'}  "
    return (
        f"{success}return {played.total:.1f}  steps {len(played.answers)}  p50 {cuts[49]:.1f} ms  "
        f"p99 {cuts[98]:.1f} ms  late {late}  overruns {played.overruns}  candidates {mean:.0f}  "
        f"stored: {played.stored}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--address", default="http://127.0.0.1:8400")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--env", help=f"default: that of the model; {ARM} if it names none")
    parser.add_argument("--hz", type=float, default=20.0)
    parser.add_argument("--episodes", type=int, default=1)
    parser.add_argument("--steps", type=int, help="of an episode at most")
    parser.add_argument("--name", default="robot", help="of the robot")
    parser.add_argument("--mode", help="rcbc, m, q or q0; default: the server's")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    token = given.token_file.read_text() if given.token_file else None
    planner = Planner(given.address, token)
    name = given.env or planner.weights()["env"] or ARM
    if not given.env:
        refuse_strangers(name, given.address)
    env = make(name)
    terms = {"name": given.name, "mode": given.mode, "step_limit": given.steps}
    for episode in range(given.episodes):
        played = play(planner, env, given.hz, seed=given.seed + episode, **terms)
        print(shown(played), flush=True)
    env.close()  # type: ignore[no-untyped-call]
    planner.close()


if __name__ == "__main__":
    main()
