"""The ratio of samples (what the learner draws) to inserts (what actors collect).

    error = inserts * samples_per_insert - samples

grows with every insert and shrinks with every sample. The rate limiter keeps it inside a band: at
the upper edge inserts wait, at the lower edge samples do. Logged data are no inserts: only what the
run collects counts.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from m3pc.types import InputError

FINEST = 10**6  # samples per insert are a fraction with at most this denominator: 0.2 is a fifth


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """The band of the error, and how much either side does at a time.

    An insert of n is allowed if it leaves error <= max_diff; a batch may be drawn once min_size
    were inserted, if it leaves error >= min_diff. Limits under which both sides could wait for each
    other are refused. With s = samples_per_insert and m = max_insert,

        (1)  s * (min_size - 1 + m) <= max_diff           (where min_size > 0)
        (2)  batch + s * m <= max_diff - min_diff

    guarantee that one side at least is allowed, whatever the counters (from 0 up) are:
    while inserts < min_size, error <= s * inserts <= s * (min_size - 1), so by (1) an insert of m
    is allowed. From then on, if an insert of m is not, error > max_diff - s * m >= min_diff + batch
    by (2), so a batch is. Whatever is allowed moves the error towards the other side's condition by
    a fixed amount, so no side waits indefinitely while the other one works. Counters outside the
    band, as a restart with new limits may find them, are no exception: the side that is behind
    works, the other waits. Up to the granularity of the error, both conditions are necessary:
    without (1), an insert of m can wait, after inserts of 1, for the first batch; without (2),
    there are errors at which nothing is allowed.
    """

    samples_per_insert: Fraction
    batch: int  # samples drawn at a time
    max_insert: int  # largest single insert
    min_size: int  # inserts before the first sample; episodes that retention dropped count too
    min_diff: Fraction
    max_diff: Fraction

    def __post_init__(self) -> None:
        positive = self.samples_per_insert > 0 and self.batch > 0 and self.max_insert > 0
        if not positive or self.min_size < 0:
            raise InputError(
                f"{self.samples_per_insert} samples per insert, batches of {self.batch}, inserts of"
                f" up to {self.max_insert}, {self.min_size} before the first batch; give numbers "
                "above 0, the last 0 or more"
            )
        reached = self.samples_per_insert * (self.min_size - 1 + self.max_insert)
        if self.min_size and self.max_diff < reached:
            raise InputError(
                f"inserts would wait for samples before the first batch may be drawn: max_diff is "
                f"{float(self.max_diff):g}, expected {float(reached):g} or more; raise it, or "
                "lower min_size or max_insert"
            )
        width = self.batch + self.samples_per_insert * self.max_insert
        if self.max_diff - self.min_diff < width:
            raise InputError(
                f"inserts and samples could wait for each other: from min_diff to max_diff are "
                f"{float(self.max_diff - self.min_diff):g}, expected {float(width):g} or more; "
                "widen the band, or lower batch or max_insert"
            )


@dataclass(frozen=True, slots=True)
class SampleInsertRatio:
    """The counters of a run under its limits: an immutable value.

    After a restart inserts come from the store, samples from the learner's checkpoint, and the
    limits from the new configuration.
    """

    limits: RateLimits
    inserts: int = 0
    samples: int = 0

    def __post_init__(self) -> None:
        if self.inserts < 0 or self.samples < 0:
            raise InputError(
                f"{self.inserts} inserts and {self.samples} samples are counted; expected 0 or "
                "more; give what the store and the checkpoint have counted"
            )

    @property
    def error(self) -> Fraction:
        return self.inserts * self.limits.samples_per_insert - self.samples

    def samples_missing(self, count: int) -> int:
        """How many samples must be drawn before an insert of `count`; 0: it is allowed now."""
        if not 0 < count <= self.limits.max_insert:
            raise InputError(
                f"an insert of {count}; expected 1 to {self.limits.max_insert}, the largest that "
                "the limits are known to be live for; raise max_insert"
            )
        after = self.error + count * self.limits.samples_per_insert
        return max(math.ceil(after - self.limits.max_diff), 0)

    @property
    def max_samples(self) -> int:
        """How many samples the present inserts allow in all."""
        if self.inserts < self.limits.min_size:
            return 0
        earned = self.inserts * self.limits.samples_per_insert
        return max(math.floor(earned - self.limits.min_diff), 0)
