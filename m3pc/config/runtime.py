"""Settings of a run: its data, its processes, evaluation and devices."""

from typing import Annotated, Literal

from pydantic import Field

from m3pc.config.section import (
    CpuCount,
    Fraction,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    ReducedSection,
    Seconds,
    Section,
    ShortSeconds,
    SmallCount,
    field,
)


class ReplayConfig(Section):
    """The data that the learner samples from in finetuning. Nothing is deleted by it: what the
    store keeps on disk is fleet.keep_episodes."""

    episodes: PositiveInt = field(
        1000,
        "Slots of the model's buffer: filled with the best logged episodes, which collected ones"
        " then replace, first in, first out.",
    )
    sampling: Literal["length", "uniform"] = field(
        "length", "Probability of an episode in that buffer: by its length, or the same for all."
    )
    offline_transitions: PositiveInt = field(
        1_000_000, "Logged transitions that the critic learns from, of the best episodes."
    )
    online_transitions: PositiveInt = field(
        1_000_000, "Collected transitions that the critic learns from, of the newest episodes."
    )
    online_after: NonNegativeInt = field(
        5000, "Collected transitions before the critic's batches include any of them."
    )
    online_share: Fraction = field(
        0.5, "Fraction of a critic's batch that is collected, once replay.online_after is reached."
    )


class OnlineConfig(Section):
    """Finetuning: every collected step and episode calls for a number of updates. Read by the
    learner and the store, which makes actors and learner wait for each other."""

    steps: NonNegativeInt = field(200_000, "Environment steps to collect in total.")
    batch: PositiveInt = field(512, "Windows per update of the model.")
    lr: PositiveFraction = field(1e-4, "Initial learning rate of the model.")
    lr_end: Fraction = field(
        1.0,
        "Final learning rate, as a fraction of online.lr; the decay is linear over online.steps."
        " 1 keeps it constant.",
    )
    updates_per_step: Annotated[float, Field(ge=0, le=1000)] = field(
        0.2, "Updates of the model per collected environment step (update-to-data ratio)."
    )
    updates_per_episode: NonNegativeInt = field(
        0, "Updates of the model per collected episode, in addition to those per step."
    )
    critic_updates: NonNegativeInt = field(10, "Updates of the critic per update of the model.")
    noise: Annotated[float, Field(ge=0, le=10)] = field(
        0.0,
        "Standard deviation of Gaussian noise on the actions of mode rcbc, which then collects"
        " instead of planning. 0 explores by planning.",
    )
    slack: NonNegativeInt = field(
        2_000,
        "Environment steps that collection may be ahead of the learner, beyond one episode. Lower"
        " it for fresher data, raise it if actors wait.",
    )
    publish_every: PositiveInt = field(
        20, "Updates of the model between two versions of the weights that planners get."
    )
    checkpoint_every: PositiveInt = field(500, "Updates of the model between two checkpoints.")
    keep: PositiveInt = field(
        3, "Newest checkpoints and published versions that are kept; older ones are deleted."
    )
    stale_after: PositiveInt = field(
        500,
        "Updates behind the learner from which on `m3pc status` counts an episode's policy as old.",
    )
    pause_after: PositiveInt = field(
        5_000, "Updates behind the learner at which actors stop acting by a policy and wait."
    )
    without_actors: Literal["wait", "continue_offline"] = field(
        "wait",
        "What the learner does once nothing has been collected for a minute: wait, or go on with"
        " the data it has.",
    )


class FleetConfig(Section):
    """The processes of an online run, and how long they wait for each other.

    The driver reads how many to start and on which nodes, planner servers read batch, batch_wait
    and queue, the store reads durability and keep_episodes, actors read step_timeout, unacked and
    receipts; deadline and silence hold for all of them.
    """

    actors: NonNegativeInt = field(2, "Actors: rollout processes that collect episodes.")
    least_actors: PositiveInt = field(1, "Fewest actors that autoscaling leaves.")
    most_actors: NonNegativeInt = field(
        0, "Most actors that autoscaling starts; 0 turns autoscaling off."
    )
    envs_per_actor: SmallCount = field(
        4, "Environments per actor; one half steps while the other half's actions are planned."
    )
    planners: SmallCount = field(
        1, "Planner servers. Add one if the actors wait for planners (see the dashboards)."
    )
    learners: SmallCount = field(1, "Learner processes, which split each batch between them.")
    roles: bool = field(
        False,
        "On a cluster: place processes only on nodes that offer the Ray resources m3pc_actor,"
        " m3pc_planner and m3pc_learner.",
    )
    actor_cpus: CpuCount = field(1.0, "CPUs that Ray reserves for each actor.")
    planner_gpus: CpuCount = field(0.0, "GPUs that Ray reserves for each planner server.")
    learner_gpus: CpuCount = field(0.0, "GPUs that Ray reserves for each learner.")
    batch: PositiveInt = field(
        64,
        "Environments that a planner server computes in one batch. Lower it if its device runs out"
        " of memory.",
    )
    batch_wait: ShortSeconds = field(
        0.002, "Seconds that a planner server waits for more requests before it starts a batch."
    )
    queue: PositiveInt = field(
        1024, "Environments that may wait for a planner server; more are refused and ask again."
    )
    deadline: Seconds = field(
        10.0, "Seconds within which a planner server or the store has to answer."
    )
    step_timeout: Seconds = field(
        30.0, "Seconds after which an environment's step counts as hung and is ended."
    )
    silence: Seconds = field(
        30.0, "Seconds without an answer after which the driver kills a process."
    )
    unacked: SmallCount = field(
        32, "Episodes of an actor that the store has not acknowledged; more make the actor wait."
    )
    durability: Literal["fsync", "os"] = field(
        "fsync",
        "What an acknowledged episode survives: power loss (fsync), or the end of any process (os),"
        " which is faster on slow disks.",
    )
    receipts: bool = field(
        False, "Actors write a list of acknowledged episodes, to audit that none was lost."
    )
    keep_episodes: NonNegativeInt = field(
        0,
        "Newest collected episodes that stay on disk; older ones may be deleted. 0 keeps all. Set"
        " it if the disk fills up.",
    )


class EvaluationConfig(ReducedSection):
    """When an online run evaluates its policy. Read by the driver and the evaluator."""

    removed = ("seeds",)
    every: PositiveInt = field(10_000, "Environment steps between two evaluations.")
    episodes: Annotated[int, Field(ge=1, le=100_000)] = field(
        20, "Episodes per evaluation. More make its standard error smaller."
    )


class ComputeConfig(Section):
    """Device and precision of every process that computes with the model."""

    device: Literal["cpu", "cuda", "mps"] = field(
        "cpu",
        "Device of the model and the critic. For an online run on cuda, set fleet.planner_gpus and"
        " fleet.learner_gpus too.",
    )
    precision: Literal["fp32", "bf16"] = field(
        "fp32",
        "Precision of matrix products. Use bf16 only where `m3pc doctor` says that it works.",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] = field(
        1, "Threads of torch on a CPU. Another number may change the last bits of results."
    )
