"""`m3pc data`: import data sets, make them, look at them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m3pc.cli.options import (
    EnvId,
    MemoryLimit,
    Seed,
    StoreName,
    TimeLimit,
    check_picture,
    open_store,
    sandbox_limits,
)

if TYPE_CHECKING:
    from m3pc.datagen.from_scripts import ScriptedDataRequest
    from m3pc.datagen.from_training import TrainedDataRequest
    from replay.store.store import Store

app = typer.Typer(help="Import, make and inspect data sets.", no_args_is_help=True)

Out = Annotated[Path, typer.Argument(help="Folder of the new store; must not exist yet.")]


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="A file or Minari folder, or an id that is downloaded: d4rl:hopper-medium-v2, "
            "robomimic:lift/ph, minari:ID."
        ),
    ],
    out: Out,
    keys: Annotated[
        str,
        typer.Option(
            help="robomimic: observations that make up a state, in order, such as "
            "eef_pos,object[:3]. Default: those of the task."
        ),
    ] = "",
    subset: Annotated[
        str,
        typer.Option(
            help="robomimic: only the demonstrations of this mask, such as train, valid or good. "
            "Default: all."
        ),
    ] = "",
    horizon: Annotated[
        int | None,
        typer.Option(min=1, help="Step limit of the environment. Default: as the file says."),
    ] = None,
    env: EnvId = None,
    sha256: Annotated[
        str | None, typer.Option(help="Refuse the file unless it has this SHA-256 hash.")
    ] = None,
    memory_limit: MemoryLimit = 8.0,
    time_limit: TimeLimit = 600.0,
) -> None:
    """Convert D4RL, robomimic or Minari data into a verified store."""
    from m3pc.cli.progress import progress
    from m3pc.datagen.importing import ingest
    from m3pc.datasets.source import ImportOptions

    options = ImportOptions(keys=_names(keys), max_episode_steps=horizon, env=env, subset=subset)
    limits = sandbox_limits(memory_limit, time_limit)
    with progress(f"importing {source}", "steps") as report:
        store = ingest(source, out, options, limits, report, expected_sha256=sha256)
    _show_summary(store)
    known_by = store.header.source.get("environment")
    if known_by:
        typer.echo(f"environment: {store.header.env or 'none'} ({known_by})")
        typer.echo(f"recorded by: {store.header.source['recorded by']}")


@app.command()
def info(
    store: StoreName,
    png: Annotated[
        Path | None,
        typer.Option(
            callback=check_picture,
            help="File for the histogram of returns. Default: NAME-returns.png in this folder.",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; draw no picture.")
    ] = False,
) -> None:
    """Check every byte of a store, then show its size, returns, statistics and source."""
    from m3pc.cli import data_info
    from m3pc.plots import return_histogram

    opened = open_store(store)
    if json:
        typer.echo(data_info.as_json(opened))
        return
    data_info.show(opened)
    if opened.totals.episodes:
        name = opened.path.resolve().name
        picture = png or Path(f"{name}-returns.png")
        title = f"{name}: {opened.totals.episodes} episodes, {opened.totals.steps} steps"
        return_histogram(picture, opened.episode_returns, title=title)
        typer.echo(f"picture: {picture}")


@app.command()
def sample(
    store: StoreName,
    length: Annotated[int, typer.Option(min=1, help="Steps per window.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Windows per batch.")] = 2048,
    updates: Annotated[int, typer.Option(min=1, help="Batches to draw.")] = 200,
    seed: Seed = 0,
) -> None:
    """Draw random batches of windows as training does, and print how fast that was."""
    import hashlib
    import time

    from m3pc.core.returns import ReturnRule
    from replay.sampling.sampler import Sampler

    opened = open_store(store)
    rule = ReturnRule(max_episode_steps=opened.header.max_episode_steps)
    sampler = Sampler(opened, length=length, batch=batch, seed=seed, returns=rule)
    digest = hashlib.sha256()
    seconds = 0.0
    for update in range(updates):
        start = time.perf_counter()
        windows = sampler.batch(update)
        seconds += time.perf_counter() - start
        digest.update(windows.states.tobytes())
    shapes = ", ".join(f"{name} {list(getattr(windows, name).shape)}" for name in windows.__slots__)
    typer.echo(f"a batch: {shapes}")
    typer.echo(
        f"{updates} batches of {batch} from {len(sampler):,} different windows: "
        f"{updates * batch / seconds / 1e6:.2f} M windows/s"
    )
    typer.echo(f"states drawn with seed {seed}: sha256 {digest.hexdigest()[:16]}")


@app.command()
def regenerate(
    source: Annotated[
        str,
        typer.Argument(help="A D4RL .hdf5 or id that contains a policy, or an .npz with a policy."),
    ],
    out: Out,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps to collect; the last episode is completed.")
    ],
    seed: Seed = 0,
    env: EnvId = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Another policy, which takes turns with the first, an episode each. May be "
            "repeated.",
        ),
    ] = None,
    still: Annotated[
        bool,
        typer.Option(
            "--still", help="A policy of zero actions takes turns too; add --noise to move it."
        ),
    ] = False,
    order: Annotated[
        str,
        typer.Option(
            help="Order of the observations in the policy's training, such as "
            "object,eef_pos,eef_quat,... Default: the environment's."
        ),
    ] = "",
    noise: Annotated[
        float,
        typer.Option(
            min=0, help="Standard deviation of the noise added to each number of an action."
        ),
    ] = 0.0,
    memory_limit: MemoryLimit = 8.0,
    time_limit: TimeLimit = 600.0,
) -> None:
    """Collect new episodes with the policy that a file contains, on all cores."""
    from m3pc.cli.progress import progress
    from m3pc.datagen.regenerate import regenerate as run

    with progress(f"regenerating {source}", "steps") as report:
        store = run(
            source,
            out,
            steps=steps,
            seed=seed,
            env_id=env,
            limits=sandbox_limits(memory_limit, time_limit),
            on_progress=report,
            also=also or (),
            still=still,
            order=_names(order),
            noise=noise,
        )
    _show_summary(store)


MakeQuality = Annotated[
    str,
    typer.Option(
        help="medium, medium-replay or expert (a trained policy), or babble (random actions). "
        "For robosuite/Lift good or noisy, for robosuite/PickPlaceCan and robosuite/CanLim "
        "good, noisy or paired (scripts)."
    ),
]
MakeSteps = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Steps to collect. Default: 200,000; for medium-replay, all that training took.",
    ),
]
MakeNoise = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Scripts: standard deviation of the noise added to each number of an action. "
        "Default: each script's own.",
    ),
]
MakeStrays = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Scripts: slowly changing noise on the hand's path, as a share of its "
        "displacement. Default: 0.",
    ),
]
MakeStrength = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Of --quality babble: largest magnitude of an action's numbers. Default: 1.",
    ),
]
MakeTargetReturn = Annotated[
    float | None,
    typer.Option(help="Training: return at which it stops. Default: by D4RL's score."),
]
MakeMaxSteps = Annotated[
    int | None,
    typer.Option(min=1, help="Training: give up after so many steps. Default: 1,000,000."),
]
MakeReplay = Annotated[
    Path | None,
    typer.Option(help="medium, expert: store the training episodes in this folder, too."),
]
MakePng = Annotated[
    Path | None,
    typer.Option(
        callback=check_picture,
        help="File for the picture. Default: NAME-curve.png or NAME-roles.png in this folder.",
    ),
]


@app.command()
def make(
    env: Annotated[
        str, typer.Argument(help="Environment id, such as d4rl/Hopper-v2 or robosuite/Lift.")
    ],
    out: Annotated[
        Path | None, typer.Argument(help="Folder of the new store. Default: data/ENV-QUALITY.")
    ] = None,
    *,
    quality: MakeQuality,
    steps: MakeSteps = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="Scripts: episodes to collect. Default: 200.")
    ] = None,
    noise: MakeNoise = None,
    strays: MakeStrays = None,
    strength: MakeStrength = None,
    target_return: MakeTargetReturn = None,
    max_steps: MakeMaxSteps = None,
    seed: Seed = 0,
    replay: MakeReplay = None,
    png: MakePng = None,
) -> None:
    """Make a data set by training a policy (SAC), by scripts, or from random actions."""
    from m3pc.core.env_ids import split_env_name
    from m3pc.datagen import from_scripts, random_actions
    from m3pc.types import InputError

    out = out or Path("data") / f"{split_env_name(env)[0].rpartition('/')[2].lower()}-{quality}"
    is_random = quality == random_actions.QUALITY
    is_scripted = not is_random and from_scripts.is_scripted(env, quality)
    if is_random:
        how = "played at random, in so many --steps"
    else:
        how = "played by script" if is_scripted else "made by training, whose size is --steps"
    foreign: dict[str, object] = {}
    if not is_scripted:
        foreign |= {"--episodes": episodes, "--noise": noise, "--strays": strays}
    if is_scripted or is_random:
        foreign |= {"--target-return": target_return, "--max-steps": max_steps, "--replay": replay}
    foreign |= {"--png": png} if is_random else {"--strength": strength}
    given = [name for name, value in foreign.items() if value is not None]
    if given:
        raise InputError(f"{', '.join(given)} given, but {env} {quality} is {how}; leave it out")
    if is_random:
        max_strength = 1.0 if strength is None else strength
        _make_random(
            env, out, steps=steps or random_actions.STEPS, max_strength=max_strength, seed=seed
        )
    elif is_scripted:
        _make_scripted(
            from_scripts.ScriptedDataRequest(
                env_id=env,
                out=out,
                quality=quality,
                episodes=episodes,
                steps=steps,
                noise=noise,
                path_noise=strays,
                seed=seed,
                picture=png or Path(f"{out.name}-roles.png"),
            )
        )
    else:
        from m3pc.datagen.from_training import MAX_STEPS, TrainedDataRequest

        _make_trained(
            TrainedDataRequest(
                env_id=env,
                out=out,
                quality=quality,
                steps=steps,
                target_return=target_return,
                max_steps=max_steps or MAX_STEPS,
                seed=seed,
                replay=replay,
                picture=png or Path(f"{out.name}-curve.png"),
            )
        )


def _make_random(env: str, out: Path, *, steps: int, max_strength: float, seed: int) -> None:
    from m3pc.cli.progress import progress
    from m3pc.datagen.random_actions import make_random_dataset

    with progress(f"making {out.name}", "steps") as report:
        store = make_random_dataset(
            env, out, steps=steps, max_strength=max_strength, seed=seed, on_progress=report
        )
    _show_summary(store)


def _make_scripted(request: "ScriptedDataRequest") -> None:
    from m3pc.cli.progress import progress
    from m3pc.datagen.from_scripts import make_scripted_dataset

    unit = "steps" if request.steps else "episodes"
    with progress(f"making {request.out.name}", unit) as report:
        store, tallies = make_scripted_dataset(request, report)
    for tally in tallies:
        if tally.lengths:
            mean = sum(tally.lengths) / len(tally.lengths)
            succeed = f"{tally.successes} of {len(tally.lengths)} succeed"
            typer.echo(f"{tally.name}: {succeed}, {mean:.0f} steps on average")
    typer.echo(f"picture: {request.picture}")
    _show_summary(store)


def _make_trained(request: "TrainedDataRequest") -> None:
    from m3pc.cli.progress import progress
    from m3pc.datagen.from_training import make_trained_dataset

    with progress(f"making {request.out.name}", "steps") as report:
        store, training = make_trained_dataset(request, report)
    last = training.curve[-1]
    typer.echo(
        f"trained for {last.steps:,} steps, {len(training.episodes):,} episodes, "
        f"{last.cpu_seconds:.0f} CPU seconds; evaluation return {last.evaluation_return:.1f}"
    )
    typer.echo(f"picture: {request.picture}")
    _show_summary(store)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _show_summary(store: "Store") -> None:
    totals = store.totals
    typer.echo(
        f"{store.path}: {totals.episodes:,} episodes, {totals.steps:,} steps, "
        f"checksum {store.checksum[:16]}"
    )
