"""A store as pretraining sees it: which episodes, their statistics, the best return at each step.

E episodes, R rows of steps, H the step limit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m3pc.config.schema import Config, NormaliserConfig
from m3pc.core.returns import ReturnRule, returns_to_go
from m3pc.types import Floats, InputError, Integers
from replay.format.segment import Segment
from replay.store.statistics import Moments, moments
from replay.store.store import Store
from replay.store.view import EpisodeMask, StoreView


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    store: Store
    train: EpisodeMask  # [E]
    held_out: EpisodeMask  # [E]
    rule: ReturnRule
    arrays: dict[str, Floats]  # the normaliser: states.mean, states.std, rewards.mean, ...
    critic_arrays: dict[str, Floats]  # state_mean, state_std: always unpadded
    envelope: Floats  # [H] best return at each step over the best episodes
    return_range: Floats  # [2] least and greatest return


def prepare(store: Store, config: Config) -> Dataset:
    train, held_out = split(store, config)
    rule = ReturnRule.of(config.returns, store.header.max_episode_steps)
    chosen_rows = [(_rows(s, chosen), s) for s, chosen in _by_segment(store, train)]
    returns = [returns_to_go(s.rewards, s.lengths, rule) for s in store.segments]
    columns = {
        "states": [s.states[rows] for rows, s in chosen_rows],
        "rewards": [s.rewards[rows][:, None] for rows, s in chosen_rows],
        "returns": [g[rows][:, None] for g, (rows, _) in zip(returns, chosen_rows, strict=True)],
    }
    unpadded = {name: moments([x for x in parts if len(x)]) for name, parts in columns.items()}
    count = int(store.lengths[train].sum())
    cells = int(train.sum()) * store.header.max_episode_steps if config.normaliser.padded else count
    used = {name: _with_padding(found, count, cells) for name, found in unpadded.items()}
    spread = unpadded["states"].std
    return Dataset(
        store=store,
        train=train,
        held_out=held_out,
        rule=rule,
        arrays={
            f"{name}.{part}": values.astype(np.float32)
            for name, found in used.items()
            for part, values in (
                ("mean", found.mean),
                ("std", _floored(found.std, config.normaliser)),
            )
        },
        critic_arrays={
            "state_mean": unpadded["states"].mean.astype(np.float32),
            "state_std": np.where(spread > 0, spread, 1.0).astype(np.float32),
        },
        envelope=envelope(
            store,
            returns,
            _best(store, train, config.replay.episodes),
            store.header.max_episode_steps,
        ),
        return_range=np.concatenate([used["returns"].low, used["returns"].high]).astype("f4"),
    )


def split(store: Store, config: Config) -> tuple[EpisodeMask, EpisodeMask]:
    """Episodes to learn from and episodes to measure on; those too short are in neither."""
    usable = np.flatnonzero(store.lengths >= config.dataset.min_length)
    count = round(len(usable) * config.dataset.train_share)
    if count < 1:
        raise InputError(
            f"{store.path} has {len(usable)} episodes of {config.dataset.min_length} steps or more,"
            f" of which dataset.train_share = {config.dataset.train_share} leaves none to learn"
            " from; give more data or a larger share"
        )
    if config.dataset.shuffle:
        usable = np.random.default_rng([config.seed, len(usable)]).permutation(usable)
    train, held_out = (np.zeros(len(store.lengths), np.bool_) for _ in range(2))
    train[usable[:count]] = True
    held_out[usable[count:]] = True
    return train, held_out


def _by_segment(store: Store, chosen: EpisodeMask) -> Iterator[tuple[Segment, EpisodeMask]]:
    bounds = np.cumsum([len(segment.lengths) for segment in store.segments])[:-1]
    yield from zip(store.segments, np.split(chosen, bounds), strict=True)


def _rows(segment: Segment, chosen: EpisodeMask) -> NDArray[np.bool_]:
    return np.repeat(chosen, segment.lengths)


def _with_padding(found: Moments, count: int, cells: int) -> Moments:
    """The same over `cells` rows, of which those beyond `count` are 0."""
    if cells == count:
        return found
    mean = found.mean * count / cells
    square = (found.std**2 + found.mean**2) * count / cells
    return Moments(
        mean=mean,
        std=np.sqrt(np.maximum(square - mean**2, 0)),
        low=np.minimum(found.low, 0),
        high=np.maximum(found.high, 0),
    )


def _floored(std: NDArray[np.float64], config: NormaliserConfig) -> NDArray[np.float64]:
    instead = config.std_floor if config.below_floor == "floor" else 1.0
    return np.where(std < config.std_floor, instead, std)


def _best(store: Store, train: EpisodeMask, count: int) -> Integers:
    """Numbers of the episodes of highest return."""
    order = np.argsort(-np.where(train, store.episode_returns, -np.inf), kind="stable")
    return order[: min(count, int(train.sum()))]


def envelope(
    view: StoreView, returns: Sequence[Floats], kept: Integers, max_episode_steps: int
) -> Floats:
    """[H] largest return at each step over the episodes `kept`; where none lasts, the last one's.

    `returns` are those of the view's segments, one after the other.
    """
    flat, ends = np.concatenate(returns), np.cumsum(view.lengths)
    found = np.full(max_episode_steps, -np.inf, np.float32)
    for episode in kept:
        length = view.lengths[episode]
        piece = flat[ends[episode] - length : ends[episode]]
        found[:length] = np.maximum(found[:length], piece)
    longest = int(view.lengths[kept].max())
    found[longest:] = found[longest - 1]
    return found
