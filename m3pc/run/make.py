"""Make a data set where there is none: train a policy to a stated quality, keep what it did."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import m3pc.envs
from m3pc.files import refuse_existing
from m3pc.pictures import learning_curve
from m3pc.run.collect import collect
from m3pc.run.train import Progress, Training, stated_return, train
from m3pc.types import Episode, InputError
from replay.manifest import Header
from replay.store import Store, write_store

STEPS = 200_000  # of a rolled-out set


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the user asked for."""

    env_id: str
    out: Path
    quality: str
    steps: int | None  # None: all of a replay, STEPS of a policy
    target_return: float | None  # None: by the quality's score
    max_steps: int
    seed: int
    replay: Path | None  # where training episodes go beside a rolled-out set
    picture: Path


def make_dataset(order: Order, on_progress: Callable[[Progress], None]) -> tuple[Store, Training]:
    """medium-replay: the training episodes, thinned to `steps`; else rollouts of the policy."""
    target = stated_return(order.env_id, order.quality, order.target_return)
    is_replay = order.quality == "medium-replay"
    if order.replay and is_replay:
        raise InputError("--replay is for medium and expert; medium-replay is the replay itself")
    for place in filter(None, (order.out, order.replay)):
        refuse_existing(place)
    training = train(
        order.env_id,
        target_return=target,
        max_steps=order.max_steps,
        seed=order.seed,
        on_progress=on_progress,
    )
    _draw(order, training, target)
    if not training.reached:
        best = max(min(p.evaluation_return, p.training_return) for p in training.curve)
        raise InputError(
            f"{order.env_id} reached {best:.1f} in {order.max_steps} steps, not {target:.1f}; "
            "give more --max-steps, another --seed or a lower --target-return"
        )
    header = _header(order, training, target)
    if is_replay:
        kept = thin(training.episodes, order.steps) if order.steps else training.episodes
        return _write(order.out, header, kept), training
    if order.replay:
        _write(order.replay, header, training.episodes)
    rolled_out = collect(
        order.env_id,
        training.policy,
        steps=order.steps or STEPS,
        seed=order.seed,
        version=training.version,
    )
    return _write(order.out, header, rolled_out), training


def thin(episodes: Sequence[Episode], steps: int) -> list[Episode]:
    """Evenly spaced episodes, in order, `steps` steps at most: a smaller replay, as diverse."""
    count = len(episodes)
    while count:
        # The middle of each of `count` equal parts; distinct, as a part is one episode or more.
        kept = [episodes[(2 * i + 1) * len(episodes) // (2 * count)] for i in range(count)]
        total = sum(map(len, kept))
        if total <= steps:
            return kept
        count = min(count - 1, count * steps // total + 1)
    return []


def _write(out: Path, header: Header, episodes: Iterable[Episode]) -> Store:
    with write_store(out, header) as writer:
        for episode in episodes:
            writer.append(episode)
    return Store(out)


def _header(order: Order, training: Training, target: float) -> Header:
    env = m3pc.envs.make(order.env_id)
    with env:
        horizon = m3pc.envs.step_limit(env)
    first = training.episodes[0]
    return Header(
        states=first.states.shape[1],
        actions=first.actions.shape[1],
        horizon=horizon,
        env=order.env_id,
        source={
            "kind": "made",
            "quality": order.quality,
            "algorithm": "sac",
            "seed": order.seed,
            "target_return": round(target, 3),
            "reached_return": round(training.curve[-1].evaluation_return, 3),
            "training_steps": training.curve[-1].steps,
            "engine": m3pc.envs.engine(),
        },
    )


def _draw(order: Order, training: Training, target: float) -> None:
    learning_curve(
        order.picture,
        title=f"SAC on {order.env_id}, seed {order.seed}",
        steps=[point.steps for point in training.curve],
        evaluated=[point.evaluation_return for point in training.curve],
        episode_ends=list(accumulate(map(len, training.episodes))),
        episode_returns=[float(episode.rewards.sum()) for episode in training.episodes],
        target=target,
    )
