"""Planning requests of every kind, good and bad, for windows of small weights."""

from dataclasses import replace
from typing import Any

import numpy as np

from m3pc.config.schema import MODES
from m3pc.types import PlanRequest
from tests.support.models.small_weights import windows


def mixed_requests() -> list[PlanRequest]:
    """All modes, exploring or not, at several positions in the window, with 1 to 3 rows, shuffled.

    The ratio of each position differs, so that no two can be mistaken for each other.
    """
    positions = zip(([4, 0, 2], [4], [1, 4]), (None, 0.5, 1.2), strict=True)
    kinds = [
        (mode, explore, now, ratio)
        for now, ratio in positions
        for mode in (None, *MODES)
        for explore in (False, True)
    ]
    requests = [
        PlanRequest(window=windows(now, seed=n), mode=mode, ratio=ratio, explore=explore)
        for n, (mode, explore, now, ratio) in enumerate(kinds)
    ]
    order = np.random.default_rng(0).permutation(len(requests))
    return [requests[n] for n in order]


GOOD = windows([4, 2])


def with_arrays(**arrays: Any) -> PlanRequest:
    return PlanRequest(window=replace(GOOD, **arrays))


BAD_REQUESTS: dict[str, tuple[PlanRequest, str]] = {  # and words of the refusal
    "unknown mode": (PlanRequest(window=GOOD, mode="best"), "mode is 'best'"),
    "ratio that is no number": (PlanRequest(window=GOOD, ratio=float("nan")), "ratio"),
    "negative ratio": (PlanRequest(window=GOOD, ratio=-0.1), "ratio"),
    "huge ratio": (PlanRequest(window=GOOD, ratio=1e9), "ratio"),
    "shorter": (PlanRequest(window=windows([4, 2], length=7)), "expected"),
    "fewer states": (with_arrays(states=GOOD.states[..., :4]), "states"),
    "fewer actions": (with_arrays(actions=GOOD.actions[..., :1]), "actions"),
    "fewer rows": (with_arrays(steps=GOOD.steps[:1]), "steps"),
    "two dimensions": (with_arrays(now=GOOD.now[:, None]), "now"),
    "doubles": (with_arrays(states=GOOD.states.astype("f8")), "float64"),
    "objects": (with_arrays(states=GOOD.states.astype(object)), "object"),
    "a list": (with_arrays(states=GOOD.states.tolist()), "list"),
    "nothing": (with_arrays(now=None), "now are a NoneType"),
    "not finite": (with_arrays(states=GOOD.states * np.float32(np.inf)), "NaN"),
    "actions not finite": (with_arrays(actions=GOOD.actions * np.float32(np.nan)), "NaN"),
    "beyond the window": (with_arrays(now=GOOD.now + 4), "current step"),
    "before the window": (with_arrays(now=GOOD.now - 3), "current step"),
    "negative seed": (with_arrays(seeds=GOOD.seeds - 5), "seeds"),
    "negative step": (with_arrays(steps=GOOD.steps - 50), "steps"),
}
