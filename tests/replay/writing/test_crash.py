"""The live store under power loss, failing disks and kill -9: no acknowledged episode is lost, none
is stored twice, and every stored episode was sent."""

import errno
from itertools import product

import pytest

from m3pc.types import InputError
from tests.support.faults.crash import OPTIONS, Explorer, Play, explore_rot, explore_states
from tests.support.faults.seeded_bugs import BUGS

SHORT = ("append", "invalid", "roll", "drop", "full", "reopen")


def test_whatever_a_power_loss_leaves_the_store_recovers() -> None:
    assert explore_states(seed=1, enough=2_500).states >= 2_500


@pytest.mark.long
def test_twenty_thousand_power_losses() -> None:
    assert explore_states(seed=2, enough=20_000, deeper=0.05).states >= 20_000


@pytest.mark.parametrize("bug", BUGS)
def test_known_mistakes_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError):
        explore_rot(seed=0, flips=300)
        explore_states(seed=0, enough=6_000)


def test_damage_in_a_log_is_refused() -> None:
    explore_rot(seed=0, flips=300)


def explore_all(length: int) -> int:
    """Every program of this length, cut at every call."""
    explorer = Explorer(seed=length, deeper=0.0)
    for operations in product(SHORT, repeat=length):
        try:
            explorer.explore(Play(0, OPTIONS), operations)
        except (AssertionError, InputError, OSError) as error:
            raise AssertionError(f"{operations}: {error!r}") from error
    return explorer.states


@pytest.mark.parametrize("length", [1, 2])
def test_every_short_program_may_lose_power_at_every_call(length: int) -> None:
    assert explore_all(length) > len(SHORT) ** length * 10


@pytest.mark.long
@pytest.mark.parametrize("length", [3, 4])
def test_every_longer_program_may_lose_power_at_every_call(length: int) -> None:
    assert explore_all(length) > len(SHORT) ** length * 20


PROGRAM = ("append", "group", "roll", "invalid", "reopen", "other", "append", "kill", "append")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", range(60))
def test_a_disk_that_fails_once_costs_nothing(call: int, code: int) -> None:
    """At each of the first 60 calls that change the disk; then the power is lost too."""
    play = Play(call, OPTIONS)
    play.fs.fails_at = {play.fs.calls + call: code}
    failed = False

    def note() -> None:
        nonlocal failed
        failed |= play.fs.calls in play.fs.fails_at

    play.fs.watch = note
    play.run(PROGRAM * 2)
    assert failed
    play.fs.watch = lambda: None
    Explorer(seed=call, deeper=0.0).explore(play, PROGRAM[:3])
    keys = [key for key in play.history.acked if key.slot == 0]
    assert len(keys) >= 4  # it went on working
