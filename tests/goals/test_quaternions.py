"""Quaternions, by quarter turns."""

import numpy as np
import pytest

from m3pc.goals.quaternions import applied, composed, inverse

HALF = 0.5**0.5
ABOUT_X, ABOUT_Z = np.array([HALF, 0, 0, HALF]), np.array([0, 0, HALF, HALF])
X, Y, Z = np.eye(3)


def test_a_quarter_turn_about_z_brings_x_to_y() -> None:
    assert applied(ABOUT_Z, np.stack([X, Y, Z])) == pytest.approx(np.stack([Y, -X, Z]))


def test_turns_are_done_from_the_right_to_the_left() -> None:
    both = composed(ABOUT_X, ABOUT_Z)
    assert applied(both, X) == pytest.approx(applied(ABOUT_X, applied(ABOUT_Z, X)))
    assert applied(both, X) == pytest.approx(Z)
    assert applied(composed(ABOUT_Z, ABOUT_X), X) == pytest.approx(Y)


def test_a_turn_and_its_inverse_are_none() -> None:
    assert composed(inverse(ABOUT_X), ABOUT_X) == pytest.approx([0, 0, 0, 1])


def test_a_turn_each_for_many_vectors() -> None:
    turns = np.stack([ABOUT_Z, ABOUT_X])
    assert applied(turns, np.stack([X, Y])) == pytest.approx(np.stack([Y, Z]))
