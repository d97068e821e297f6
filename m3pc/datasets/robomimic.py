"""robomimic's HDF5: one group a demonstration, observations by name. L steps, S, A sizes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import h5py
import numpy as np
from numpy.typing import NDArray

from m3pc.core.env_ids import parted
from m3pc.core.manipulation_tasks import LIFT, OTHER_OBJECTS, TASKS, ManipulationTask, key_part
from m3pc.datasets.env_args import EnvArgs
from m3pc.datasets.hdf5 import flags, matrix, members, subgroup, texts, to_float32, vector
from m3pc.datasets.source import EpisodeSource, ImportOptions
from m3pc.types import Episode, Floats, InputError

KEYS = LIFT.keys  # `robot0_` may be left out
HORIZON = 400  # where the task is not known
ROUNDING = 1e-3  # of actions beyond [-1, 1]
CLOSE = 1e-4  # metres, between an object and where the simulator had it
LATER = (
    f"is of robosuite 1.5 or later, and {OTHER_OBJECTS}; the environments here are of 1.4, and "
    "would show a planner something else than it learned. Get the data of 1.4 "
    "(low_dim_v141.hdf5), or give another --env to use these without the environments here"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOrigin:
    """Where a file was recorded, as far as it says or shows."""

    env: str | None  # an environment's name
    known_by: str
    recorded_by: str

    @property
    def task(self) -> ManipulationTask | None:
        return TASKS.get(parted(self.env)[0]) if self.env else None


def is_robomimic(file: h5py.File) -> bool:
    return (
        "data" in members(file)
        and isinstance(file["data"], h5py.Group)
        and any(name.startswith("demo_") for name in file["data"])
    )


def read_robomimic(file: h5py.File, options: ImportOptions) -> EpisodeSource:
    data = subgroup(file, "data")
    demos = _demos(file, data, options.subset)
    first = subgroup(data, demos[0])
    place = _recording(data, first, options)
    task = place.task
    if task:
        _refuse_later(first, task)
    keys = options.keys or (task.keys if task else KEYS)
    horizon = options.max_episode_steps or (task.limit if task else HORIZON)
    reader = _Reader(keys=tuple(keys), max_episode_steps=horizon, sparse=task is not None)
    shown = reader.episode(first)
    if place.env and task:
        _refuse_width(shown.states.shape[1], place.env, task)
    return EpisodeSource(
        kind="robomimic",
        states=shown.states.shape[1],
        actions=shown.actions.shape[1],
        max_episode_steps=horizon,
        env=place.env,
        details={
            "keys": list(keys),
            "demonstrations": len(demos),
            "horizon": "given"
            if options.max_episode_steps
            else "of the task"
            if task
            else "assumed",
            "environment": place.known_by,
            "recorded by": place.recorded_by,
        }
        | ({"subset": options.subset} if options.subset else {}),
        episodes=(reader.episode(subgroup(data, name)) for name in demos),
    )


def _demos(file: h5py.File, data: h5py.Group, subset: str) -> list[str]:
    """The names of all demonstrations, or of those that a mask lists, by number."""
    demos = sorted(
        (name for name in members(data) if re.fullmatch(r"demo_\d+", name)),
        key=lambda name: int(name.removeprefix("demo_")),
    )
    if not demos:
        raise InputError(f"{data.name} has no demo_0, demo_1, ...; found {members(data)[:12]}")
    if not subset:
        return demos
    masks = subgroup(file, "mask") if "mask" in members(file) else None
    known = members(masks) if masks else []
    if masks is None or subset not in known:
        raise InputError(f"there is no subset {subset!r}; the file has {known or 'none'}")
    listed = set(texts(masks, subset))
    if chosen := [name for name in demos if name in listed]:
        return chosen
    raise InputError(f"of the {len(listed)} demonstrations in {subset!r} the file has none")


def _recording(data: h5py.Group, demo: h5py.Group, options: ImportOptions) -> RecordingOrigin:
    """The environment that was given, else the one that the file names, else that of its sizes."""
    args, shown = EnvArgs.parse(data.attrs.get("env_args"), data.name), _shown(demo)
    ways = {
        "given": options.env,
        "named in env_args": args.env_id,
        "told by the sizes of object and states": shown,
    }
    known_by, env = next(((way, env) for way, env in ways.items() if env), ("not known", None))
    if env and parted(env)[0] in TASKS:
        if args.is_later:
            raise InputError(f"{data.name} {LATER}")
        _refuse_other_task(env, args.task, shown)
        known_by, env = _named(env, known_by, args, options)
    return RecordingOrigin(env=env, known_by=known_by, recorded_by=args.recorded_by)


def _refuse_other_task(env: str, named: str | None, shown: str | None) -> None:
    """What looks like a state of the environment would mean something else."""
    found = {
        "env_args names": named,
        "object and states have the sizes of": TASKS[shown].name if shown else None,
    }
    for how, task in found.items():
        if task not in (None, TASKS[parted(env)[0]].name):
            raise InputError(
                f"the environment is {env}, but {how} {task}; give the --env of that task, or, to "
                "use the data without the environments here, one of another name"
            )


def _named(
    env: str, known_by: str, args: EnvArgs, options: ImportOptions
) -> tuple[str, str | None]:
    """How the environment is known, and its name: with the file's arguments, unless it has some."""
    plain, arguments = parted(env)
    fitting = _with_keys(plain, options.keys)
    if options.env and fitting != plain:
        raise InputError(
            f"the states of {env} are {','.join(TASKS[plain].keys)}, but --keys says "
            f"{','.join(options.keys)}; leave one of the two out"
        )
    if fitting is None:
        return f"none: --keys are not those of {env}", None
    if not options.env:
        return known_by, args.env_name(fitting)
    if arguments:
        return known_by, env
    name, left_out = args.merged(plain)
    return f"{known_by}; left out of env_args: {sorted(left_out)}" if left_out else known_by, name


def _shown(demo: h5py.Group) -> str | None:
    """The task whose objects and simulator states have the sizes of this demonstration's."""
    if not {"obs", "states"} <= set(members(demo)):
        return None
    obs = subgroup(demo, "obs")
    if "object" not in members(obs):
        return None
    sizes = matrix(obs, "object").shape[1], matrix(demo, "states").shape[1]
    fitting = (name for name, task in TASKS.items() if (task.object_size, task.sim_size) == sizes)
    return next(fitting, None)


def _with_keys(env_id: str, keys: Sequence[str]) -> str | None:
    """The environment of the same task whose states are these keys; itself where none are given."""
    short = tuple(key.removeprefix("robot0_") for key in keys)
    if not short or short == TASKS[env_id].keys:
        return env_id
    name = TASKS[env_id].name
    return next((i for i, task in TASKS.items() if task.name == name and task.keys == short), None)


def _refuse_width(found: int, env: str, task: ManipulationTask) -> None:
    if found != task.state_size and "robots" not in parted(env)[1]:
        raise InputError(
            f"joined, {','.join(task.keys)} have {found} numbers, but a state of {env} has "
            f"{task.state_size}; give the --env of the task that was recorded, or, to use the data "
            "without the environments here, one of another name"
        )


def _refuse_later(demo: h5py.Group, task: ManipulationTask) -> None:
    """Versions may not be told, but `object` begins with where the simulator has the object."""
    obs = subgroup(demo, "obs")
    if not {"object", "robot0_eef_pos"} <= set(members(obs)) or "states" not in members(demo):
        return
    seen, sim, hand = matrix(obs, "object"), matrix(demo, "states"), matrix(obs, "robot0_eef_pos")
    if (seen.shape[1], sim.shape[1]) != (task.object_size, task.sim_size):
        return
    place = slice(task.object_at, task.object_at + 3)
    apart = np.abs(seen[0, :3] - sim[0, place]).max()
    if task == LIFT:
        apart = max(apart, np.abs(seen[0, 7:] - (hand[0] - seen[0, :3])).max())
    if apart > CLOSE:
        raise InputError(f"{demo.name} {LATER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """From groups to episodes."""

    keys: tuple[str, ...]
    max_episode_steps: int
    sparse: bool  # whether the reward is 1 at success and 0 before, and nothing comes after it

    def episode(self, demo: h5py.Group) -> Episode:
        """Steps up to success. Without `next_obs` the last is left out, unless it is that."""
        states = _observations(subgroup(demo, "obs"), self.keys)
        actions, rewards = matrix(demo, "actions"), to_float32(vector(demo, "rewards"))
        done = flags(demo, "dones")
        lengths = [len(states), len(actions), len(rewards), len(done)]
        if len(set(lengths)) > 1:
            raise InputError(
                f"{demo.name} has {lengths} rows of obs, actions, rewards, dones; "
                "expected one length"
            )
        success = self._success(demo, rewards, done)
        last = self._length(success | done)
        terminated = bool(success[last - 1])
        walk = np.concatenate([states, self._successor(demo, states)])
        steps = last
        if last == len(walk) and terminated:
            walk = np.concatenate([walk, walk[-1:]])  # never looked at: nothing follows success
        elif last == len(walk):
            steps = last - 1  # the last state is known, the step from it is not
        near = np.abs(actions) <= 1 + ROUNDING  # whatever is farther out is refused by the store
        return Episode(
            states=walk[: steps + 1],
            actions=np.where(near, np.clip(actions, -1, 1), actions)[:steps],
            rewards=rewards[:steps],
            terminated=terminated,
            truncated=not terminated
            and last == self.max_episode_steps,  # else somebody stopped recording
        )

    def _success(
        self, demo: h5py.Group, rewards: Floats, done: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Of a known task by its reward: `dones` may also tell where a recording stopped."""
        if not self.sparse:
            return done
        if not np.isin(rewards, (0, 1)).all():
            raise InputError(
                f"{demo.name} has rewards other than 0 and 1, which the environment does not give; "
                "use the data set with sparse rewards, or give another --env"
            )
        success: NDArray[np.bool_] = rewards > 0
        return success

    def _length(self, ended: NDArray[np.bool_]) -> int:
        """Steps up to the first end, or to the limit of a known task."""
        ends = np.flatnonzero(ended)
        length = int(ends[0]) + 1 if len(ends) else len(ended)
        return min(length, self.max_episode_steps) if self.sparse else length

    def _successor(self, demo: h5py.Group, states: Floats) -> Floats:
        """What came after the last of the states, if the file has it: [1, S] or [0, S]."""
        if "next_obs" not in members(demo):
            return states[:0]
        successors = _observations(subgroup(demo, "next_obs"), self.keys)
        if successors.shape != states.shape:
            raise InputError(
                f"{demo.name} has obs of shape {list(states.shape)}, "
                f"next_obs of {list(successors.shape)}; expected one shape"
            )
        return successors[-1:]


def _observations(group: h5py.Group, keys: Sequence[str]) -> Floats:
    present = members(group)
    wanted = [key_part(key) for key in keys]
    names = [name if name in present else f"robot0_{name}" for name, _ in wanted]
    missing = [key for key, name in zip(keys, names, strict=True) if name not in present]
    if missing:
        raise InputError(
            f"{group.name} lacks the observations {missing}; choose with --keys from {present}"
        )
    parts = [
        matrix(group, name)[:, numbers] for name, (_, numbers) in zip(names, wanted, strict=True)
    ]
    for key, part in zip(keys, parts, strict=True):
        if not part.shape[1]:
            raise InputError(f"{group.name} has no numbers in {key}; give a part that it has")
    if len({len(part) for part in parts}) > 1:
        lengths = [len(part) for part in parts]
        raise InputError(f"{group.name} has observations of different lengths: {lengths}")
    return np.concatenate(parts, axis=1)
