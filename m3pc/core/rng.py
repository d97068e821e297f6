"""Random streams as functions of seed, update and purpose, without any state to save."""

import numpy as np

# Purposes of streams.
BATCH, MASKS, NOISE, CRITIC_BATCH, PLAN, BUFFER, MEASURED_BATCH = range(7)


def counter_stream(seed: int, update: int, purpose: int = BATCH) -> np.random.Generator:
    """The stream of one update or step: Philox is a function of key and counter."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, purpose, update, 0]))


class ReusableStream:
    """One generator that moves to the start of any stream: cheaper than `counter_stream` if few
    numbers are drawn from each of many streams."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._start = self._bits.state
        self._rng = np.random.Generator(self._bits)

    def at(self, seed: int, update: int, purpose: int = BATCH) -> np.random.Generator:
        """The generator, moved to where `counter_stream` would start; valid until the next call."""
        self._start["state"]["key"][:] = seed, 0
        self._start["state"]["counter"][:] = 0, purpose, update, 0
        self._bits.state = self._start
        return self._rng
