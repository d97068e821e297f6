"""The pictures in the folder of a finished run.

RUN/curve.png        the evaluations, and the policy's entropy beside its bound
RUN/exploration.png  the collected returns beside the offline level
"""

import logging
from collections.abc import Callable

from m3pc.online.exploration import (
    draw_exploration,
    offline_level,
    read_exploration,
    scaled,
    score_unit,
)
from m3pc.online.run_folder import OnlineRun
from m3pc.plots import online_curve
from m3pc.telemetry.catalogue import ENTROPY
from m3pc.tracking.run_log import read_metrics

CURVE, EXPLORATION = "curve.png", "exploration.png"

log = logging.getLogger(__name__)


def save_pictures(run: OnlineRun) -> None:
    """Draw both pictures. An error is logged and does not end the run."""
    pictures: tuple[Callable[[OnlineRun], None], ...] = (save_curve, save_exploration)
    for save in pictures:
        try:
            save(run)
        except Exception as error:
            log.warning("event=picture-failed which=%s reason=%r", save.__name__, error)


def save_curve(run: OnlineRun) -> None:
    rows = read_metrics(run.path, "evaluation")
    if not rows:
        return
    offset = scaled(run, 0.0)
    online_curve(
        run.path / CURVE,
        title=f"{run.path.resolve().name}: {run.info.env}, planner {run.config.planner.mode}",
        unit=score_unit(run),
        steps=[row["step"] for row in rows],
        values=[scaled(run, row["return"]) for row in rows],
        errors=[scaled(run, row["error"] or 0.0) - offset for row in rows],
        level=offline_level(run),
        entropies=_entropies(run),
        bound=run.config.entropy.target,
    )


def save_exploration(run: OnlineRun) -> None:
    exploration = read_exploration(run)
    if len(exploration.ends):
        draw_exploration([exploration], run.path / EXPLORATION)


def _entropies(run: OnlineRun) -> list[tuple[int, float]]:
    """Environment steps and entropy, as logged by a driver or by a lock-step run."""
    named = [(row, ENTROPY.name) for row in read_metrics(run.path, "fleet")]
    named += [(row, "entropy") for row in read_metrics(run.path, "learner")]
    return [(row["step"], row[name]) for row, name in named if row.get(name) is not None]
