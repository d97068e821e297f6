"""Random streams as functions of numbers."""

import numpy as np

from m3pc.core.rng import BUFFER, PLAN, ReusableStream, counter_stream

PLACES = [(0, 0, 0), (3, 7, PLAN), (2**63 - 1, 10**6, BUFFER), (3, 7, PLAN), (3, 8, PLAN)]


def test_a_reused_generator_draws_what_a_new_one_draws() -> None:
    mover = ReusableStream()
    for place in PLACES:
        new, moved = counter_stream(*place), mover.at(*place)
        for rng in (new, moved):  # leaves half of a number behind, for the next draw of 32 bits
            rng.random(dtype=np.float32)
        assert new.random() == moved.random()
        noise = [rng.standard_normal(9, dtype=np.float32) for rng in (new, moved)]
        assert noise[0].tobytes() == noise[1].tobytes()
        assert new.integers(2**31, dtype=np.int32) == moved.integers(2**31, dtype=np.int32)
