"""Quaternions, by quarter turns."""

import numpy as np
import pytest

from m3pc.goals.quaternions import compose, inverse, rotate

HALF = 0.5**0.5
ABOUT_X, ABOUT_Z = np.array([HALF, 0, 0, HALF]), np.array([0, 0, HALF, HALF])
X, Y, Z = np.eye(3)


def test_a_quarter_turn_about_z_brings_x_to_y() -> None:
    assert rotate(ABOUT_Z, np.stack([X, Y, Z])) == pytest.approx(np.stack([Y, -X, Z]))


def test_turns_are_done_from_the_right_to_the_left() -> None:
    both = compose(ABOUT_X, ABOUT_Z)
    assert rotate(both, X) == pytest.approx(rotate(ABOUT_X, rotate(ABOUT_Z, X)))
    assert rotate(both, X) == pytest.approx(Z)
    assert rotate(compose(ABOUT_Z, ABOUT_X), X) == pytest.approx(Y)


def test_a_turn_and_its_inverse_are_none() -> None:
    assert compose(inverse(ABOUT_X), ABOUT_X) == pytest.approx([0, 0, 0, 1])


def test_a_turn_each_for_many_vectors() -> None:
    turns = np.stack([ABOUT_Z, ABOUT_X])
    assert rotate(turns, np.stack([X, Y])) == pytest.approx(np.stack([Y, Z]))
