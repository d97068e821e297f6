"""The callback by which long work reports how far it is."""

from collections.abc import Callable, Mapping
from typing import Any

# Takes {unit: done, "of": total, any other number to show: its value}.
OnProgress = Callable[[Mapping[str, Any]], None]


def ignore_progress(numbers: Mapping[str, Any]) -> None:
    """The OnProgress that shows nothing."""
