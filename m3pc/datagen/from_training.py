"""`m3pc data make` by training: SAC reaches a stated return; its episodes become the data set."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from actors.single_env import SinglePolicy
from m3pc.core.files import staged_directory
from m3pc.core.progress import OnProgress
from m3pc.datagen.collect import collect, header_of
from m3pc.datagen.sac_training import CurvePoint, SACTraining, target_return_of, train
from m3pc.plots import learning_curve
from m3pc.types import Episode, InputError
from replay.format.manifest import Header
from replay.store.store import Store, StoreWriter

STEPS = 200_000  # default size of a set of rollouts
MAX_STEPS = 1_000_000  # default limit of the training


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedDataRequest:
    """The options of the command."""

    env_id: str
    out: Path
    quality: str
    steps: int | None  # None: all of a replay, STEPS of rollouts
    target_return: float | None  # None: by the quality's score
    max_steps: int
    seed: int
    replay: Path | None  # second store, which keeps the training episodes beside rollouts
    picture: Path


def make_trained_dataset(
    request: TrainedDataRequest, on_progress: OnProgress
) -> tuple[Store, SACTraining]:
    """Train, then store the data set.

    medium-replay keeps the training episodes, thinned to `steps`; the other qualities keep rollouts
    of the final policy. Options are checked before the training, which takes minutes to hours.
    """
    target = target_return_of(request.env_id, request.quality, request.target_return)
    keeps_replay = request.quality == "medium-replay"
    if request.replay and (keeps_replay or request.replay == request.out):
        raise InputError("--replay is a second place, for medium and expert; leave it out")
    source = {
        "kind": "made",
        "quality": request.quality,
        "algorithm": "sac",
        "seed": request.seed,
        "target_return": round(target, 3),
    }
    header = header_of(request.env_id, source)
    request.picture.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stages:
        out = stages.enter_context(staged_directory(request.out))
        replay = stages.enter_context(staged_directory(request.replay)) if request.replay else None
        training = train(
            request.env_id,
            target_return=target,
            max_steps=request.max_steps,
            seed=request.seed,
            on_progress=lambda point: on_progress(_progress(point)),
        )
        _draw(request, training, target)
        _require_target(request, training, target)
        last = training.curve[-1]
        header = _with(
            header, reached_return=round(last.evaluation_return, 3), training_steps=last.steps
        )
        if keeps_replay:
            episodes = (
                thin(training.episodes, request.steps) if request.steps else training.episodes
            )
            facts = {"content": "replay", "thinned": len(episodes) < len(training.episodes)}
            _fill(out, _with(header, **facts), episodes, on_progress)
        else:
            if replay:
                _fill(replay, _with(header, content="replay"), training.episodes, on_progress)
            steps = request.steps or STEPS
            rollouts = collect(
                request.env_id,
                SinglePolicy(training.policy),
                steps=steps,
                seed=request.seed,
                version=training.version,
            )
            _fill(out, _with(header, content="rollouts", steps=steps), rollouts, on_progress)
    return Store(request.out), training


def _require_target(request: TrainedDataRequest, training: SACTraining, target: float) -> None:
    if not training.reached:
        best = max(min(p.evaluation_return, p.training_return) for p in training.curve)
        raise InputError(
            f"{request.env_id} reached {best:.1f} in {request.max_steps} steps, not {target:.1f}; "
            "give more --max-steps, another --seed or a lower --target-return"
        )


def thin(episodes: Sequence[Episode], steps: int) -> list[Episode]:
    """Evenly spaced episodes, in order, of at most `steps` steps; at least one episode."""
    count = len(episodes)
    while True:
        # The middle of each of `count` equal parts; distinct, as a part has at least one episode.
        kept = [episodes[(2 * i + 1) * len(episodes) // (2 * count)] for i in range(count)]
        total = sum(map(len, kept))
        if total <= steps or count == 1:
            return kept
        count = max(min(count - 1, count * steps // total + 1), 1)


def _fill(
    folder: Path, header: Header, episodes: Iterable[Episode], on_progress: OnProgress
) -> None:
    writer = StoreWriter(folder, header)
    for episode in episodes:
        writer.append(episode)
        on_progress({"steps": writer.steps, "stored episodes": writer.episodes})
    writer.close()


def _with(header: Header, **facts: object) -> Header:
    return header.model_copy(update={"source": header.source | facts})


def _progress(point: CurvePoint) -> dict[str, float]:
    return {
        "steps": point.steps,
        "evaluation return": point.evaluation_return,
        "training return": point.training_return,
    }


def _draw(request: TrainedDataRequest, training: SACTraining, target: float) -> None:
    learning_curve(
        request.picture,
        title=f"SAC on {request.env_id}, seed {request.seed}",
        steps=[point.steps for point in training.curve],
        evaluated=[point.evaluation_return for point in training.curve],
        episode_ends=list(accumulate(map(len, training.episodes))),
        episode_returns=[float(episode.rewards.sum()) for episode in training.episodes],
        target=target,
    )
