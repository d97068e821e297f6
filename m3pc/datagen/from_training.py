"""Make a data set where there is none: train a policy to a stated quality, keep what it did."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from m3pc.core.files import staged_directory
from m3pc.datagen.collect import collect, header_of
from m3pc.datagen.sac_training import CurvePoint, SACTraining, stated_return, train
from m3pc.plots import learning_curve
from m3pc.types import Episode, InputError
from replay.format.manifest import Header
from replay.store.store import Store, StoreWriter

STEPS = 200_000  # of a rolled-out set
MAX_STEPS = 1_000_000  # of training, where no number is given
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedDataRequest:
    """What the user asked for."""

    env_id: str
    out: Path
    quality: str
    steps: int | None  # None: all of a replay, STEPS of a policy
    target_return: float | None  # None: by the quality's score
    max_steps: int
    seed: int
    replay: Path | None  # where training episodes go beside a rolled-out set
    picture: Path


def make_dataset(order: TrainedDataRequest, on_progress: Report) -> tuple[Store, SACTraining]:
    """medium-replay: the training episodes, thinned to `steps`; else rollouts of the policy.

    All that can be found wrong is found before the training, which takes minutes to hours.
    """
    target = stated_return(order.env_id, order.quality, order.target_return)
    keeps_replay = order.quality == "medium-replay"
    if order.replay and (keeps_replay or order.replay == order.out):
        raise InputError("--replay is a second place, for medium and expert; leave it out")
    header = _header(order, target)
    order.picture.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stages:
        out = stages.enter_context(staged_directory(order.out))
        replay = stages.enter_context(staged_directory(order.replay)) if order.replay else None
        training = train(
            order.env_id,
            target_return=target,
            max_steps=order.max_steps,
            seed=order.seed,
            on_progress=lambda point: on_progress(_numbers(point)),
        )
        _draw(order, training, target)
        _refuse_missed(order, training, target)
        last = training.curve[-1]
        header = _with(
            header, reached_return=round(last.evaluation_return, 3), training_steps=last.steps
        )
        if keeps_replay:
            kept = thin(training.episodes, order.steps) if order.steps else training.episodes
            facts = {"content": "replay", "thinned": len(kept) < len(training.episodes)}
            _fill(out, _with(header, **facts), kept, on_progress)
        else:
            if replay:
                _fill(replay, _with(header, content="replay"), training.episodes, on_progress)
            steps = order.steps or STEPS
            rolled_out = collect(
                order.env_id,
                training.policy,
                steps=steps,
                seed=order.seed,
                version=training.version,
            )
            _fill(out, _with(header, content="rollouts", steps=steps), rolled_out, on_progress)
    return Store(order.out), training


def thin(episodes: Sequence[Episode], steps: int) -> list[Episode]:
    """Evenly spaced episodes, in order, `steps` steps at most, but one at least."""
    count = len(episodes)
    while True:
        # The middle of each of `count` equal parts; distinct, as a part is one episode or more.
        kept = [episodes[(2 * i + 1) * len(episodes) // (2 * count)] for i in range(count)]
        total = sum(map(len, kept))
        if total <= steps or count == 1:
            return kept
        count = max(min(count - 1, count * steps // total + 1), 1)


def _fill(folder: Path, header: Header, episodes: Iterable[Episode], on_progress: Report) -> None:
    writer = StoreWriter(folder, header)
    for episode in episodes:
        writer.append(episode)
        on_progress({"steps": writer.steps, "stored episodes": writer.episodes})
    writer.close()


def _header(order: TrainedDataRequest, target: float) -> Header:
    source = {
        "kind": "made",
        "quality": order.quality,
        "algorithm": "sac",
        "seed": order.seed,
        "target_return": round(target, 3),
    }
    return header_of(order.env_id, source)


def _with(header: Header, **facts: object) -> Header:
    return header.model_copy(update={"source": header.source | facts})


def _refuse_missed(order: TrainedDataRequest, training: SACTraining, target: float) -> None:
    if not training.reached:
        best = max(min(p.evaluation_return, p.training_return) for p in training.curve)
        raise InputError(
            f"{order.env_id} reached {best:.1f} in {order.max_steps} steps, not {target:.1f}; "
            "give more --max-steps, another --seed or a lower --target-return"
        )


def _numbers(point: CurvePoint) -> dict[str, Any]:
    return {
        "steps": point.steps,
        "evaluation return": point.evaluation_return,
        "training return": point.training_return,
    }


def _draw(order: TrainedDataRequest, training: SACTraining, target: float) -> None:
    learning_curve(
        order.picture,
        title=f"SAC on {order.env_id}, seed {order.seed}",
        steps=[point.steps for point in training.curve],
        evaluated=[point.evaluation_return for point in training.curve],
        episode_ends=list(accumulate(map(len, training.episodes))),
        episode_returns=[float(episode.rewards.sum()) for episode in training.episodes],
        target=target,
    )
