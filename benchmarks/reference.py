"""The plain dense network and planner: the oracle of tests and benchmarks.

Written from the formulas with torch functions alone, on a flat mapping of named weights. The
decoder sees all tokens of every candidate, and every head answers at every position; nothing is
shared or skipped.

B batch, T steps, S state, A action, D width, V visible tokens, N candidates, h steps imagined.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from m3pc.config.schema import Config, ModelConfig

MODALITIES = ("states", "actions", "rewards", "returns")  # rows of every mask and weight table
RELEASED_STEPS = 1000  # what the released code multiplies an average return with
NORM_EPSILON = 1e-5

State = Mapping[str, Tensor]
Moments = Mapping[str, tuple[Tensor, Tensor]]  # mean and std of states, rewards, returns
Critic = Callable[[Tensor, Tensor], Tensor]  # raw states [M, S], actions [M, A] -> lower Q [M]
Guidance = Literal["m", "q", "q0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The network's predictions, normalised; actions before the tanh."""

    states: Tensor  # [B, T, S]
    rewards: Tensor  # [B, T, 1]
    returns: Tensor  # [B, T, 1]
    mu: Tensor  # [B, T, A]
    log_sigma: Tensor  # [B, T, A]


def network(
    state: State, config: ModelConfig, inputs: Mapping[str, Tensor], visible: Tensor
) -> Outputs:
    """Predictions from normalised inputs [B, T, .] of which `visible` [4, T] are seen."""
    encoded = _encode(state, config, inputs, visible)
    decoded = _decode(state, config, encoded, visible)
    states, actions, rewards, returns = decoded.unbind(1)  # each [B, T, D]
    mu, log_sigma = _action_head(state, config, actions)
    return Outputs(
        states=_head(state, "heads.states", states) + _line(config, inputs["states"], visible[0]),
        rewards=_head(state, "heads.rewards", rewards),
        returns=_head(state, "heads.returns", returns),
        mu=mu,
        log_sigma=log_sigma,
    )


def _line(config: ModelConfig, states: Tensor, visible: Tensor) -> Tensor:
    """What the output of the states' head is added to: [B, T, S]. Between two visible states the
    line through them, outside the nearest one."""
    line = torch.zeros_like(states)
    seen = visible.nonzero()[:, 0].tolist()
    if config.state_head == "absolute" or not seen:
        return line
    for t in range(states.shape[1]):
        before, after = [k for k in seen if k <= t], [k for k in seen if k >= t]
        left, right = max(before or after[:1]), min(after or before[-1:])
        share = (t - left) / (right - left) if left < t < right else 0.0
        line[:, t] = (1 - share) * states[:, left] + share * states[:, right]
    return line


def _slopes(states: Tensor, visible: Tensor) -> Tensor:
    """Change per step since the previous visible state, 0 where there is none: [B, T, S]."""
    slopes = torch.zeros_like(states)
    seen = visible.nonzero()[:, 0].tolist()
    for before, after in pairwise(seen):
        slopes[:, after] = (states[:, after] - states[:, before]) / (after - before)
    return slopes


def mask(pattern: str, now: int, length: int) -> Tensor:
    """The tokens that a pattern shows: bool [4, T]."""
    t = torch.arange(length)
    none, past, seen, all_ = t < 0, t < now, t <= now, t >= 0
    ends = seen | (t == length - 1)
    # fmt: off
    rows = {
        #            states  actions  rewards  returns
        "policy":   (seen,   past,    none,    all_),
        "dynamics": (seen,   all_,    none,    none),
        "path":     (ends,   past,    none,    none),
        "inverse":  (all_,   past,    none,    none),
    }
    # fmt: on
    return torch.stack(rows[pattern])


def propose(mu: Tensor, log_sigma: Tensor, noise: Tensor, noise_scale: float) -> Tensor:
    """Candidates from the policy's Gaussians [h, A] and standard normal noise: [N, h, A]."""
    return torch.tanh(mu + noise_scale * torch.exp(log_sigma) * noise)


def score(
    state: State,
    critic: Critic,
    config: Config,
    moments: Moments,
    window_states: Tensor,  # [T, S], raw
    window_actions: Tensor,  # [T, A]
    now: int,
    step: int,  # absolute, of the current state
    max_episode_steps: int,  # H, the environment's step limit
    candidates: Tensor,  # [N, h, A] for the positions from now to the window's end
    guidance: Guidance,
) -> Tensor:
    """Utility of each candidate of one decision: [N]."""
    planner = config.planner
    observed = window_states[now].expand(len(candidates), -1)
    if guidance == "q0" and planner.state_now == "observed":
        return critic(observed, candidates[:, 0])
    states, rewards, returns = _imagine(
        state, config, moments, window_states, window_actions, now, candidates
    )
    if guidance == "q0":
        return critic(states[:, 0], candidates[:, 0])
    if planner.state_now == "observed":
        states = torch.cat([observed[:, None], states[:, 1:]], dim=1)
    if guidance == "q":
        values = critic(states.flatten(0, 1), candidates.flatten(0, 1)).reshape(rewards.shape)
    else:
        values = returns * _steps_per_return(config, step, max_episode_steps, returns)
    return utility(
        rewards,
        values,
        discount=planner.discount,
        lam=planner.lam,
        start=planner.discount_start,
    )


def utility(rewards: Tensor, values: Tensor, *, discount: float, lam: float, start: int) -> Tensor:
    """Rewards and values [N, h] of imagined steps -> mixture of the n-step returns [N]."""
    last = rewards.shape[1] - 1
    mixture = torch.zeros_like(rewards[:, 0])
    for n in range(last + 1):
        n_step_return = discount ** (n + start) * values[:, n]
        for k in range(n):
            n_step_return = n_step_return + discount ** (k + start) * rewards[:, k]
        weight = lam**n if n == last else (1 - lam) * lam**n
        mixture = mixture + weight * n_step_return
    return mixture


def choose(
    config: Config, guidance: Guidance, utilities: Tensor, first_actions: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights [N] of the candidates and the mean of their first actions [N, A] by weight: [A]."""
    settings = config.planner.m if guidance == "m" else config.planner.q
    below_best = utilities - utilities.max()
    deviation = utilities.std(correction=0)
    if config.planner.utility == "standardised" and deviation > 0:
        below_best = below_best / deviation
    weights = torch.softmax(settings.inverse_temperature * below_best, dim=0)
    return weights, (weights @ first_actions).clamp(-1, 1)


def backward(
    state: State,
    config: Config,
    moments: Moments,
    window_states: Tensor,  # [T, S], raw; waypoints after now
    window_actions: Tensor,  # [T, A]
    now: int,
    single_mask: bool,
) -> Tensor:
    """Action [A] towards the window's last state: infer the path, then the action that follows it.

    With `single_mask` the action is read from the first of the two passes.
    """
    length = len(window_states)
    states, actions = _normalised(moments, "states", window_states)[None], window_actions[None]
    ends = mask("path", now, length)
    if now == 0 and config.goal.first_visible == "waypoints":
        ends[MODALITIES.index("states")] = True
    prediction = _predict(state, config, states, actions, ends)
    if not single_mask:
        filled = states.clone()
        steps = inferred_steps(config, now, length)
        filled[:, steps] = prediction.states[:, steps]
        prediction = _predict(state, config, filled, actions, mask("inverse", now, length))
    return torch.tanh(prediction.mu[0, now]).clamp(-1, 1)


def inferred_steps(config: Config, now: int, length: int) -> list[int]:
    """Steps at which the inverse pass is given inferred states."""
    if config.goal.fill == "between":
        return list(range(now + 1, length - 1))
    return [*range(now + 1), *range(now + 2, length - 1)]


def _imagine(
    state: State,
    config: Config,
    moments: Moments,
    window_states: Tensor,
    window_actions: Tensor,
    now: int,
    candidates: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Raw states [N, h, S], rewards [N, h] and returns [N, h] from now on."""
    length, number = len(window_states), len(candidates)
    states = _normalised(moments, "states", window_states).expand(number, -1, -1)
    past = window_actions[:now].expand(number, -1, -1)
    actions = torch.cat([past, candidates], dim=1)
    prediction = _predict(state, config, states, actions, mask("dynamics", now, length))
    return (
        _raw(moments, "states", prediction.states)[:, now:],
        _raw(moments, "rewards", prediction.rewards)[:, now:, 0],
        _raw(moments, "returns", prediction.returns)[:, now:, 0],
    )


def _steps_per_return(config: Config, step: int, max_episode_steps: int, returns: Tensor) -> Tensor:
    """What each predicted return [N, h] is multiplied with to be a sum of rewards: [h]."""
    ahead = torch.arange(returns.shape[1]).to(returns)
    if config.returns.mode == "sum":
        return torch.ones_like(ahead)
    if config.planner.return_scale == "1000-steps":
        return torch.full_like(ahead, RELEASED_STEPS)
    return (max_episode_steps - step - ahead).clamp(min=0)


def _predict(
    state: State, config: Config, states: Tensor, actions: Tensor, visible: Tensor
) -> Outputs:
    """Predictions with rewards and returns hidden."""
    hidden = torch.zeros_like(states[..., :1])
    inputs = {"states": states, "actions": actions, "rewards": hidden, "returns": hidden}
    return network(state, config.model, inputs, visible)


def _normalised(moments: Moments, name: str, raw: Tensor) -> Tensor:
    mean, std = moments[name]
    return (raw - mean) / std


def _raw(moments: Moments, name: str, normalised: Tensor) -> Tensor:
    mean, std = moments[name]
    return normalised * std + mean


def _encode(
    state: State, config: ModelConfig, inputs: Mapping[str, Tensor], visible: Tensor
) -> Tensor:
    """The visible tokens, modality by modality: [B, V, D]."""
    inputs = dict(inputs)
    if config.state_tokens == "with-change":
        inputs["states"] = torch.cat(
            [inputs["states"], 10 * _slopes(inputs["states"], visible[0])], dim=-1
        )
    embedded = [_linear(state, f"embed.{name}", inputs[name]) for name in MODALITIES]
    tokens = _with_positions(state["encoder_modalities"], config, torch.stack(embedded, dim=1))
    tokens = tokens[:, visible]
    if not visible.any():
        return tokens
    return transformer(state, "encoder", config.encoder_layers, config.heads, tokens)


def _decode(state: State, config: ModelConfig, encoded: Tensor, visible: Tensor) -> Tensor:
    """All tokens, those that were not encoded from their modality's mask token: [B, 4, T, D]."""
    shape = (len(encoded), *visible.shape, -1)
    tokens = state["mask_tokens"][:, None].expand(shape).clone()
    tokens[:, visible] = encoded
    embedded = [
        _linear(state, f"decoder_embed.{name}", tokens[:, row])
        for row, name in enumerate(MODALITIES)
    ]
    tokens = _with_positions(
        state["decoder_modalities"], config, torch.stack(embedded, dim=1)
    ).flatten(1, 2)
    tokens = transformer(state, "decoder", config.decoder_layers, config.heads, tokens)
    return tokens.view(len(tokens), *visible.shape, -1)


def _with_positions(modalities: Tensor, config: ModelConfig, tokens: Tensor) -> Tensor:
    """Tokens [B, 4, T, D] plus the vectors of their modality and step."""
    positions = position_waves(tokens.shape[2], tokens.shape[3]).to(tokens)
    return tokens + modalities[:, None] + config.position_scale * positions


def position_waves(length: int, width: int) -> Tensor:
    """Sines, then cosines, of the step at D / 2 frequencies: [T, D]."""
    half = width // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def transformer(state: State, stack: str, layers: int, heads: int, tokens: Tensor) -> Tensor:
    """Pre-norm layers without any attention mask, then a norm: [B, V, D] -> the same."""
    for layer in range(layers):
        name = f"{stack}.{layer}"
        normed = _norm(state, f"{name}.norm1", tokens)
        tokens = tokens + _attention(state, name, heads, normed)
        normed = _norm(state, f"{name}.norm2", tokens)
        hidden = F.gelu(_linear(state, f"{name}.expand", normed))
        tokens = tokens + _linear(state, f"{name}.contract", hidden)
    return _norm(state, f"{stack}_norm", tokens)


def _attention(state: State, name: str, heads: int, tokens: Tensor) -> Tensor:
    query, key, value = (
        part.reshape(*part.shape[:2], heads, -1).transpose(1, 2)  # [B, head, V, D / heads]
        for part in _linear(state, f"{name}.qkv", tokens).chunk(3, dim=-1)
    )
    mixed = F.scaled_dot_product_attention(query, key, value)
    return _linear(state, f"{name}.out", mixed.transpose(1, 2).flatten(2))


def _action_head(state: State, config: ModelConfig, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log standard deviation before the tanh, each [B, T, A]."""
    if config.action_head == "linear":
        mu = _linear(state, "heads.actions.mu", tokens)
        ell = _linear(state, "heads.actions.log_sigma", tokens)
    else:
        mu, ell = _head(state, "heads.actions", tokens).chunk(2, dim=-1)
    low, high = config.log_sigma_min, config.log_sigma_max
    return mu, low + (high - low) / 2 * (torch.tanh(ell) + 1)


def _head(state: State, name: str, tokens: Tensor) -> Tensor:
    hidden = _linear(state, f"{name}.1", _norm(state, f"{name}.0", tokens))
    return _linear(state, f"{name}.3", F.gelu(hidden))


def _linear(state: State, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def _norm(state: State, name: str, x: Tensor) -> Tensor:
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    return F.layer_norm(x, x.shape[-1:], weight, bias, NORM_EPSILON)
