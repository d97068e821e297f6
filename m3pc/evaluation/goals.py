"""Plays a checkpoint's backward planners towards a task's goals or a user's own.

K episodes, N steps of an episode, H rows of a waypoint table, S state, D key dimensions.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from actors.episodes import rollouts
from m3pc.config.schema import BACKWARD
from m3pc.core.env_ids import split_env_name
from m3pc.core.history import WaypointFn, block_subgoals
from m3pc.core.manipulation_tasks import TASKS as MANIPULATION
from m3pc.core.progress import OnProgress
from m3pc.core.seeding import evaluation_episode
from m3pc.envs import make, robot, step_limit
from m3pc.envs.registry import FloatVectorEnv
from m3pc.evaluation.agent import configured_policy
from m3pc.evaluation.episodes import make_envs
from m3pc.evaluation.jobs import env_of, slots_and_processes
from m3pc.evaluation.video import RgbFrame, poses, record_video
from m3pc.goals.distribution import Distribution, distribution
from m3pc.goals.files import Goals, read_goals
from m3pc.goals.registry import TASKS, rows_per_subgoal
from m3pc.goals.task import GoalSetting, GoalTask, WaypointSource
from m3pc.goals.tracking import Tracking, tracking
from m3pc.goals.waypoints import pad_rows
from m3pc.model import checkpoint
from m3pc.model.weights import Weights
from m3pc.types import Decision, Doubles, Episode, Floats, InputError
from planner.policy import Policy
from replay.store.store import Store
from replay.store.view import drawable

FRAMES = 125  # frames of a video, about
OWN = "own goals"  # name of the task made for a file of goals
# For a file's goals, the last tenth of the steps decides success. The tolerance is half of the
# data's standard deviation, unless --within is given.
JUDGED_PART, TOLERANCE_IN_STD = 10, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalRequest:
    """What to reach, and how to try."""

    path: Path  # a run or checkpoint
    task: str | None = None  # one of `TASKS`
    goals: Path | None = None  # a user's file; with a task, it replaces the waypoints
    env: str | None = None  # default: the task's, or that of the data
    data: Path | None = None  # a store, for waypoints that need data, and for comparison
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
class GoalCase:
    """A task, at one frequency if it has any."""

    name: str
    cycles: float | None
    note: str  # where the waypoints come from
    waypoints: WaypointFn  # [H, S] by an episode's first state


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalOutcome:
    """The episodes of one planner, in the order of their numbers."""

    episodes: Sequence[Episode]  # [K]
    tables: Sequence[Floats]  # [K] each [H, S]
    tracking: Sequence[Tracking]  # [K]

    def values(self, measure: str) -> Doubles:
        return np.array([getattr(tracking, measure) for tracking in self.tracking], np.float64)

    def goal_states(self, steps: int) -> Floats:
        """The distinct goal states [N, S] up to step `steps`."""
        return np.unique(np.concatenate([table[: steps + 1] for table in self.tables]), axis=0)

    @property
    def visited_states(self) -> Floats:
        return np.concatenate([episode.states for episode in self.episodes])


@dataclass(frozen=True, kw_only=True)
class GoalJob:
    """A request, read and checked, so that it can be played."""

    request: GoalRequest
    task: GoalTask
    waypoint_kind: str  # a value of goal.waypoints, or "own"
    spacing: int
    cases: Sequence[GoalCase]
    policies: Mapping[str, Policy]  # by mode, all of the same weights
    data: Sequence[Episode]  # empty where none was given

    @property
    def weights(self) -> Weights:
        return next(iter(self.policies.values())).weights

    @cached_property
    def distribution(self) -> Distribution | None:
        return distribution(self.data) if self.data else None

    def play(
        self, case: GoalCase, mode: str, on_progress: OnProgress, processes: int = 0
    ) -> GoalOutcome:
        """Play the episodes 0, 1, ... of the seed: the same first states for every planner.

        `processes` step the environments; 0: one, or one per core if these are heavy.
        """
        task, count = self.task, self.request.episodes
        starts = (evaluation_episode(self.request.seed, number) for number in range(count))
        episodes: dict[int, Episode] = {}
        steps = 0

        def report(envs: FloatVectorEnv, decision: Decision) -> None:
            nonlocal steps
            steps += len(decision.actions)
            on_progress({"steps": steps, "of": count * task.steps, "episodes": len(episodes)})

        slots, processes = slots_and_processes(task.env, processes)
        slots = min(slots, count)
        with closing(make_envs(task.env, slots, processes, max_episode_steps=task.steps)) as envs:
            for rollout in rollouts(
                envs,
                self.policies[mode],
                starts,
                waypoints=self.subgoals(case),
                on_step=report,
            ):
                episodes[rollout.number] = rollout.episode
        return self._outcome(case, [episodes[number] for number in range(count)])

    def film(self, case: GoalCase, mode: str, path: Path) -> list[tuple[int, RgbFrame]]:
        """Record the first episode as an MP4. Returns its frames, as (steps so far, frame)."""
        frames: list[tuple[int, RgbFrame]] = []
        record_video(
            self.task.env,
            self.policies[mode],
            path,
            seed=self.request.seed,
            waypoints=self.subgoals(case),
            every=math.ceil(self.task.steps / FRAMES),
            on_frame=lambda steps, frame: frames.append((steps, frame)),
            max_episode_steps=self.task.steps,
        )
        return frames

    def render_waypoints(self, case: GoalCase, steps: Sequence[int]) -> list[tuple[int, RgbFrame]]:
        """Frames (step, frame) of the robot in the first episode's waypoints at these steps; empty
        if such states cannot be rendered."""
        start, _ = evaluation_episode(self.request.seed, 0)
        with closing(make(self.task.env)) as env:
            first, _ = env.reset(seed=start)
        table = case.waypoints(first.astype(np.float32))
        return list(zip(steps, poses(self.task.env, table[list(steps)]), strict=False))

    def subgoals(self, case: GoalCase) -> WaypointFn:
        """The waypoints as a planner sees them, in blocks. The last row is repeated for windows
        that reach beyond the table."""
        ahead = self.weights.config.model.window

        def guide(first: Floats) -> Floats:
            table = block_subgoals(case.waypoints(first), self.spacing)
            return pad_rows(table, len(table) + ahead)

        return guide

    def _outcome(self, case: GoalCase, episodes: Sequence[Episode]) -> GoalOutcome:
        task = self.task
        tables = [case.waypoints(episode.states[0]) for episode in episodes]
        results = []
        for episode, table in zip(episodes, tables, strict=True):
            states = pad_rows(episode.states, task.steps + 1)
            results.append(
                tracking(
                    states,
                    table,
                    key=task.key,
                    steps=task.steps,
                    tolerance=task.tolerance,
                    std=state_std(self.weights),
                    success=task.succeeded(task, states, table),
                )
            )
        return GoalOutcome(episodes=episodes, tables=tables, tracking=results)


def make_goal_job(request: GoalRequest) -> GoalJob:
    """Read and check everything; nothing is played yet."""
    if request.task is None and request.goals is None:
        raise InputError(f"nothing to reach; give --task {' or '.join(TASKS)}, or --goals FILE")
    if request.task is not None and request.task not in TASKS:
        raise InputError(f"there is no task {request.task!r}; give one of {', '.join(TASKS)}")
    if request.goals is not None and (request.waypoints or request.cycles):
        raise InputError("--goals has its own waypoints; leave out --waypoints and --frequency")
    if request.tolerance is not None and not math.isfinite(request.tolerance):
        raise InputError(f"--within is {request.tolerance}; give a finite number")
    for mode in request.planners:
        if mode not in BACKWARD:
            raise InputError(f"planner {mode!r} reaches no goals; give {' or '.join(BACKWARD)}")
    source = checkpoint.read(request.path)
    weights = source.weights
    policies = {
        mode: configured_policy(source, [*request.sets, f"planner.mode={mode}"])
        for mode in request.planners
    }
    goal = next(iter(policies.values())).config.goal
    own = None if request.goals is None else read_goals(request.goals, weights.state_size)
    env = _env_id(request, weights)
    task = _task(request, own, env, weights)
    kind = request.waypoints or goal.waypoints
    if not request.waypoints and len(task.waypoint_sources) == 1:
        (kind,) = task.waypoint_sources  # the configured kind is for tasks with several
    data = _episodes(request, env, weights.state_size)
    max_steps = max(_max_episode_steps(env), task.steps)
    return GoalJob(
        request=request,
        task=task,
        waypoint_kind="own" if own else kind,
        spacing=request.spacing or (1 if own and not request.task else rows_per_subgoal(goal, env)),
        cases=_cases(request, task, own, kind, data, rows=max_steps + 1),
        policies=policies,
        data=data,
    )


def _env_id(request: GoalRequest, weights: Weights) -> str:
    """The environment of the request, else of the task, else of the checkpoint.

    A manipulation task is played in the checkpoint's own environment, whose states may have fewer
    numbers than the task's, and whose arguments are those of the data's recording.
    """
    if request.env or not request.task:
        return env_of(request.path, request.env, weights)
    env = TASKS[request.task].env
    if weights.env is None:
        return env_of(request.path, env, weights)
    _refuse_other_robot(request.path, weights.env, request.task, env)
    own = split_env_name(weights.env)[0] in MANIPULATION
    return env_of(request.path, None if own else env, weights)


def _refuse_other_robot(source: Path, source_env: str, what: str, env: str) -> None:
    """Compare names: sizes do not tell robots apart, a walker and a cheetah have the same."""
    if robot(source_env) != robot(env):
        raise InputError(
            f"{source} is of {robot(source_env)} ({source_env}), but {what} is of {robot(env)}; "
            "give one of that, or, if you know that they are the same, --env"
        )


def _task(request: GoalRequest, own: Goals | None, env: str, weights: Weights) -> GoalTask:
    """The task named, or one made for a file of goals, with the request's changes."""
    if request.task is not None:
        task = TASKS[request.task]
    else:
        assert own is not None
        task = _own_task(own, request, env, weights)
    task = replace(task, env=env)
    key = request.key or (own.key if own else ())
    if key and key != task.key:
        task = replace(task, key=key, key_names=_key_names(key, weights))
    if request.tolerance is not None:
        task = replace(task, tolerance=request.tolerance)
    if request.steps is not None:
        task = replace(task, steps=request.steps, judged_from=min(task.judged_from, request.steps))
    return task


def _own_task(own: Goals, request: GoalRequest, env: str, weights: Weights) -> GoalTask:
    """The task of reaching the goals of a file."""
    key = request.key or own.key
    if not key:
        raise InputError(
            "which dimension of a state is the key? give --key N (from 0), or in a JSON file "
            '"key": N'
        )
    steps = request.steps or own.steps or _max_episode_steps(env)
    return GoalTask(
        name=OWN,
        env=env,
        key=key,
        key_names=_key_names(key, weights),
        steps=steps,
        judged_from=max(1, steps - steps // JUDGED_PART),
        tolerance=TOLERANCE_IN_STD * float(np.linalg.norm(state_std(weights)[list(key)])),
        waypoint_sources={},
    )


def _key_names(key: Sequence[int], weights: Weights) -> tuple[str, ...]:
    """Names of these dimensions of a state; InputError where states lack one."""
    if max(key) >= weights.state_size:
        raise InputError(
            f"the key is dimension {max(key)}; expected one from 0 to {weights.state_size - 1}"
        )
    return tuple(f"state[{dimension}]" for dimension in key)


def _cases(
    request: GoalRequest,
    task: GoalTask,
    own: Goals | None,
    kind: str,
    data: Sequence[Episode],
    *,
    rows: int,
) -> list[GoalCase]:
    """One case per frequency; one in all for a task without frequencies or a file of goals."""
    if request.cycles and not task.cycles:
        raise InputError(f"{task.name} has no frequency; leave out --frequency")
    data_name = "--data" if request.data is None else request.data.name
    cases = []
    for cycles in (None,) if own else request.cycles or task.cycles or (None,):
        if own is not None:
            source = WaypointSource(waypoints=own.waypoints, note=own.note)
        else:
            setting = GoalSetting(rows=rows, cycles=cycles, episodes=data, source=data_name)
            source = task.waypoints(kind, setting)
        cases.append(
            GoalCase(
                name=task.name if cycles is None else f"{task.name}-{cycles:g}",
                cycles=cycles,
                note=source.note,
                waypoints=partial(_padded_waypoints, source.waypoints, rows),
            )
        )
    return cases


def _padded_waypoints(waypoints: WaypointFn, rows: int, first: Floats) -> Floats:
    return pad_rows(waypoints(first), rows)


def _episodes(request: GoalRequest, env: str, state_size: int) -> list[Episode]:
    if request.data is None:
        return []
    store = Store(request.data)
    if store.header.states != state_size:
        raise InputError(
            f"{request.data} has states of {store.header.states} numbers, the checkpoint of "
            f"{state_size}; give the --data that it learned from"
        )
    if store.header.env is not None and request.env is None:
        _refuse_other_robot(request.data, store.header.env, request.task or "the checkpoint", env)
    pairs = zip(store.episodes(), drawable(store), strict=True)
    episodes = [episode for episode, kept in pairs if kept]
    if not episodes:
        raise InputError(f"{request.data} has no episode; give --data with some")
    return episodes


def _max_episode_steps(env_id: str) -> int:
    with closing(make(env_id)) as env:
        return step_limit(env)


def state_std(weights: Weights) -> Floats:
    """Standard deviation [S] of the data's states, without padding, in every preset."""
    std: Floats = weights.tensors["critic.state_std"].numpy()
    return std
