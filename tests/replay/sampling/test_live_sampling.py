"""Learning from a store while it grows: the real store under buffers and mixtures."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.config.schema import ReplayConfig
from m3pc.core.returns import ReturnRule
from m3pc.types import TransitionBatch, WindowBatch
from replay.sampling.buffers import trajectory_buffer, transition_buffers
from replay.sampling.mixture import Mixture, MixtureSource
from replay.sampling.sampler import WindowBatchBuilder
from replay.sampling.selectors import by_length, uniform
from replay.sampling.transitions import TransitionBatchBuilder
from replay.store.store import Store, write_store
from tests.support.episodes.episodes import numbered
from tests.support.faults.live_writer import HEADER, episode, open_writer, send

LENGTH = 4
RULE = ReturnRule(max_episode_steps=100)
CONFIG = ReplayConfig(episodes=8, online_after=20)


@pytest.fixture
def offline(tmp_path: Path) -> Store:
    with write_store(tmp_path / "offline", HEADER) as writer:
        for number in range(1000, 1012):
            writer.append(numbered(number, 5 + number % 7))
    return Store(tmp_path / "offline")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "online"


def seen(batch: WindowBatch[Any] | TransitionBatch[Any]) -> set[int]:
    """The episodes in a batch."""
    return {int(number) for number in np.unique(batch.states[..., 0])}


def equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))


def paper(offline: Store, online: Store) -> Mixture[WindowBatch[Any]]:
    source = trajectory_buffer(offline, online, CONFIG, min_length=LENGTH, seed=3)
    return Mixture([source], WindowBatchBuilder(LENGTH, RULE), batch=256, seed=3)


def critic(offline: Store, online: Store) -> Mixture[TransitionBatch[Any]]:
    return Mixture(
        transition_buffers(offline, online, CONFIG),
        TransitionBatchBuilder(0.99, True),
        batch=256,
        seed=3,
    )


def plain(offline: Store, online: Store) -> Mixture[WindowBatch[Any]]:
    sources = [
        MixtureSource(name="offline", view=offline, selector=by_length, share=0.25),
        MixtureSource(name="online", view=online, selector=uniform, share=0.75),
    ]
    return Mixture(sources, WindowBatchBuilder(LENGTH, RULE), batch=256, seed=3)


MIXTURES: dict[str, Callable[[Store, Store], Mixture[Any]]] = {
    "paper": paper,
    "critic": critic,
    "plain": plain,
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_batch_depends_on_episodes_and_not_on_where_they_lie(
    name: str, offline: Store, path: Path
) -> None:
    """In the log, in one segment, in several, read at once or bit by bit: the same batch."""
    with open_writer(path) as writer:
        send(writer, range(1))
        growing = MIXTURES[name](offline, Store(path))
        for number in range(1, 12):
            send(writer, range(number, number + 1))
            growing = growing.latest()
        in_log = MIXTURES[name](offline, Store(path))
        writer.roll()
        sealed = MIXTURES[name](offline, Store(path))
        for update in (0, 5, 77):
            expected = in_log.batch(update)
            assert equal(growing.batch(update), expected)
            assert equal(growing.latest().batch(update), expected)
            assert equal(sealed.batch(update), expected)


def test_the_papers_buffer_fills_with_what_comes_in(offline: Store, path: Path) -> None:
    with open_writer(path) as writer:
        mixture = paper(offline, Store(path))
        before = seen(mixture.batch(0))
        assert len(before) == 8 and min(before) >= 1000
        send(writer, range(4))
        three = {1, 2, 3}  # 0 is too short for a window
        drawn = seen(mixture.latest().batch(1))
        assert len(drawn) == 8 and three <= drawn and drawn - three < before
        send(writer, range(4, 16))
        assert seen(mixture.latest().batch(2)) == set(range(8, 16))


def test_the_critic_sees_collected_steps_after_enough_of_them(offline: Store, path: Path) -> None:
    with open_writer(path) as writer:
        send(writer, range(2))
        mixture = critic(offline, Store(path))
        assert min(seen(mixture.batch(0))) >= 1000
        send(writer, range(2, 12))
        batch = mixture.latest().batch(1)
        assert int((batch.states[:, 0] < 1000).sum()) == 128


@pytest.mark.parametrize("name", MIXTURES)
def test_withdrawn_and_dropped_episodes_are_never_drawn(
    name: str, offline: Store, path: Path
) -> None:
    with open_writer(path) as writer:
        send(writer, range(5))
        writer.roll()
        send(writer, range(5), slot=1)
        send(writer, range(5, 10))
        mixture = MIXTURES[name](offline, Store(path))
        writer.drop([0])
        writer.withdraw_producer(0)
        later = mixture.latest()
        drawn = set().union(*(seen(later.batch(update)) for update in range(20)))
        long_enough = {n for n in range(5) if name == "critic" or len(episode(n)) >= LENGTH}
        assert {number for number in drawn if number < 1000} == long_enough
