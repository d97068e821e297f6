"""Numbers of several rounds as Markdown, and whether they reach what was aimed at."""

from collections.abc import Sequence

import numpy as np


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


def quartiles(values: Sequence[float]) -> list[float]:
    return [round(float(value), 4) for value in np.quantile(values, (0.25, 0.5, 0.75))]


def ratios(tops: Sequence[float], bottoms: Sequence[float]) -> list[float]:
    """Quartiles over the rounds: each compares two turns of the same round."""
    return quartiles([top / bottom for top, bottom in zip(tops, bottoms, strict=True)])


def shown(found: Sequence[float]) -> str:
    low, middle, high = found
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def judge(what: str, found: float, aim: float) -> None:
    print(f"- {what}: {found:.2f}, aim {aim:g}: {'reached' if found >= aim else 'MISSED'}")
