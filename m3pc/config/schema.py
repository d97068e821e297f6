"""Settings of a run: typed, frozen, checked before any process starts.

The defaults are the preset `paper`; how the others differ is the table in `presets.py`. How fields
are given by name is in `settings.py`.
"""

from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from m3pc.config.validation import conflicts

PositiveInt = Annotated[int, Field(ge=1, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
SmallCount = Annotated[int, Field(ge=1, le=64)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0, le=1e6)]
Ratio = Annotated[float, Field(ge=0, le=10)]
CpuCount = Annotated[float, Field(ge=0, le=16)]
ShortSeconds = Annotated[float, Field(ge=0, le=10)]  # seconds
Seconds = Annotated[float, Field(ge=0.1, le=3600)]  # seconds


def _field(default: object, meaning: str) -> Any:
    return Field(default, description=meaning)


class Section(BaseModel):
    """Frozen fields; an unknown name or a value of another type is refused, never converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The trajectory model."""

    window: Annotated[int, Field(ge=2, le=1024)] = _field(8, "steps T of one segment")
    width: Annotated[int, Field(ge=2, le=16384)] = _field(512, "numbers in one token")
    heads: SmallCount = _field(4, "attention heads, which share the width evenly")
    encoder_layers: SmallCount = _field(2, "layers that see the visible tokens only")
    decoder_layers: SmallCount = _field(1, "layers that see all tokens")
    expansion: SmallCount = _field(4, "hidden width of a layer's feed-forward part, in widths")
    dropout: BelowOne = _field(0.1, "on attention, feed-forward, residual")
    position_scale: Ratio = _field(0.5, "factor on the sine and cosine of the step; 0 hides order")
    log_sigma_min: Annotated[float, Field(ge=-20, le=10)] = _field(
        -5.0, "least spread of an action"
    )
    log_sigma_max: Annotated[float, Field(ge=-20, le=10)] = _field(2.0, "most spread of an action")
    action_head: Literal["linear", "two-layer"] = _field(
        "two-layer", "linear mu and log sigma, or LayerNorm, Linear, GELU, Linear"
    )
    state_tokens: Literal["state", "with-change"] = _field(
        "state", "what a state's token tells: it alone, or also its change since the one before"
    )
    state_head: Literal["absolute", "from-line"] = _field(
        "absolute", "a state, or how far it is from the line between the visible ones around it"
    )


class MixtureConfig(Section):
    """How often a mask group gets each kind of mask: relative weights."""

    random: Weight = _field(1.0, "weight of random masks with a right cut")
    policy: Weight = _field(0.0, "weight of return-conditioned cloning masks at a random step now")
    dynamics: Weight = _field(0.0, "weight of forward dynamics masks at a random step now")
    path: Weight = _field(0.0, "weight of path inference masks at a random step now")
    inverse: Weight = _field(0.0, "weight of inverse dynamics masks at a random step now")


class PivotConfig(Section):
    """The modality that the right cut of a random mask starts at: relative weights, in order."""

    states: Weight = _field(0.2, "weight of a cut through the states")
    returns: Weight = _field(0.1, "weight of a cut through the returns")
    actions: Weight = _field(0.6, "weight of a cut through the actions")
    rewards: Weight = _field(0.1, "weight of a cut through the rewards")


class MasksConfig(Section):
    """What is hidden from the model while it learns."""

    mixture: MixtureConfig = MixtureConfig()
    groups: Annotated[int, Field(ge=1, le=1024)] = _field(
        1, "masks per batch, each on an equal part"
    )
    keep_ratios: Annotated[tuple[PositiveFraction, ...], Field(min_length=1, max_length=64)] = (
        _field(
            (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0),
            "visible share of a modality before the cut, one drawn evenly per modality and mask",
        )
    )
    pivot: PivotConfig = PivotConfig()


class LossWeightsConfig(Section):
    """Weight of each modality's loss."""

    states: Weight = _field(1.0, "weight of the squared error of states")
    actions: Weight = _field(1.0, "weight of the action terms")
    rewards: Weight = _field(1.0, "weight of the squared error of rewards")
    returns: Weight = _field(1.0, "weight of the squared error of returns")


class LossConfig(Section):
    """What the trajectory model minimises."""

    weights: LossWeightsConfig = LossWeightsConfig()
    actions_over: Literal["hidden", "all"] = _field(
        "all", "actions that likelihood and entropy are averaged over"
    )
    visible_action_mse: bool = _field(False, "add the squared error of visible actions")
    online: Literal["states+actions", "all"] = _field(
        "all", "losses online: of states and the actions' likelihood, or all as in pretraining"
    )


class EntropyConfig(Section):
    """The entropy constraint on actions and its multiplier alpha."""

    per: Literal["dimension", "joint"] = _field(
        "joint", "entropy of one action dimension, or summed over them"
    )
    target: Annotated[float, Field(ge=-1000, le=1000)] = _field(
        -3.0, "beta in nats, as counted by entropy.per; lower allows sharper actions"
    )
    alpha: Annotated[float, Field(gt=0, le=1e3)] = _field(0.1, "alpha at the start")
    alpha_lr: PositiveFraction = _field(1e-4, "Adam's learning rate for log alpha")
    alpha_online: Literal["reset", "keep"] = _field(
        "keep", "alpha when finetuning starts: entropy.alpha again, or the checkpoint's"
    )


class OptimiserConfig(Section):
    """AdamW of the trajectory model, offline and online."""

    weight_decay: Fraction = _field(5e-3, "on the weights of linear layers and attention only")
    beta1: BelowOne = _field(0.9, "decay of the mean gradient")
    beta2: BelowOne = _field(0.999, "decay of the squared gradient")
    epsilon: PositiveFraction = _field(1e-8, "keeps the division finite")
    clip: Annotated[float, Field(ge=0, le=1e6)] = _field(
        0.0, "largest norm of the gradient; 0 does not clip"
    )


class PretrainConfig(Section):
    """Learning offline: a linear warm-up, then a cosine to 0."""

    batch: PositiveInt = _field(2048, "segments per update")
    updates: PositiveInt = _field(140_000, "updates in all")
    warmup: NonNegativeInt = _field(40_000, "updates until the learning rate is reached")
    lr: PositiveFraction = _field(1e-4, "highest learning rate")
    log_every: PositiveInt = _field(100, "updates between two lines of metrics")
    measure_every: PositiveInt = _field(
        500, "updates between two measurements on held-out episodes"
    )
    checkpoint_every: PositiveInt = _field(1000, "updates between two checkpoints")
    keep: Annotated[int, Field(ge=1, le=1000)] = _field(3, "newest checkpoints that are kept")


class DatasetConfig(Section):
    """How logged episodes are taken in."""

    train_share: PositiveFraction = _field(0.95, "share of the episodes that is trained on")
    shuffle: bool = _field(False, "split at random by the seed; false: the last ones validate")
    min_length: PositiveInt = _field(8, "steps; shorter episodes are left out")
    action_margin: Annotated[float, Field(ge=1e-6, le=0.1)] = _field(
        1e-5, "actions are clipped to 1 minus this in size, where atanh is finite"
    )


class ReturnsConfig(Section):
    """The return at step t of an episode with step limit H."""

    mode: Literal["average", "sum"] = _field("average", "divided by H - t, or not")
    discount: PositiveFraction = _field(1.0, "per step; 1 in average mode")
    include_now: bool = _field(True, "the reward at t counts; false: only those after it")


class NormaliserConfig(Section):
    """Mean and standard deviation of states, rewards and returns."""

    padded: bool = _field(False, "over episodes filled with zeros up to H, as released")
    std_floor: PositiveFraction = _field(1e-3, "least standard deviation")
    below_floor: Literal["floor", "one"] = _field(
        "floor", "what stands in for a smaller one: the floor, or 1 as released"
    )


class GuideConfig(Section):
    """How candidates are drawn and weighed under one kind of utility."""

    inverse_temperature: Annotated[float, Field(ge=0, le=1e6)] = _field(
        1.0, "xi; 0 weighs candidates alike, large takes the best"
    )
    spread: Ratio = _field(1.0, "factor on the policy's sigma; 0 draws its median only")


Mode = Literal["rcbc", "m", "q", "q0", "goal", "goal-mask"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
BACKWARD: Final = ("goal", "goal-mask")  # plan from states to reach, not from a return


class PlannerConfig(Section):
    """Planning with the model's own predictions."""

    mode: Mode = _field(
        "q", "no planning; guided by returns, critic, critic now; backward; its one-mask baseline"
    )
    horizon: Annotated[int, Field(ge=1, le=1023)] = _field(
        4, "steps imagined ahead; the first window - horizon steps of an episode see further"
    )
    candidates: Annotated[int, Field(ge=1, le=1_000_000)] = _field(625, "plans per decision")
    lam: Fraction = _field(0.6, "lambda; 0 trusts the first value, 1 the imagined rewards")
    discount: Fraction = _field(0.99, "gamma per step in the utility")
    discount_start: Annotated[int, Field(ge=0, le=1)] = _field(
        0, "power of gamma on the utility's first term"
    )
    return_scale: Literal["remaining", "1000-steps"] = _field(
        "remaining", "steps that an average return is multiplied with: max(H - t, 0), or 1000"
    )
    state_now: Literal["observed", "reconstructed"] = _field(
        "observed", "the state at the current step that the critic is asked about"
    )
    utility: Literal["raw", "standardised"] = _field(
        "raw", "as computed, or divided by its standard deviation over the candidates"
    )
    m: GuideConfig = GuideConfig()
    q: GuideConfig = GuideConfig()
    evaluate_by: Literal["mean", "sample"] = _field(
        "mean", "action in evaluation: weighted mean of the candidates, or one drawn by weight"
    )
    explore_by: Literal["mean", "sample"] = _field("sample", "the same in exploration")


class ConditioningConfig(Section):
    """The return that the policy is asked for."""

    evaluation: Literal["envelope", "maximum"] = _field(
        "envelope", "best return of the buffer at each step, or over all steps"
    )
    evaluation_ratio: Ratio = _field(1.0, "times that return")
    rcbc_ratios: Annotated[tuple[Ratio, ...], Field(min_length=1, max_length=64)] = _field(
        (0.9, 1.0), "ratios at which acting without planning is evaluated"
    )
    exploration: Literal["envelope", "maximum"] = _field("envelope", "the same in exploration")
    exploration_ratio: Ratio = _field(1.0, "times the envelope, or part of the way to the maximum")


class SpacingConfig(Section):
    """Rows of a waypoint table that share one subgoal; 1 makes every row a subgoal."""

    hopper: PositiveInt = _field(5, "rows per subgoal, hopper")
    walker2d: PositiveInt = _field(30, "rows per subgoal, walker2d")
    halfcheetah: PositiveInt = _field(1, "rows per subgoal, halfcheetah")


class GoalConfig(Section):
    """Backward planning. i is the index of the current step in the window."""

    fill: Literal["between", "released"] = _field(
        "between", "inferred states used: from now to the goal, or 0..i and i+2..T-2"
    )
    first_visible: Literal["goal", "waypoints"] = _field(
        "goal", "future states visible at i = 0: the goal, or every waypoint as released"
    )
    waypoints: Literal["paper", "released"] = _field("paper", "the paper's tables, or the code's")
    spacing: SpacingConfig = SpacingConfig()


class CriticConfig(Section):
    """Twin Q and V by implicit Q-learning."""

    width: Annotated[int, Field(ge=1, le=16384)] = _field(256, "numbers in a hidden layer")
    layers: SmallCount = _field(2, "hidden layers")
    lr: PositiveFraction = _field(3e-4, "Adam's learning rate")
    batch: PositiveInt = _field(256, "transitions per update")
    regression_updates: NonNegativeInt = _field(0, "first: regression on discounted returns")
    updates: NonNegativeInt = _field(1_000_000, "then: updates on logged transitions")
    online: Literal["iql", "regression"] = _field(
        "iql", "updates while finetuning: implicit Q-learning, or regression as at the start"
    )
    discount: Fraction = _field(0.99, "gamma per step")
    expectile: Annotated[float, Field(gt=0, lt=1)] = _field(
        0.7, "0.5 the mean action's value, near 1 the best one's"
    )
    terminals: bool = _field(True, "terminal states are worth 0; time-outs always bootstrap")
    tau: PositiveFraction = _field(5e-3, "step of the target networks; 1 copies")


class ReplayConfig(Section):
    """What is kept to learn from."""

    episodes: PositiveInt = _field(
        1000, "for the model: the best logged ones, then first in, first out"
    )
    sampling: Literal["length", "uniform"] = _field(
        "length", "an episode's chance: by its length, or the same for all"
    )
    offline_transitions: PositiveInt = _field(1_000_000, "logged ones kept for the critic")
    online_transitions: PositiveInt = _field(1_000_000, "collected ones kept for the critic")
    online_after: NonNegativeInt = _field(5000, "collected transitions before the critic sees any")
    online_share: Fraction = _field(0.5, "collected part of the critic's batch from then on")


class OnlineConfig(Section):
    """Finetuning: updates are owed per step and per episode collected."""

    steps: NonNegativeInt = _field(200_000, "environment steps in all")
    batch: PositiveInt = _field(512, "segments per update of the model")
    lr: PositiveFraction = _field(1e-4, "learning rate of the model at the start")
    lr_end: Fraction = _field(
        1.0, "part of it left when all steps are collected; 1: it is constant"
    )
    updates_per_step: Annotated[float, Field(ge=0, le=1000)] = _field(0.2, "owed per step")
    updates_per_episode: NonNegativeInt = _field(0, "owed per episode, on top")
    critic_updates: NonNegativeInt = _field(10, "critic updates per update of the model")
    noise: Annotated[float, Field(ge=0, le=10)] = _field(
        0.0, "sigma on rcbc's actions to explore by instead of planning; 0 explores by planning"
    )
    slack: NonNegativeInt = _field(
        2_000, "steps that collecting may run ahead of learning, beyond need"
    )
    publish_every: PositiveInt = _field(20, "updates of the model between two published versions")
    checkpoint_every: PositiveInt = _field(500, "updates of the model between two checkpoints")
    keep: PositiveInt = _field(3, "checkpoints and versions kept")
    stale_after: PositiveInt = _field(
        500, "updates behind the learner from which on a policy is old"
    )
    pause_after: PositiveInt = _field(5_000, "updates behind the learner that stop acting by it")
    without_actors: Literal["wait", "continue_offline"] = _field(
        "wait", "what the learner does when nothing is collected for a minute"
    )


class FleetConfig(Section):
    """The processes of an online run, and how long they wait for each other."""

    actors: NonNegativeInt = _field(2, "rollout processes")
    least_actors: PositiveInt = _field(1, "rollout processes that autoscaling leaves")
    most_actors: NonNegativeInt = _field(
        0, "rollout processes that autoscaling makes; 0: it is off"
    )
    envs_per_actor: SmallCount = _field(4, "environments in each: half step while half are planned")
    planners: SmallCount = _field(1, "planner servers")
    learners: SmallCount = _field(1, "learner processes that share each batch")
    roles: bool = _field(
        False, "on a cluster, ask for nodes that offer m3pc_actor, m3pc_planner, m3pc_learner"
    )
    actor_cpus: CpuCount = _field(1.0, "CPUs that each rollout process holds")
    planner_gpus: CpuCount = _field(0.0, "GPUs that each planner server holds")
    learner_gpus: CpuCount = _field(0.0, "GPUs that each learner holds")
    batch: PositiveInt = _field(64, "environments that a planner server answers together at most")
    batch_wait: ShortSeconds = _field(0.002, "seconds that a batch waits for company")
    queue: PositiveInt = _field(1024, "environments that may wait for a planner server")
    deadline: Seconds = _field(10.0, "seconds for an answer of a planner server or of the store")
    step_timeout: Seconds = _field(30.0, "seconds after which an environment's step has hung")
    silence: Seconds = _field(30.0, "seconds without an answer after which a process is killed")
    unacked: SmallCount = _field(32, "episodes of an actor that may wait for the store")
    durability: Literal["fsync", "os"] = _field(
        "fsync", "an acknowledged episode survives power loss, or the death of any process"
    )
    receipts: bool = _field(False, "actors keep a list of what the store acknowledged")
    keep_episodes: NonNegativeInt = _field(0, "collected episodes kept at least; 0 keeps all")


class EvaluationConfig(Section):
    """When and how long the policy is measured."""

    every: PositiveInt = _field(10_000, "environment steps between two evaluations")
    episodes: Annotated[int, Field(ge=1, le=100_000)] = _field(20, "episodes per evaluation")
    seeds: Annotated[int, Field(ge=1, le=1000)] = _field(5, "training runs behind a reported score")


class ComputeConfig(Section):
    """Where and how numbers are computed."""

    device: Literal["cpu", "cuda", "mps"] = _field("cpu", "that holds the model and the critic")
    precision: Literal["fp32", "bf16"] = _field(
        "fp32", "of products; bf16 only where `m3pc doctor` finds that it works"
    )
    threads: Annotated[int, Field(ge=1, le=1024)] = _field(
        1, "of torch on a CPU; another number may change the last bits"
    )


class Config(Section):
    """All settings of a run."""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = _field(
        0, "of everything that is drawn at random"
    )
    model: ModelConfig = ModelConfig()
    masks: MasksConfig = MasksConfig()
    loss: LossConfig = LossConfig()
    entropy: EntropyConfig = EntropyConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    pretrain: PretrainConfig = PretrainConfig()
    dataset: DatasetConfig = DatasetConfig()
    returns: ReturnsConfig = ReturnsConfig()
    normaliser: NormaliserConfig = NormaliserConfig()
    planner: PlannerConfig = PlannerConfig()
    conditioning: ConditioningConfig = ConditioningConfig()
    goal: GoalConfig = GoalConfig()
    critic: CriticConfig = CriticConfig()
    replay: ReplayConfig = ReplayConfig()
    online: OnlineConfig = OnlineConfig()
    fleet: FleetConfig = FleetConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    compute: ComputeConfig = ComputeConfig()

    @property
    def context(self) -> int:
        """Past steps in a window once an episode is long enough."""
        return self.model.window - self.planner.horizon

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        for conflict in conflicts(self):
            raise ValueError(conflict)
        return self
