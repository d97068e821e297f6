"""Reads robomimic's HDF5: a group per demonstration, observations by name. S state size."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import h5py
import numpy as np

from m3pc.core.env_ids import split_env_name
from m3pc.core.manipulation_tasks import LIFT, OTHER_OBJECTS, TASKS, ManipulationTask, key_part
from m3pc.datasets.env_args import EnvArgs
from m3pc.datasets.hdf5 import (
    member_names,
    read_flags,
    read_matrix,
    read_texts,
    read_vector,
    subgroup,
    to_float32,
)
from m3pc.datasets.source import EpisodeSource, ImportOptions
from m3pc.types import Booleans, Episode, Floats, InputError

KEYS = LIFT.keys  # default; the prefix `robot0_` may be left out
STEP_LIMIT = 400  # if the task is unknown
ROUNDING = 1e-3  # actions may exceed [-1, 1] by so much; they are clipped
CLOSE = 1e-4  # metres; observed and simulated positions agree this closely
LATER = (
    f"is of robosuite 1.5 or later, and {OTHER_OBJECTS}; the environments here are of 1.4, where "
    "the observations differ. Get the data of 1.4 (low_dim_v141.hdf5), or give another --env to "
    "use this data without the environments here"
)

# Written into manifests: the same file must give the same bytes, whichever version imports it.
BY_SIZES, NOT_KNOWN = "told by the sizes of object and states", "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOrigin:
    """The environment that a file was recorded in, as far as it is known."""

    env: str | None  # the environment's name
    known_by: str  # how it is known, for people
    recorded_by: str  # the simulator, for people

    @property
    def task(self) -> ManipulationTask | None:
        return TASKS.get(split_env_name(self.env)[0]) if self.env else None


def is_robomimic(file: h5py.File) -> bool:
    return (
        "data" in member_names(file)
        and isinstance(file["data"], h5py.Group)
        and any(name.startswith("demo_") for name in file["data"])
    )


def read_robomimic(file: h5py.File, options: ImportOptions) -> EpisodeSource:
    data = subgroup(file, "data")
    demos = _demos(file, data, options.subset)
    first = subgroup(data, demos[0])
    origin = _origin(data, first, options)
    task = origin.task
    if task:
        _refuse_later_recording(first, task)
    keys = options.keys or (task.keys if task else KEYS)
    step_limit = options.max_episode_steps or (task.max_episode_steps if task else STEP_LIMIT)
    reader = _Reader(keys=tuple(keys), max_episode_steps=step_limit, sparse=task is not None)
    example = reader.episode(first)
    if origin.env and task:
        _refuse_width(example.states.shape[1], origin.env, task)
    known_limit = "of the task" if task else "assumed"
    return EpisodeSource(
        kind="robomimic",
        state_size=example.states.shape[1],
        action_size=example.actions.shape[1],
        max_episode_steps=step_limit,
        env=origin.env,
        details={
            "keys": list(keys),
            "demonstrations": len(demos),
            "horizon": "given" if options.max_episode_steps else known_limit,
            "environment": origin.known_by,
            "recorded by": origin.recorded_by,
        }
        | ({"subset": options.subset} if options.subset else {}),
        episodes=(reader.episode(subgroup(data, name)) for name in demos),
    )


def _demos(file: h5py.File, data: h5py.Group, subset: str) -> list[str]:
    """The names of all demonstrations, or of those in a subset (robomimic's mask), by number."""
    demos = sorted(
        (name for name in member_names(data) if re.fullmatch(r"demo_\d+", name)),
        key=lambda name: int(name.removeprefix("demo_")),
    )
    if not demos:
        raise InputError(f"{data.name} has no demo_0, demo_1, ...; found {member_names(data)[:12]}")
    if not subset:
        return demos
    masks = subgroup(file, "mask") if "mask" in member_names(file) else None
    known = member_names(masks) if masks else []
    if masks is None or subset not in known:
        raise InputError(f"there is no subset {subset!r}; the file has {known or 'none'}")
    listed = set(read_texts(masks, subset))
    if chosen := [name for name in demos if name in listed]:
        return chosen
    raise InputError(f"of the {len(listed)} demonstrations in {subset!r} the file has none")


def _origin(data: h5py.Group, demo: h5py.Group, options: ImportOptions) -> RecordingOrigin:
    """Take the environment from the user, else from env_args, else one whose sizes fit."""
    args = EnvArgs.parse(data.attrs.get("env_args"), data.name)
    fitting = _env_of_sizes(demo)
    sources = {
        "given": options.env,
        "named in env_args": args.env_id,
        BY_SIZES: fitting,
    }
    known_by, env = next(((how, env) for how, env in sources.items() if env), (NOT_KNOWN, None))
    if env and split_env_name(env)[0] in TASKS:
        if args.is_later_robosuite:
            raise InputError(f"{data.name} {LATER}")
        _refuse_other_task(env, args.task, fitting)
        known_by, env = _name_of(env, known_by, args, options)
    return RecordingOrigin(env=env, known_by=known_by, recorded_by=args.recorded_by)


def _refuse_other_task(env: str, named: str | None, fitting: str | None) -> None:
    """States of another task may have the same size, but mean something else."""
    tasks = {
        "env_args names": named,
        "object and states have the sizes of": TASKS[fitting].name if fitting else None,
    }
    for evidence, task in tasks.items():
        if task not in (None, TASKS[split_env_name(env)[0]].name):
            raise InputError(
                f"the environment is {env}, but {evidence} {task}; give the --env of that task, "
                "or, to use the data without the environments here, one of another name"
            )


def _name_of(
    env: str, known_by: str, args: EnvArgs, options: ImportOptions
) -> tuple[str, str | None]:
    """Return how the environment is known, and its name; without arguments, it gets the file's."""
    env_id, arguments = split_env_name(env)
    fitting = _env_with_keys(env_id, options.keys)
    if options.env and fitting != env_id:
        raise InputError(
            f"the states of {env} are {','.join(TASKS[env_id].keys)}, but --keys says "
            f"{','.join(options.keys)}; leave one of the two out"
        )
    if fitting is None:
        return f"none: --keys are not those of {env}", None
    if not options.env:
        return known_by, args.env_name(fitting)
    if arguments:
        return known_by, env
    name, left_out = args.split_arguments(env_id)
    return f"{known_by}; left out of env_args: {sorted(left_out)}" if left_out else known_by, name


def _env_of_sizes(demo: h5py.Group) -> str | None:
    """The environment whose `object` and simulator states have this demonstration's sizes."""
    if not {"obs", "states"} <= set(member_names(demo)):
        return None
    obs = subgroup(demo, "obs")
    if "object" not in member_names(obs):
        return None
    sizes = read_matrix(obs, "object").shape[1], read_matrix(demo, "states").shape[1]
    fitting = (name for name, task in TASKS.items() if (task.object_size, task.sim_size) == sizes)
    return next(fitting, None)


def _env_with_keys(env_id: str, keys: Sequence[str]) -> str | None:
    """Return the same task's environment with these keys as states; `env_id` without keys."""
    short = tuple(key.removeprefix("robot0_") for key in keys)
    if not short or short == TASKS[env_id].keys:
        return env_id
    name = TASKS[env_id].name
    return next((i for i, task in TASKS.items() if task.name == name and task.keys == short), None)


def _refuse_width(width: int, env: str, task: ManipulationTask) -> None:
    if width != task.state_size and "robots" not in split_env_name(env)[1]:
        raise InputError(
            f"joined, {','.join(task.keys)} have {width} numbers, but a state of {env} has "
            f"{task.state_size}; give the --env of the task that was recorded, or, to use the data "
            "without the environments here, one of another name"
        )


def _refuse_later_recording(demo: h5py.Group, task: ManipulationTask) -> None:
    """Refuse robosuite 1.5 even where the file names no version: up to 1.4, `object` begins with
    the object's position in the simulator's state."""
    obs = subgroup(demo, "obs")
    names = {"object", "robot0_eef_pos"}
    if not names <= set(member_names(obs)) or "states" not in member_names(demo):
        return
    objects, sim = read_matrix(obs, "object"), read_matrix(demo, "states")
    if (objects.shape[1], sim.shape[1]) != (task.object_size, task.sim_size):
        return
    position = sim[0, task.object_at : task.object_at + 3]
    distance = np.abs(objects[0, :3] - position).max()
    if task == LIFT:
        gripper = read_matrix(obs, "robot0_eef_pos")[0]
        distance = max(distance, np.abs(objects[0, 7:] - (gripper - objects[0, :3])).max())
    if distance > CLOSE:
        raise InputError(f"{demo.name} {LATER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads demonstrations as episodes."""

    keys: tuple[str, ...]
    max_episode_steps: int
    sparse: bool  # a known task: the reward is 1 at success, 0 before, and the episode ends there

    def episode(self, demo: h5py.Group) -> Episode:
        """Return the steps up to success. Without `next_obs`, a last step must succeed to count."""
        states = _observations(subgroup(demo, "obs"), self.keys)
        actions, rewards = read_matrix(demo, "actions"), to_float32(read_vector(demo, "rewards"))
        done = read_flags(demo, "dones")
        lengths = [len(states), len(actions), len(rewards), len(done)]
        if len(set(lengths)) > 1:
            raise InputError(
                f"{demo.name} has {lengths} rows of obs, actions, rewards, dones; "
                "expected one length"
            )
        success = self._success(demo, rewards, done)
        length = self._length(success | done)
        terminated = bool(success[length - 1])
        visited = np.concatenate([states, self._successor(demo, states)])
        steps = length
        if length == len(visited) and terminated:
            visited = np.concatenate([visited, visited[-1:]])  # never used: nothing follows success
        elif length == len(visited):
            steps = length - 1  # the last step's successor is unknown
        rounded = np.abs(actions) <= 1 + ROUNDING  # the store refuses larger actions
        return Episode(
            states=visited[: steps + 1],
            actions=np.where(rounded, np.clip(actions, -1, 1), actions)[:steps],
            rewards=rewards[:steps],
            terminated=terminated,
            truncated=not terminated and length == self.max_episode_steps,  # else: cut short
        )

    def _success(self, demo: h5py.Group, rewards: Floats, done: Booleans) -> Booleans:
        """In a known task only reward 1 is success: `dones` may also mark a recording's end."""
        if not self.sparse:
            return done
        if not np.isin(rewards, (0, 1)).all():
            raise InputError(
                f"{demo.name} has rewards other than 0 and 1, which the environment does not give; "
                "use the dataset with sparse rewards, or give another --env"
            )
        success: Booleans = rewards > 0
        return success

    def _length(self, ended: Booleans) -> int:
        """Steps up to the first end, or to the limit of a known task."""
        ends = np.flatnonzero(ended)
        length = int(ends[0]) + 1 if len(ends) else len(ended)
        return min(length, self.max_episode_steps) if self.sparse else length

    def _successor(self, demo: h5py.Group, states: Floats) -> Floats:
        """The state after the last one, if the file has it: [1, S], else [0, S]."""
        if "next_obs" not in member_names(demo):
            return states[:0]
        successors = _observations(subgroup(demo, "next_obs"), self.keys)
        if successors.shape != states.shape:
            raise InputError(
                f"{demo.name} has obs of shape {list(states.shape)}, "
                f"next_obs of {list(successors.shape)}; expected one shape"
            )
        return successors[-1:]


def _observations(group: h5py.Group, keys: Sequence[str]) -> Floats:
    present = member_names(group)
    key_parts = [key_part(key) for key in keys]
    names = [name if name in present else f"robot0_{name}" for name, _ in key_parts]
    missing = [key for key, name in zip(keys, names, strict=True) if name not in present]
    if missing:
        raise InputError(
            f"{group.name} lacks the observations {missing}; choose with --keys from {present}"
        )
    parts = [
        read_matrix(group, name)[:, columns]
        for name, (_, columns) in zip(names, key_parts, strict=True)
    ]
    for key, part in zip(keys, parts, strict=True):
        if not part.shape[1]:
            raise InputError(f"{group.name} has no numbers in {key}; give a part that it has")
    if len({len(part) for part in parts}) > 1:
        lengths = [len(part) for part in parts]
        raise InputError(f"{group.name} has observations of different lengths: {lengths}")
    return np.concatenate(parts, axis=1)
