"""A simulated arm at 20 Hz: it sends observations to `m3pc serve` and executes its actions.

    pip install 'm3pc[robosuite]'
    m3pc serve runs/lift --token-file token --record data/robot
    python examples/robot_loop.py --token-file token

runs/lift is a model of robosuite/Lift; docs/MANIPULATION.md says how to train one. The environment
is the one that the served model was trained for: with runs/quickstart/hopper it is a hopper, and
robosuite is not needed. A real robot has the same loop around its own sensors and motors; from
this repository it needs only the file m3pc/robot_client.py.
"""

import argparse
import time
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import gymnasium

from m3pc.core.env_ids import refuse_foreign_code
from m3pc.envs import make
from m3pc.robot_client import ClientAnswer, Planner

ARM = "robosuite/Lift"  # for models that do not name their environment


class EpisodeResult(NamedTuple):
    total: float  # sum of rewards
    stored: str
    round_trips: list[float]  # seconds
    answers: list[ClientAnswer]
    overruns: int  # steps that began too late
    success: bool | None  # None if the task does not say


class Clock:
    """Ticks `hz` times a second; a missed tick is not made up for."""

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


def play(planner: Planner, env: gymnasium.Env[Any, Any], hz: float, **terms: Any) -> EpisodeResult:
    """One episode, one step per tick."""
    observation, _ = env.reset(seed=terms["seed"])
    clock, answers, round_trips, total = Clock(hz), [], [], 0.0
    reward: float | None = None
    with planner.session(**terms) as session:
        while True:
            begin = time.perf_counter()
            answers.append(session.act(observation, reward))
            round_trips.append(time.perf_counter() - begin)
            observation, step_reward, terminated, truncated, info = env.step(
                [min(max(number, -1.0), 1.0) for number in answers[-1].action]
            )
            reward = float(step_reward)
            total += reward
            at_limit = session.steps >= session.opened["step_limit"]
            if terminated or truncated or at_limit:
                ended = session.end(
                    observation, reward, terminated=terminated, truncated=truncated or at_limit
                )
                return EpisodeResult(
                    total=total,
                    stored=ended["stored"],
                    round_trips=round_trips,
                    answers=answers,
                    overruns=clock.overruns,
                    success=bool(info["success"]) if "success" in info else None,
                )
            clock.tick()


def summary(result: EpisodeResult) -> str:
    cuts = quantiles([1000 * seconds for seconds in result.round_trips] * 2, n=100)
    late = sum(answer.late for answer in result.answers)
    mean = sum(answer.candidates for answer in result.answers) / len(result.answers)
    success = "" if result.success is None else f"success {'yes' if result.success else 'no'}  "
    return (
        f"{success}return {result.total:.1f}  steps {len(result.answers)}  p50 {cuts[49]:.1f} ms  "
        f"p99 {cuts[98]:.1f} ms  late {late}  overruns {result.overruns}  candidates {mean:.0f}  "
        f"stored: {result.stored}"
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
    options = parser.parse_args(arguments)
    token = options.token_file.read_text() if options.token_file else None
    planner = Planner(options.address, token)
    name = options.env or planner.weights()["env"] or ARM
    if not options.env:
        refuse_foreign_code(name, options.address)
    env = make(name)
    terms = {"name": options.name, "mode": options.mode, "step_limit": options.steps}
    for episode in range(options.episodes):
        result = play(planner, env, options.hz, seed=options.seed + episode, **terms)
        print(summary(result), flush=True)
    env.close()  # type: ignore[no-untyped-call]
    planner.close()


if __name__ == "__main__":
    main()
