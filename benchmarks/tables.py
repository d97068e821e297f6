"""Markdown tables of benchmark results, with quartiles over rounds and comparisons with aims."""

from collections.abc import Sequence

import numpy as np


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


def quartiles(values: Sequence[float]) -> list[float]:
    return [round(float(value), 4) for value in np.quantile(values, (0.25, 0.5, 0.75))]


def ratios(tops: Sequence[float], bottoms: Sequence[float]) -> list[float]:
    """Quartiles of ratios: the two measurements of a round are compared with each other."""
    return quartiles([top / bottom for top, bottom in zip(tops, bottoms, strict=True)])


def shown(values: Sequence[float]) -> str:
    """A median with its quartiles, as `quartiles` gives them."""
    low, middle, high = values
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def judge(name: str, value: float, aim: float) -> None:
    """Print whether a value reaches its aim."""
    print(f"- {name}: {value:.2f}, aim {aim:g}: {'reached' if value >= aim else 'MISSED'}")
