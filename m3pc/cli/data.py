"""`m3pc data`: bring trajectories in, make them, look at them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m3pc.cli.picture import picture

if TYPE_CHECKING:
    from m3pc.datagen import from_scripts
    from m3pc.datagen import from_training as training_run
    from m3pc.datasets.sandbox import SandboxLimits
    from replay.store.store import Store

app = typer.Typer(help="Import, make and look at data sets.", no_args_is_help=True)

Out = Annotated[Path, typer.Argument(help="Where the store goes; must not exist yet.")]
StorePath = Annotated[str, typer.Argument(help="A store, or shipped:NAME.")]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same data, to the bit.")]
MemoryLimit = Annotated[
    float, typer.Option(min=0.25, max=4096, help="GiB that reading a foreign file may take.")
]
TimeLimit = Annotated[
    float, typer.Option(min=1, max=86400, help="Seconds that reading a foreign file may take.")
]
EnvId = Annotated[
    str | None, typer.Option("--env", help="Environment id, where the file does not say.")
]
Horizon = Annotated[int | None, typer.Option(min=1, help="The environment's step limit.")]


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="A file or Minari folder, or d4rl:hopper-medium-v2, robomimic:lift/ph, minari:ID."
        ),
    ],
    out: Out,
    keys: Annotated[
        str,
        typer.Option(help="Observations to join, in order: eef_pos,object[:3] or full names."),
    ] = "",
    subset: Annotated[
        str, typer.Option(help="Only the demonstrations of this mask: train, valid, good, ...")
    ] = "",
    horizon: Horizon = None,
    env: EnvId = None,
    sha256: Annotated[
        str | None, typer.Option(help="Refuse the file unless it has this hash.")
    ] = None,
    memory_limit: MemoryLimit = 8.0,
    time_limit: TimeLimit = 600.0,
) -> None:
    """Turn D4RL, robomimic or Minari data into one verified Arrow store."""
    from m3pc.cli.progress import progress
    from m3pc.datagen.importing import ingest
    from m3pc.datasets.source import ImportOptions

    options = ImportOptions(keys=_names(keys), max_episode_steps=horizon, env=env, subset=subset)
    with progress(f"importing {source}", "steps") as report:
        store = ingest(
            source, out, options, _limits(memory_limit, time_limit), report, expected_sha256=sha256
        )
    _done(store)
    known_by = store.header.source.get("environment")
    if known_by:
        typer.echo(f"environment: {store.header.env or 'none'} ({known_by})")
        typer.echo(f"recorded by: {store.header.source['recorded by']}")


@app.command()
def info(
    store: StorePath,
    png: Annotated[
        Path | None,
        typer.Option(callback=picture, help="Histogram of returns; default NAME-returns.png here."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Everything as JSON, no picture.")] = False,
) -> None:
    """Episodes, steps, returns, statistics, checksum and source; every byte is checked first."""
    from m3pc.cli import data_info

    found = open_store(store)
    if json:
        typer.echo(data_info.as_json(found))
        return
    data_info.show(found)
    if not found.totals.episodes:
        return
    from m3pc.plots import return_histogram

    picture = png or Path(f"{found.path.resolve().name}-returns.png")
    title = (
        f"{found.path.resolve().name}: {found.totals.episodes} episodes, {found.totals.steps} steps"
    )
    return_histogram(picture, found.episode_returns, title=title)
    typer.echo(f"picture: {picture}")


@app.command()
def sample(
    store: StorePath,
    length: Annotated[int, typer.Option(min=1, help="Steps a piece.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Pieces a batch.")] = 2048,
    updates: Annotated[int, typer.Option(min=1, help="Batches to draw.")] = 200,
    seed: Seed = 0,
) -> None:
    """Draw random pieces of T steps as a learner would, and say how fast that went."""
    import hashlib
    import time

    from m3pc.core.returns import ReturnRule
    from replay.sampling.sampler import Sampler

    found = open_store(store)
    rule = ReturnRule(max_episode_steps=found.header.max_episode_steps)
    sampler = Sampler(found, length=length, batch=batch, seed=seed, returns=rule)
    digest = hashlib.sha256()
    seconds = 0.0
    for update in range(updates):
        start = time.perf_counter()
        drawn = sampler.batch(update)
        seconds += time.perf_counter() - start
        digest.update(drawn.states.tobytes())
    shapes = ", ".join(f"{name} {list(getattr(drawn, name).shape)}" for name in drawn.__slots__)
    typer.echo(f"a batch: {shapes}")
    typer.echo(
        f"{updates} batches of {batch} from {len(sampler):,} different pieces: "
        f"{updates * batch / seconds / 1e6:.2f} M pieces/s"
    )
    typer.echo(f"states drawn with seed {seed}: sha256 {digest.hexdigest()[:16]}")


@app.command()
def regenerate(
    source: Annotated[
        str,
        typer.Argument(help="D4RL .hdf5 or id with a policy inside, or an .npz that is one."),
    ],
    out: Out,
    steps: Annotated[int, typer.Option(min=1, help="Stop after the episode that completes them.")],
    seed: Seed = 0,
    env: EnvId = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE", help="A policy that takes turns with it, an episode each. Repeatable."
        ),
    ] = None,
    still: Annotated[
        bool,
        typer.Option("--still", help="One that does nothing takes turns, too; see --noise."),
    ] = False,
    order: Annotated[
        str, typer.Option(help="The policy's order of observations: object,eef_pos,eef_quat,...")
    ] = "",
    noise: Annotated[
        float, typer.Option(min=0, help="Standard deviation of what is added to its actions.")
    ] = 0.0,
    memory_limit: MemoryLimit = 8.0,
    time_limit: TimeLimit = 600.0,
) -> None:
    """Roll out the behaviour policy that a file holds, or several in turn, on all cores."""
    from m3pc.cli.progress import progress
    from m3pc.datagen.regenerate import regenerate as run

    with progress(f"regenerating {source}", "steps") as report:
        store = run(
            source,
            out,
            steps=steps,
            seed=seed,
            env_id=env,
            limits=_limits(memory_limit, time_limit),
            on_progress=report,
            also=also or (),
            still=still,
            order=_names(order),
            noise=noise,
        )
    _done(store)


@app.command()
def make(
    env: Annotated[
        str, typer.Argument(help="Environment id, such as d4rl/Hopper-v2 or robosuite/Lift.")
    ],
    out: Annotated[
        Path | None, typer.Argument(help="Where the store goes; default data/ENV-QUALITY.")
    ] = None,
    *,
    quality: Annotated[
        str,
        typer.Option(
            help="medium, medium-replay, expert or babble; for robosuite/Lift good or noisy; for "
            "robosuite/PickPlaceCan and robosuite/CanLim good, noisy or paired."
        ),
    ],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Size; default 200,000, or all of a replay.")
    ] = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="Size of a scripted set; default 200.")
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            min=0, help="Of a scripted set: added to each number of an action; default by role."
        ),
    ] = None,
    strays: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Likewise: slow pushes on the hand, as a share of its displacement; default 0.",
        ),
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="The strongest action of babble, per number; default 1."),
    ] = None,
    target_return: Annotated[
        float | None, typer.Option(help="Where training stops; default by D4RL's scale.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Stop training after so many; default 1,000,000.")
    ] = None,
    seed: Seed = 0,
    replay: Annotated[
        Path | None, typer.Option(help="Keep the training episodes of medium or expert here too.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            callback=picture, help="The picture; default NAME-curve.png or -roles.png here."
        ),
    ] = None,
) -> None:
    """Train a SAC until it reaches a stated return; keep its replay, or roll it out. Lift and Can
    of robosuite are played by scripts instead; babble is random actions."""
    from m3pc.core.env_ids import parted
    from m3pc.datagen import from_scripts, random_actions
    from m3pc.types import InputError

    out = out or Path("data") / f"{parted(env)[0].rpartition('/')[2].lower()}-{quality}"
    babbled = quality == random_actions.QUALITY
    scripted = not babbled and from_scripts.is_scripted(env, quality)
    if babbled:
        how = "played at random, in so many --steps"
    else:
        how = "played by script" if scripted else "made by training, whose size is --steps"
    strange: dict[str, object] = {}
    if not scripted:
        strange |= {"--episodes": episodes, "--noise": noise, "--strays": strays}
    if scripted or babbled:
        strange |= {"--target-return": target_return, "--max-steps": max_steps, "--replay": replay}
    strange |= {"--png": png} if babbled else {"--strength": strength}
    given = [name for name, value in strange.items() if value is not None]
    if given:
        raise InputError(f"{', '.join(given)} given, but {env} {quality} is {how}; leave it out")
    if babbled:
        strongest = 1.0 if strength is None else strength
        _babble(env, out, steps=steps or random_actions.STEPS, strongest=strongest, seed=seed)
        return
    if scripted:
        _play(
            from_scripts.ScriptedDataRequest(
                env_id=env,
                out=out,
                quality=quality,
                episodes=episodes,
                steps=steps,
                noise=noise,
                strays=strays,
                seed=seed,
                picture=png or Path(f"{out.name}-roles.png"),
            )
        )
        return
    from m3pc.datagen.from_training import MAX_STEPS, TrainedDataRequest

    _train(
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


def _babble(env: str, out: Path, *, steps: int, strongest: float, seed: int) -> None:
    from m3pc.cli.progress import progress
    from m3pc.datagen.random_actions import babble

    with progress(f"making {out.name}", "steps") as report:
        store = babble(env, out, steps=steps, strongest=strongest, seed=seed, on_progress=report)
    _done(store)


def _play(order: "from_scripts.ScriptedDataRequest") -> None:
    from m3pc.cli.progress import progress
    from m3pc.datagen.from_scripts import demonstrate

    with progress(f"making {order.out.name}", "steps" if order.steps else "episodes") as report:
        store, roles = demonstrate(order, report)
    for role in roles:
        if role.lengths:
            mean = sum(role.lengths) / len(role.lengths)
            succeed = f"{role.successes} of {len(role.lengths)} succeed"
            typer.echo(f"{role.name}: {succeed}, {mean:.0f} steps on average")
    typer.echo(f"picture: {order.picture}")
    _done(store)


def _train(order: "training_run.TrainedDataRequest") -> None:
    from m3pc.cli.progress import progress
    from m3pc.datagen.from_training import make_dataset

    with progress(f"making {order.out.name}", "steps") as report:
        store, training = make_dataset(order, report)
    last = training.curve[-1]
    typer.echo(
        f"trained for {last.steps:,} steps, {len(training.episodes):,} episodes, "
        f"{last.cpu_seconds:.0f} CPU seconds; evaluation return {last.evaluation_return:.1f}"
    )
    typer.echo(f"picture: {order.picture}")
    _done(store)


def open_store(text: str) -> "Store":
    from replay.store.store import Store

    return Store(store_path(text))


def store_path(text: str) -> Path:
    from m3pc.datasets.download import SHIPPED
    from m3pc.types import InputError

    kind, _, name = text.partition(":")
    if kind != "shipped":
        return Path(text)
    names = sorted(path.name for path in SHIPPED.iterdir() if path.is_dir())
    if name not in names:
        raise InputError(f"{text} does not come with m3pc; there is {', '.join(names)}")
    return SHIPPED / name


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _limits(memory: float, seconds: float) -> "SandboxLimits":
    from m3pc.datasets.sandbox import SandboxLimits

    return SandboxLimits(memory=int(memory * 2**30), seconds=seconds)


def _done(store: "Store") -> None:
    totals = store.totals
    typer.echo(
        f"{store.path}: {totals.episodes:,} episodes, {totals.steps:,} steps, "
        f"checksum {store.checksum[:16]}"
    )
