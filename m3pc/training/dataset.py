"""A store as pretraining sees it: the episodes to learn from, their statistics, the envelope.

E episodes, H the step limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m3pc.config.schema import Config, NormaliserConfig
from m3pc.core.returns import ReturnRule
from m3pc.types import Floats, InputError, Integers
from replay.store.statistics import Moments, moments
from replay.store.store import Store
from replay.store.view import EpisodeMask, StoreView


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    store: Store
    train: EpisodeMask  # [E]
    held_out: EpisodeMask  # [E]
    rule: ReturnRule
    arrays: dict[str, Floats]  # the normaliser's states.mean, states.std, rewards.mean, ...
    critic_arrays: dict[str, Floats]  # state_mean, state_std: never with padding
    envelope: Floats  # [H] best return at each step over the best episodes
    return_range: Floats  # [2] lowest and highest return


def prepare_dataset(store: Store, config: Config) -> Dataset:
    """Split a store and compute the statistics for normalisation and target returns."""
    train, held_out = split(store, config)
    rule = ReturnRule.of(config.returns, store.header.max_episode_steps)
    bounds = np.cumsum([len(segment.lengths) for segment in store.segments])[:-1]
    in_segments = zip(store.segments, np.split(train, bounds), strict=True)
    chosen_rows = [(np.repeat(chosen, s.lengths), s) for s, chosen in in_segments]  # [steps of s]
    returns = [s.returns(rule) for s in store.segments]
    columns = {
        "states": [s.states[rows] for rows, s in chosen_rows],
        "rewards": [s.rewards[rows][:, None] for rows, s in chosen_rows],
        "returns": [g[rows][:, None] for g, (rows, _) in zip(returns, chosen_rows, strict=True)],
    }
    unpadded = {name: moments([x for x in parts if len(x)]) for name, parts in columns.items()}
    count = int(store.lengths[train].sum())
    cells = int(train.sum()) * store.header.max_episode_steps if config.normaliser.padded else count
    used = {name: _with_padding(plain, count, cells) for name, plain in unpadded.items()}
    state_std = unpadded["states"].std
    return Dataset(
        store=store,
        train=train,
        held_out=held_out,
        rule=rule,
        arrays={
            f"{name}.{part}": values.astype(np.float32)
            for name, statistics in used.items()
            for part, values in (
                ("mean", statistics.mean),
                ("std", _floored(statistics.std, config.normaliser)),
            )
        },
        critic_arrays={
            "state_mean": unpadded["states"].mean.astype(np.float32),
            "state_std": np.where(state_std > 0, state_std, 1.0).astype(np.float32),
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
    """Masks of the episodes to learn from and of those held out; short episodes are in neither."""
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


def _with_padding(plain: Moments, count: int, cells: int) -> Moments:
    """The moments of `count` rows after padding them with zeros to `cells` rows."""
    if cells == count:
        return plain
    mean = plain.mean * count / cells
    square = (plain.std**2 + plain.mean**2) * count / cells
    return Moments(
        mean=mean,
        std=np.sqrt(np.maximum(square - mean**2, 0)),
        low=np.minimum(plain.low, 0),
        high=np.maximum(plain.high, 0),
    )


def _floored(std: NDArray[np.float64], config: NormaliserConfig) -> NDArray[np.float64]:
    replacement = config.std_floor if config.below_floor == "floor" else 1.0
    return np.where(std < config.std_floor, replacement, std)


def _best(store: Store, train: EpisodeMask, count: int) -> Integers:
    """Numbers of the `count` training episodes with the highest return."""
    order = np.argsort(-np.where(train, store.episode_returns, -np.inf), kind="stable")
    return order[: min(count, int(train.sum()))]


def envelope(
    view: StoreView, returns: Sequence[Floats], kept: Integers, max_episode_steps: int
) -> Floats:
    """The highest return-to-go at each step over the episodes `kept`: [H]. Steps beyond the longest
    episode repeat the last value. `returns` holds one array per segment of the view, in order."""
    flat, ends = np.concatenate(returns), np.cumsum(view.lengths)
    best = np.full(max_episode_steps, -np.inf, np.float32)
    for episode in kept:
        length = view.lengths[episode]
        episode_returns = flat[ends[episode] - length : ends[episode]]
        best[:length] = np.maximum(best[:length], episode_returns)
    longest = int(view.lengths[kept].max())
    best[longest:] = best[longest - 1]
    return best
