"""Settings of the algorithm: the model, its training, planning and the critic."""

from typing import Annotated, Final, Literal, get_args

from pydantic import Field

from m3pc.config.section import (
    BelowOne,
    Fraction,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    Ratio,
    ReducedSection,
    Section,
    SmallCount,
    Weight,
    field,
)


class ModelConfig(Section):
    """The trajectory model: its window and its layers. Belongs to the weights once trained."""

    window: Annotated[int, Field(ge=2, le=1024)] = field(
        8, "Steps T of an episode that the model sees at once, past and planned."
    )
    width: Annotated[int, Field(ge=2, le=16384)] = field(
        512, "Size of a token's embedding. Lower it on a CPU: time grows faster than linearly."
    )
    heads: SmallCount = field(4, "Attention heads; model.width has to be a multiple of it.")
    encoder_layers: SmallCount = field(2, "Transformer layers over the visible tokens only.")
    decoder_layers: SmallCount = field(1, "Transformer layers over all tokens.")
    expansion: SmallCount = field(
        4, "Hidden size of a layer's feed-forward network, as a multiple of model.width."
    )
    dropout: BelowOne = field(
        0.1,
        "Dropout probability of attention, feed-forward and residual connections. 0 trains faster"
        " on a CPU.",
    )
    position_scale: Ratio = field(
        0.5, "Factor on the sinusoidal position embedding; 0 removes the order of steps."
    )
    log_sigma_min: Annotated[float, Field(ge=-20, le=10)] = field(
        -5.0, "Lower bound of the log standard deviation that the policy head predicts."
    )
    log_sigma_max: Annotated[float, Field(ge=-20, le=10)] = field(
        2.0, "Upper bound of the log standard deviation that the policy head predicts."
    )
    action_head: Literal["linear", "two-layer"] = field(
        "two-layer", "Output layers of the policy: one linear, or LayerNorm, Linear, GELU, Linear."
    )
    state_tokens: Literal["state", "with-change"] = field(
        "state",
        "Input of a state's token: the state alone, or also its change since the previous step.",
    )
    state_head: Literal["absolute", "from-line"] = field(
        "absolute",
        "Predict a state itself, or its offset from the line between the visible states around it."
        " from-line suits backward planning and slow states (examples/).",
    )


class MixtureConfig(Section):
    """Which kinds of masks the model is trained on: relative weights of the draw."""

    random: Weight = field(1.0, "Weight of random masks that are cut off at a random step.")
    policy: Weight = field(
        0.0, "Weight of return-conditioned policy masks, at a random current step."
    )
    dynamics: Weight = field(0.0, "Weight of forward dynamics masks, at a random current step.")
    path: Weight = field(
        0.0, "Weight of path inference masks, at a random current step. For backward planning."
    )
    inverse: Weight = field(
        0.0, "Weight of inverse dynamics masks, at a random current step. For backward planning."
    )


class PivotConfig(Section):
    """Where a random mask is cut off: modalities before the pivot keep one step more.

    Relative weights; the order of the fields is the order of the modalities in a step.
    """

    states: Weight = field(0.2, "Weight of states as the pivot.")
    returns: Weight = field(0.1, "Weight of returns as the pivot.")
    actions: Weight = field(0.6, "Weight of actions as the pivot.")
    rewards: Weight = field(0.1, "Weight of rewards as the pivot.")


class MasksConfig(Section):
    """Which tokens are hidden from the model in training."""

    mixture: MixtureConfig = MixtureConfig()
    groups: Annotated[int, Field(ge=1, le=1024)] = field(
        1, "Masks per batch; each is applied to an equal share of the rows."
    )
    keep_ratios: Annotated[tuple[PositiveFraction, ...], Field(min_length=1, max_length=64)] = (
        field(
            (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0),
            "Shares of visible steps before the cut of a random mask; one is drawn uniformly for"
            " each modality.",
        )
    )
    pivot: PivotConfig = PivotConfig()


class LossWeightsConfig(Section):
    """Weights of the terms in the trajectory model's loss."""

    states: Weight = field(1.0, "Weight of the mean squared error of states.")
    actions: Weight = field(1.0, "Weight of all action terms together.")
    rewards: Weight = field(1.0, "Weight of the mean squared error of rewards.")
    returns: Weight = field(1.0, "Weight of the mean squared error of returns-to-go.")


class LossConfig(Section):
    """The loss of the trajectory model."""

    weights: LossWeightsConfig = LossWeightsConfig()
    actions_over: Literal["hidden", "all"] = field(
        "all", "Actions over which likelihood and entropy are averaged."
    )
    visible_action_mse: bool = field(
        False, "Add the squared error of visible actions to the action terms."
    )
    online: Literal["states+actions", "all"] = field(
        "all",
        "Terms of the loss in finetuning: states and the likelihood of actions, or all of them.",
    )


class EntropyConfig(Section):
    """The lower bound on the policy's entropy, enforced by a learnt multiplier alpha."""

    per: Literal["dimension", "joint"] = field(
        "joint", "Count likelihood and entropy per action dimension, or summed over dimensions."
    )
    target: Annotated[float, Field(ge=-1000, le=1000)] = field(
        -3.0, "Lower bound beta in nats, counted as in entropy.per. Lower it for sharper actions."
    )
    alpha: Annotated[float, Field(gt=0, le=1e3)] = field(0.1, "Initial value of alpha.")
    alpha_lr: PositiveFraction = field(1e-4, "Learning rate of log alpha (Adam).")
    alpha_online: Literal["reset", "keep"] = field(
        "keep", "alpha at the start of finetuning: entropy.alpha again, or the checkpoint's value."
    )


class OptimiserConfig(Section):
    """AdamW for the trajectory model, in pretraining and in finetuning."""

    weight_decay: Fraction = field(
        5e-3, "Weight decay of linear and attention weights; other parameters have none."
    )
    beta1: BelowOne = field(0.9, "Decay rate of AdamW's mean of gradients.")
    beta2: BelowOne = field(0.999, "Decay rate of AdamW's mean of squared gradients.")
    epsilon: PositiveFraction = field(1e-8, "Constant that AdamW adds to its denominator.")
    clip: Annotated[float, Field(ge=0, le=1e6)] = field(
        0.0, "Upper bound of the gradient's norm; 0 does not clip."
    )


class PretrainConfig(Section):
    """Pretraining on logged episodes: linear warm-up, then cosine decay to 0."""

    batch: PositiveInt = field(2048, "Windows per update of the model.")
    updates: PositiveInt = field(140_000, "Updates of the model in total.")
    warmup: NonNegativeInt = field(40_000, "Updates over which the learning rate rises.")
    lr: PositiveFraction = field(
        1e-4, "Learning rate of the model after the warm-up. Lower it if the loss diverges."
    )
    log_every: PositiveInt = field(100, "Updates between two lines of metrics.jsonl.")
    measure_every: PositiveInt = field(
        500, "Updates between two measurements of prediction errors on held-out episodes."
    )
    checkpoint_every: PositiveInt = field(1000, "Updates between two checkpoints.")
    keep: Annotated[int, Field(ge=1, le=1000)] = field(
        3, "Newest checkpoints that are kept; older ones are deleted."
    )


class DatasetConfig(Section):
    """Which logged episodes are used for training and which for validation."""

    train_share: PositiveFraction = field(
        0.95, "Fraction of the episodes to train on; the others validate."
    )
    shuffle: bool = field(
        False,
        "Choose the validation episodes at random by the seed. Turn it on for replay data, whose"
        " last episodes are its best; false takes the last ones.",
    )
    min_length: PositiveInt = field(8, "Steps that an episode needs; shorter ones are left out.")
    action_margin: Annotated[float, Field(ge=1e-6, le=0.1)] = field(
        1e-5, "Logged actions are clipped to +-(1 - this), so that atanh of them is finite."
    )


class ReturnsConfig(Section):
    """The return-to-go at step t of an episode with step limit H. Belongs to the weights."""

    mode: Literal["average", "sum"] = field(
        "average", "Divide the sum of rewards still to come by H - t, or keep the sum."
    )
    discount: PositiveFraction = field(1.0, "Discount per step; has to be 1 in average mode.")
    include_now: bool = field(
        True, "Whether the reward at step t counts; false counts only those after it."
    )


class NormaliserConfig(Section):
    """Mean and standard deviation by which states, rewards and returns are normalised."""

    padded: bool = field(
        False,
        "Compute them over episodes padded with zeros up to H steps, as the released code does.",
    )
    std_floor: PositiveFraction = field(1e-3, "Smallest standard deviation that is used as it is.")
    below_floor: Literal["floor", "one"] = field(
        "floor", "Replacement of a smaller one: normaliser.std_floor, or 1 as in the released code."
    )


class GuideConfig(Section):
    """How candidates are drawn and weighted in one group of planner modes."""

    inverse_temperature: Annotated[float, Field(ge=0, le=1e6)] = field(
        1.0,
        "Factor xi on utilities in the softmax over candidates. 0 weights all alike; raise it to"
        " prefer the best.",
    )
    spread: Ratio = field(
        1.0,
        "Factor on the policy's standard deviation when candidates are drawn; 0 takes only its"
        " median. Lower it on narrow data.",
    )


Mode = Literal["rcbc", "m", "q", "q0", "goal", "goal-mask"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
BACKWARD: Final = ("goal", "goal-mask")  # plan towards given states instead of a return


class PlannerConfig(Section):
    """Model-predictive control with the model's own predictions."""

    mode: Mode = field(
        "q",
        "rcbc: return-conditioned policy, no planning. m: planning by predicted returns. q: by"
        " predicted rewards and the critic. q0: by the critic at the current step. goal: backward"
        " planning. goal-mask: its baseline, one mask without planning.",
    )
    horizon: Annotated[int, Field(ge=1, le=1023)] = field(
        4, "Steps imagined ahead; the other steps of model.window show the past."
    )
    candidates: Annotated[int, Field(ge=1, le=1_000_000)] = field(
        625, "Plans per decision. Lower it if decisions take too long."
    )
    lam: Fraction = field(
        0.6, "lambda of the lambda-return: 0 trusts the first value, 1 the imagined rewards."
    )
    discount: Fraction = field(0.99, "Discount gamma per imagined step.")
    discount_start: Annotated[int, Field(ge=0, le=1)] = field(
        0, "Power of gamma on the first term of a plan's utility; 1 as in the released code."
    )
    return_scale: Literal["remaining", "1000-steps"] = field(
        "remaining",
        "Steps by which an average return-to-go is multiplied to give a value: those that remain,"
        " max(H - t, 0), or always 1000.",
    )
    state_now: Literal["observed", "reconstructed"] = field(
        "observed", "State that the critic evaluates at the current step: real, or predicted."
    )
    utility: Literal["raw", "standardised"] = field(
        "raw",
        "Weight candidates by utilities as they are, or divided by their standard deviation over"
        " the candidates, which makes inverse_temperature independent of the scale of rewards.",
    )
    m: GuideConfig = GuideConfig()
    q: GuideConfig = GuideConfig()
    evaluate_by: Literal["mean", "sample"] = field(
        "mean", "Action in evaluation: weighted mean of the candidates, or one drawn by weight."
    )
    explore_by: Literal["mean", "sample"] = field(
        "sample", "Action in exploration: weighted mean of the candidates, or one drawn by weight."
    )


class ConditioningConfig(ReducedSection):
    """The target return that the policy is conditioned on."""

    removed = ("rcbc_ratios",)
    evaluation: Literal["envelope", "maximum"] = field(
        "envelope",
        "Target in evaluation, from the best episodes of the data: highest return-to-go at the same"
        " step, or over all steps.",
    )
    evaluation_ratio: Ratio = field(1.0, "Factor on the target return in evaluation.")
    exploration: Literal["envelope", "maximum"] = field(
        "envelope", "Target in exploration; the choices are those of conditioning.evaluation."
    )
    exploration_ratio: Ratio = field(
        1.0,
        "Target in exploration: factor on the envelope, or position between lowest (0) and highest"
        " (1) return-to-go where conditioning.exploration is maximum. Above 1 asks for more than"
        " the data has.",
    )


class SpacingConfig(Section):
    """Rows of a waypoint table that share one subgoal; 1 makes every row a subgoal."""

    hopper: PositiveInt = field(5, "Rows per subgoal for the hopper.")
    walker2d: PositiveInt = field(30, "Rows per subgoal for the walker.")
    halfcheetah: PositiveInt = field(1, "Rows per subgoal for the half-cheetah.")


class GoalConfig(Section):
    """Backward planning (modes goal, goal-mask). i is the current step's position in the window,
    T its length."""

    fill: Literal["between", "released"] = field(
        "between",
        "States replaced by inferred ones: those between now and the goal, or 0..i and i+2..T-2 as"
        " in the released code.",
    )
    first_visible: Literal["goal", "waypoints"] = field(
        "goal",
        "Future states that the model sees at i = 0: only the goal, or every waypoint as in the"
        " released code.",
    )
    waypoints: Literal["paper", "released"] = field(
        "paper", "Waypoint tables: those of the paper, or those of the released code."
    )
    spacing: SpacingConfig = SpacingConfig()


class CriticConfig(Section):
    """The critic: twin Q and V networks, trained by implicit Q-learning (IQL)."""

    width: Annotated[int, Field(ge=1, le=16384)] = field(256, "Units of a hidden layer.")
    layers: SmallCount = field(2, "Hidden layers.")
    lr: PositiveFraction = field(3e-4, "Learning rate (Adam). Lower it if values diverge.")
    batch: PositiveInt = field(256, "Transitions per update.")
    regression_updates: NonNegativeInt = field(
        0, "Updates at the start of pretraining that regress on discounted returns of the data."
    )
    updates: NonNegativeInt = field(
        1_000_000, "Updates of pretraining by IQL on logged transitions, after the regression."
    )
    online: Literal["iql", "regression"] = field(
        "iql", "Updates in finetuning: IQL, or regression on discounted returns."
    )
    discount: Fraction = field(0.99, "Discount gamma per step.")
    expectile: Annotated[float, Field(gt=0, lt=1)] = field(
        0.7,
        "Expectile of V: 0.5 is the mean action's value, near 1 the best action's. Raise it where"
        " rewards are rare.",
    )
    terminals: bool = field(
        True, "Value terminal states as 0; episodes ended by their step limit always bootstrap."
    )
    tau: PositiveFraction = field(
        5e-3, "Step of the target networks towards the trained ones at each update; 1 copies them."
    )
