"""A checkpoint's backward planners, played towards a task's goals or a user's own.

K episodes, N steps of an episode, H rows of a waypoint table, S state, D key dimensions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.episodes import rollouts
from actors.vector_rollout import Rollout
from m3pc.config.schema import BACKWARD
from m3pc.core.env_ids import parted
from m3pc.core.history import WaypointFn, subgoals
from m3pc.core.manipulation_tasks import TASKS as MANIPULATION
from m3pc.core.seeding import evaluation_episode
from m3pc.envs import make, robot, step_limit
from m3pc.envs.registry import FloatVectorEnv
from m3pc.evaluation.agent import policy
from m3pc.evaluation.episodes import vector
from m3pc.evaluation.evaluate import environment, together
from m3pc.evaluation.video import RgbFrame, poses, record_video
from m3pc.goals.distribution import Distribution, distribution
from m3pc.goals.files import Goals, read_goals
from m3pc.goals.guides import held
from m3pc.goals.registry import TASKS, rows_per_subgoal
from m3pc.goals.task import GoalSetting, GoalTask, WaypointSource
from m3pc.goals.tracking import Tracking, track
from m3pc.model import checkpoint
from m3pc.model.weights import Weights
from m3pc.types import Decision, Episode, Floats, InputError
from planner.policy import Policy
from replay.store.store import Store
from replay.store.view import drawable

Report = Callable[[Mapping[str, Any]], None]
FRAMES = 125  # of a video, about
OWN = "own goals"  # the task of a file
JUDGED = 10  # success of a file's goals is decided by the last 1/10 of the steps
PART = 0.5  # ... within this part of the data's standard deviation, unless told otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalRequest:
    """What to reach, and how to try."""

    path: Path  # a run or checkpoint
    task: str | None = None  # one of `TASKS`
    goals: Path | None = None  # a file of one's own; with a task, in place of its waypoints
    env: str | None = None  # default: the task's, or that of the data
    data: Path | None = None  # a store, for waypoints that need one and to compare with
    waypoints: str | None = None  # paper or released; default: the configuration's
    cycles: tuple[float, ...] = ()  # default: the task's
    spacing: int | None = None  # rows that share a subgoal; default: the configuration's
    planners: tuple[str, ...] = BACKWARD
    key: tuple[int, ...] = ()  # default: the task's, or the file's
    tolerance: float | None = None  # default: the task's
    steps: int | None = None  # default: the task's, or until the last goal
    episodes: int = 10
    seed: int = 0
    sets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A task at one frequency, where it has one."""

    name: str
    cycles: float | None
    note: str  # where the waypoints come from
    guide: WaypointFn  # the waypoints themselves, [H, S]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalOutcome:
    """The episodes of one planner, in the order of their numbers."""

    episodes: Sequence[Episode]  # [K]
    tables: Sequence[Floats]  # [K] each [H, S]
    tracking: Sequence[Tracking]  # [K]

    def values(self, measure: str) -> NDArray[np.float64]:
        return np.array([getattr(one, measure) for one in self.tracking], np.float64)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An order for which everything is there and fits."""

    order: GoalRequest
    task: GoalTask
    kind: str  # of waypoints
    spacing: int
    cases: Sequence[Case]
    policies: Mapping[str, Policy]  # by mode, all of the same weights
    data: Sequence[Episode]  # empty where none was given

    @property
    def weights(self) -> Weights:
        return next(iter(self.policies.values())).weights

    @cached_property
    def distribution(self) -> Distribution | None:
        return distribution(self.data) if self.data else None

    def play(self, case: Case, mode: str, report: Report, processes: int = 0) -> GoalOutcome:
        """The episodes 0, 1, ... of the seed: the same first states for every planner.

        `processes` step the environments; 0: as many as there are cores if these are heavy.
        """
        order, count = self.order, self.order.episodes
        starts = (evaluation_episode(order.seed, number) for number in range(count))
        found: dict[int, Rollout] = {}
        steps = 0

        def show(envs: FloatVectorEnv, decision: Decision) -> None:
            nonlocal steps
            steps += len(decision.actions)
            report({"steps": steps, "of": count * self.task.steps, "episodes": len(found)})

        task, config = self.task, self.policies[mode].config
        slots, processes = together(task.env, processes)
        shape = min(slots, count), processes
        with closing(vector(task.env, *shape, max_episode_steps=task.steps)) as envs:
            for rollout in rollouts(
                envs,
                self.policies[mode],
                starts,
                window=config.model.window,
                horizon=config.planner.horizon,
                waypoints=self.subgoals(case),
                on_step=show,
            ):
                found[rollout.number] = rollout
        return self._outcome(case, [found[number].episode for number in range(count)])

    def film(self, case: Case, mode: str, path: Path) -> list[tuple[int, RgbFrame]]:
        """The first episode as an MP4; its frames, each after so many steps."""
        frames: list[tuple[int, RgbFrame]] = []
        config = self.policies[mode].config
        record_video(
            self.task.env,
            self.policies[mode],
            path,
            seed=self.order.seed,
            window=config.model.window,
            horizon=config.planner.horizon,
            waypoints=self.subgoals(case),
            every=math.ceil(self.task.steps / FRAMES),
            on_frame=lambda steps, frame: frames.append((steps, frame)),
            max_episode_steps=self.task.steps,
        )
        return frames

    def wanted(self, case: Case, steps: Sequence[int]) -> list[tuple[int, RgbFrame]]:
        """The robot as the waypoints of the first episode have it; nothing where that cannot be."""
        start, _ = evaluation_episode(self.order.seed, 0)
        with closing(make(self.task.env)) as env:
            first, _ = env.reset(seed=start)
        table = case.guide(first.astype(np.float32))
        return list(zip(steps, poses(self.task.env, table[list(steps)]), strict=False))

    def subgoals(self, case: Case) -> WaypointFn:
        """What a planner sees of the waypoints; the last is held for whoever looks beyond."""
        ahead = self.weights.config.model.window

        def guide(first: Floats) -> Floats:
            table = subgoals(case.guide(first), self.spacing)
            return held(table, len(table) + ahead)

        return guide

    def _outcome(self, case: Case, episodes: Sequence[Episode]) -> GoalOutcome:
        tables = [case.guide(episode.states[0]) for episode in episodes]
        pairs = zip(episodes, tables, strict=True)
        return GoalOutcome(
            episodes=episodes,
            tables=tables,
            tracking=[self._track(episode.states, table) for episode, table in pairs],
        )

    def _track(self, states: Floats, table: Floats) -> Tracking:
        task, whole = self.task, held(states, self.task.steps + 1)
        return track(
            whole,
            table,
            key=task.key,
            steps=task.steps,
            tolerance=task.tolerance,
            spread=spread(self.weights),
            success=task.succeeded(task, whole, table),
        )


def trial(order: GoalRequest) -> Trial:
    """Read and check everything; nothing is played yet."""
    if order.task is None and order.goals is None:
        raise InputError(f"nothing to reach; give --task {' or '.join(TASKS)}, or --goals FILE")
    if order.task is not None and order.task not in TASKS:
        raise InputError(f"there is no task {order.task!r}; give one of {', '.join(TASKS)}")
    if order.goals is not None and (order.waypoints or order.cycles):
        raise InputError("--goals has its own waypoints; leave out --waypoints and --frequency")
    if order.tolerance is not None and not math.isfinite(order.tolerance):
        raise InputError(f"--within is {order.tolerance}; give a finite number")
    for mode in order.planners:
        if mode not in BACKWARD:
            raise InputError(f"planner {mode!r} reaches no goals; give {' or '.join(BACKWARD)}")
    found = checkpoint.read(order.path)
    weights = found.weights
    policies = {
        mode: policy(found, [*order.sets, f"planner.mode={mode}"]) for mode in order.planners
    }
    goal = next(iter(policies.values())).config.goal
    own = None if order.goals is None else read_goals(order.goals, weights.state_size)
    env = _environment(order, weights)
    task = _task(order, own, env, weights)
    kind = order.waypoints or _kind(task, goal.waypoints)
    data = _episodes(order, env, weights.state_size)
    limit = max(_limit(env), task.steps)
    return Trial(
        order=order,
        task=task,
        kind="own" if own else kind,
        spacing=order.spacing or (1 if own and not order.task else rows_per_subgoal(goal, env)),
        cases=_cases(order, task, own, kind, data, rows=limit + 1),
        policies=policies,
        data=data,
    )


def _environment(order: GoalRequest, weights: Weights) -> str:
    """The one asked for, else the task's, else the checkpoint's own.

    A manipulation task's is the checkpoint's own too: its states may be fewer than the task's
    environment shows, and its arguments are those that the data were recorded with.
    """
    if order.env or not order.task:
        return environment(order.path, order.env, weights)
    env = TASKS[order.task].env
    if weights.env is None:
        return environment(order.path, env, weights)
    _refuse_other_robot(order.path, weights.env, order.task, env)
    own = parted(weights.env)[0] in MANIPULATION
    return environment(order.path, None if own else env, weights)


def _refuse_other_robot(source: Path, found: str, what: str, env: str) -> None:
    """Sizes do not tell: a walker's states and actions have those of a cheetah's."""
    if robot(found) != robot(env):
        raise InputError(
            f"{source} is of {robot(found)} ({found}), but {what} is of {robot(env)}; give one of "
            "that, or, if you know that they are the same, --env"
        )


def _task(order: GoalRequest, own: Goals | None, env: str, weights: Weights) -> GoalTask:
    """The one named, or one around a file, with what the user changes."""
    if order.task is not None:
        task = TASKS[order.task]
    else:
        assert own is not None
        task = _own_task(own, order, env, weights)
    task = replace(task, env=env)
    key = order.key or (own.key if own else ())
    if key and key != task.key:
        _check_key(key, weights)
        task = replace(task, key=key, key_names=_key_names(key))
    if order.tolerance is not None:
        task = replace(task, tolerance=order.tolerance)
    if order.steps is not None:
        task = replace(task, steps=order.steps, judged=min(task.judged, order.steps))
    return task


def _kind(task: GoalTask, configured: str) -> str:
    """The configuration speaks of tasks that have several kinds of waypoints."""
    return next(iter(task.guides)) if len(task.guides) == 1 else configured


def _own_task(own: Goals, order: GoalRequest, env: str, weights: Weights) -> GoalTask:
    key = order.key or own.key
    if not key:
        raise InputError(
            "which dimension of a state is the key? give --key N (from 0), or in a JSON file "
            '"key": N'
        )
    _check_key(key, weights)
    steps = order.steps or own.steps or _limit(env)
    return GoalTask(
        name=OWN,
        env=env,
        key=key,
        key_names=_key_names(key),
        steps=steps,
        judged=max(1, steps - steps // JUDGED),
        tolerance=PART * float(np.linalg.norm(spread(weights)[list(key)])),
        guides={},
    )


def _check_key(key: Sequence[int], weights: Weights) -> None:
    if max(key) >= weights.state_size:
        raise InputError(
            f"the key is dimension {max(key)}; expected one from 0 to {weights.state_size - 1}"
        )


def _key_names(key: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"state[{dimension}]" for dimension in key)


def _cases(
    order: GoalRequest,
    task: GoalTask,
    own: Goals | None,
    kind: str,
    data: Sequence[Episode],
    *,
    rows: int,
) -> list[Case]:
    if own is not None:
        return [_case(task.name, None, WaypointSource(guide=own.guide, note=own.note), rows)]
    if order.cycles and not task.cycles:
        raise InputError(f"{task.name} has no frequency; leave out --frequency")
    source = "--data" if order.data is None else order.data.name
    found = []
    for cycles in order.cycles or task.cycles or (None,):
        setting = GoalSetting(rows=rows, cycles=cycles, episodes=data, source=source)
        name = task.name if cycles is None else f"{task.name}-{cycles:g}"
        found.append(_case(name, cycles, task.guidance(kind, setting), rows))
    return found


def _case(name: str, cycles: float | None, guidance: WaypointSource, rows: int) -> Case:
    return Case(
        name=name,
        cycles=cycles,
        note=guidance.note,
        guide=lambda first: held(guidance.guide(first), rows),
    )


def _episodes(order: GoalRequest, env: str, state_size: int) -> list[Episode]:
    if order.data is None:
        return []
    store = Store(order.data)
    if store.header.states != state_size:
        raise InputError(
            f"{order.data} has states of {store.header.states} numbers, the checkpoint of "
            f"{state_size}; give the --data that it learned from"
        )
    if store.header.env is not None and order.env is None:
        _refuse_other_robot(order.data, store.header.env, order.task or "the checkpoint", env)
    pairs = zip(store.episodes(), drawable(store), strict=True)
    found = [episode for episode, kept in pairs if kept]
    if not found:
        raise InputError(f"{order.data} has no episode; give --data with some")
    return found


def _limit(env: str) -> int:
    with closing(make(env)) as made:
        return step_limit(made)


def spread(weights: Weights) -> Floats:
    """Standard deviation of the data's states, without padding, whatever the preset: [S]"""
    found: Floats = weights.tensors["critic.state_std"].numpy()
    return found
