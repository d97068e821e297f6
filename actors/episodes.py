"""Complete episodes of many environments under one planner, for evaluations and local runs."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from actors.vector_rollout import GymVectorAdapter, Rollout, VectorRollout
from m3pc.core.history import Waypoints
from m3pc.core.seeding import EpisodeStart
from m3pc.envs.registry import FloatVectorEnv, step_limit
from m3pc.types import Decision, Planner

OnStep = Callable[[FloatVectorEnv, Decision], None]  # called before ended environments are reset


def rollouts(
    envs: FloatVectorEnv,
    planner: Planner,
    starts: Iterable[EpisodeStart],
    *,
    explore: bool = False,
    waypoints: Waypoints | None = None,
    on_step: OnStep = lambda envs, decision: None,
) -> Iterator[Rollout]:
    """Play one episode per start and yield each when it ends.

    A slot whose episode ended takes the next start. The planner gets one request per step, with a
    row per running episode. If it decides each row independently, an episode depends on its start
    alone, not on the number of slots.
    """
    step_limit(envs)  # refuses environments whose episodes may never end
    vector = VectorRollout(
        GymVectorAdapter(envs),
        window=planner.window,
        horizon=planner.horizon,
        waypoints=waypoints,
    )
    numbered = enumerate(starts)
    free = np.ones(envs.num_envs, np.bool_)
    while vector.begin(free, numbered):
        decision = planner.decide(vector.window(), explore=explore)
        step = vector.step(decision)
        on_step(envs, decision)
        yield from vector.ended(step)
        free = step.ended
