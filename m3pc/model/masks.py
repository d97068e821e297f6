"""Which tokens the model is given: True visible, False hidden and predicted. T steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from m3pc.config.schema import MasksConfig, PivotConfig

Mask = NDArray[np.bool_]  # [modality, T]
StepRange = NDArray[np.int64]  # [T]

MODALITIES = ("states", "actions", "rewards", "returns")
STATES, ACTIONS, REWARDS, RETURNS = range(4)

SPANS: Mapping[str, Callable[[StepRange, int], NDArray[np.bool_]]] = {  # -> [T]
    "none": lambda t, now: t < 0,
    "past": lambda t, now: t < now,
    "seen": lambda t, now: t <= now,
    "ends": lambda t, now: (t <= now) | (t == t[-1]),  # up to now, and the goal
    "all": lambda t, now: t >= 0,
}
# fmt: off
PATTERNS = {
    #             states  actions  rewards  returns
    "policy":   ("seen", "past",  "none",  "all"),
    "dynamics": ("seen", "all",   "none",  "none"),
    "path":     ("ends", "past",  "none",  "none"),
    "inverse":  ("all",  "past",  "none",  "none"),
}
# fmt: on


class TokenIndex(NamedTuple):
    """A token: one modality at one step of the window."""

    modality: int
    step: int


@cache
def visible(pattern: str, *, now: int, length: int) -> Mask:
    """A pattern on windows of `length` steps with the current one at `now`. Read-only."""
    t = np.arange(length)
    mask = np.stack([SPANS[span](t, now) for span in PATTERNS[pattern]])
    mask.flags.writeable = False
    return mask


def token_mask(length: int, steps: Mapping[int, Iterable[int]]) -> Mask:
    """A mask of the named steps of each modality, for example of the tokens to read."""
    mask = np.zeros((len(MODALITIES), length), np.bool_)
    for modality, span in steps.items():
        mask[modality, list(span)] = True
    return mask


def token_indices(mask: Mask) -> list[TokenIndex]:
    """The tokens of a mask, ordered by modality and then by step."""
    return [TokenIndex(int(modality), int(step)) for modality, step in np.argwhere(mask)]


def draw_mask(config: MasksConfig, length: int, rng: np.random.Generator) -> Mask:
    """Draw a training mask of a kind from the mixture; a pattern gets a random current step."""
    kinds = config.mixture.model_dump()
    kind = rng.choice(list(kinds), p=_shares(list(kinds.values())))
    if kind == "random":
        return _random(config, length, rng)
    return visible(str(kind), now=int(rng.integers(length)), length=length)


def _random(config: MasksConfig, length: int, rng: np.random.Generator) -> Mask:
    """Keep a share of each modality at random, then cut all of them off at a random step.

    Modalities before the pivot keep their steps up to and including the cut, the pivot and those
    after it only the steps before. At least one action stays hidden, as a target of the likelihood.
    """
    mask = np.zeros((len(MODALITIES), length), np.bool_)
    for row in mask:
        row[rng.permutation(length)[: int(length * rng.choice(config.keep_ratios))]] = True
    order = list(PivotConfig.model_fields)  # not the order of MODALITIES
    cut = int(rng.integers(length))
    pivot = int(rng.choice(len(order), p=_shares(list(config.pivot.model_dump().values()))))
    for rank, name in enumerate(order):
        mask[MODALITIES.index(name), cut + (rank < pivot) :] = False
    if mask[ACTIONS].all():
        mask[ACTIONS, -1] = False
    return mask


def _shares(weights: Sequence[float]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = np.asarray(weights) / np.sum(weights)
    return shares
