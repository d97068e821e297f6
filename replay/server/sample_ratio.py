"""How many samples are drawn for each one that is inserted. Both are counted in transitions.

    error = inserts * samples_per_insert - samples

grows with what is collected and shrinks with what is learnt from; both sides wait for each other
at the edges of a band. Logged data are not inserts: only what the run collects counts.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from m3pc.types import InputError

FINEST = 10**6  # samples per insert are a fraction with at most this denominator: 0.2 is a fifth


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """The band, and what one step of either side is.

    An insert of n is allowed if it leaves error <= max_diff; a batch may be drawn once min_size
    were inserted, if it leaves error >= min_diff. Refused where both sides could wait for each
    other. With s = samples_per_insert and m = max_insert it takes

        (1)  s * (min_size - 1 + m) <= max_diff           (where min_size > 0)
        (2)  batch + s * m <= max_diff - min_diff

    for one side at least to be allowed, whatever the counters (from 0 up) are:
    while inserts < min_size, error <= s * inserts <= s * (min_size - 1), so by (1) an insert of m
    is allowed. From then on, if an insert of m is not, error > max_diff - s * m >= min_diff + batch
    by (2), so a batch is. What is allowed moves the error towards the other side's condition by a
    fixed amount, so neither waits for ever while the other one works. Counters outside the band, as
    a restart with new limits may find them, are no exception: who is behind works, the other waits.
    But for the grain of the error no less would do: without (1), single inserts lead to where one
    of m waits for the first batch; without (2), there are errors at which nothing is allowed.
    """

    samples_per_insert: Fraction
    batch: int  # drawn at a time
    max_insert: int  # inserted at a time, at most
    min_size: int  # inserted before anything is drawn; what retention drops still counts
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
        least = self.samples_per_insert * (self.min_size - 1 + self.max_insert)
        if self.min_size and self.max_diff < least:
            raise InputError(
                f"inserts would wait for samples before the first batch may be drawn: max_diff is "
                f"{float(self.max_diff):g}, expected {float(least):g} or more; raise it, or lower "
                "min_size or max_insert"
            )
        width = self.batch + self.samples_per_insert * self.max_insert
        if self.max_diff - self.min_diff < width:
            raise InputError(
                f"inserts and samples could wait for each other: from min_diff to max_diff are "
                f"{float(self.max_diff - self.min_diff):g}, expected {float(width):g} or more; "
                "widen the band, or lower batch or max_insert"
            )


def limits(
    *, samples_per_insert: float, batch: int, max_insert: int, min_size: int, slack: float = 0.0
) -> RateLimits:
    """The narrowest live band with samples_per_insert * min_size in its middle, and `slack` on both
    sides of it: with more, bursts of one side make the other wait less often."""
    ratio = Fraction(samples_per_insert).limit_denominator(FINEST)
    centre = ratio * min_size
    reach = max((batch + ratio * max_insert) / 2, ratio * (max_insert - 1)) + Fraction(slack)
    return RateLimits(
        samples_per_insert=ratio,
        batch=batch,
        max_insert=max_insert,
        min_size=min_size,
        min_diff=centre - reach,
        max_diff=centre + reach,
    )


@dataclass(frozen=True, slots=True)
class SampleInsertRatio:
    """The counters of a run under its limits: a value, without clock or lock.

    After a restart the counters come from outside (inserts from the store, samples from the
    learner's checkpoint) and the limits from the new configuration.
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
        """That must be drawn before `count` may be inserted; 0: they may now."""
        if not 0 < count <= self.limits.max_insert:
            raise InputError(
                f"an insert of {count}; expected 1 to {self.limits.max_insert}, the largest that "
                "the limits are known to be live for; raise max_insert"
            )
        after = self.error + count * self.limits.samples_per_insert
        return max(math.ceil(after - self.limits.max_diff), 0)

    def inserts_missing(self) -> int:
        """That must come before the next batch may be drawn; 0: it may now."""
        short = self.limits.min_diff + self.limits.batch - self.error
        missing = math.ceil(short / self.limits.samples_per_insert)
        return max(missing, self.limits.min_size - self.inserts, 0)

    @property
    def most_samples(self) -> int:
        """That may be drawn in all before more is inserted."""
        if self.inserts < self.limits.min_size:
            return 0
        earned = self.inserts * self.limits.samples_per_insert
        return max(math.floor(earned - self.limits.min_diff), 0)

    def inserted(self, count: int) -> "SampleInsertRatio":
        assert not self.samples_missing(count)
        return replace(self, inserts=self.inserts + count)

    def sampled(self) -> "SampleInsertRatio":
        assert not self.inserts_missing()
        return replace(self, samples=self.samples + self.limits.batch)

    def forgiven(self) -> "SampleInsertRatio":
        """With the nearest number of samples that is inside the band. For a restart with another
        samples_per_insert: the ratio holds from now on, and nobody has to make up for the past.
        After a crash nothing is forgiven: a learner draws again what it has lost."""
        earned = self.inserts * self.limits.samples_per_insert
        low = math.ceil(earned - self.limits.max_diff)
        high = math.floor(earned - self.limits.min_diff)
        return replace(self, samples=max(min(max(self.samples, low), high), 0))
