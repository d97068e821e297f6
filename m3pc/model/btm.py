"""The bidirectional trajectory model: some tokens in, any token out.

B rows, G groups of rows that share tokens, V tokens given, T steps, S state, A action, D width.

A token is one modality at one step. The encoder sees the given tokens; the decoder sees them and a
mask token for every other one. Attention ignores order, so tokens may come in any order. Tokens
that the B / G rows of a group have in common are computed once: they are `shared` [G, W, D].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, product

import torch
from torch import Tensor, nn

from m3pc.config.schema import ModelConfig
from m3pc.model.interpolation import line_weights, with_changes
from m3pc.model.layers import (
    LinearActionHead,
    ReadTokens,
    TransformerLayer,
    position_waves,
    two_layer_head,
)
from m3pc.model.masks import ACTIONS, MODALITIES, STATES, Mask, TokenIndex, token_indices
from m3pc.model.normalisation import Tokens
from m3pc.model.squashed_gaussian import bounded_log_sigma

TokenIndices = tuple[TokenIndex, ...]
Run = tuple[int, list[int]]  # a modality, and its steps or its rows among tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Outputs at the steps read, in order; a modality that was not read has no steps."""

    states: Tensor  # [B, ., S] normalised, as are rewards and returns
    rewards: Tensor  # [B, ., 1]
    returns: Tensor  # [B, ., 1]
    mu: Tensor  # [B, ., A] mean of the actions before the tanh
    log_sigma: Tensor  # [B, ., A]


class TrajectoryModel(nn.Module):
    """The network. `state_size` is S, `action_size` is A."""

    positions: Tensor

    def __init__(self, config: ModelConfig, state_size: int, action_size: int) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.sizes = dict(zip(MODALITIES, (state_size, action_size, 1, 1), strict=True))
        inputs = self.sizes | {"states": state_size * (1 + (config.state_tokens == "with-change"))}
        self.embed = nn.ModuleDict({name: nn.Linear(size, width) for name, size in inputs.items()})
        self.encoder_modalities = nn.Parameter(torch.zeros(len(MODALITIES), width))
        self.encoder = _layers(config, config.encoder_layers)
        self.encoder_norm = nn.LayerNorm(width)
        self.mask_tokens = nn.Parameter(torch.zeros(len(MODALITIES), width))
        self.decoder_embed = nn.ModuleDict({name: nn.Linear(width, width) for name in MODALITIES})
        self.decoder_modalities = nn.Parameter(torch.zeros(len(MODALITIES), width))
        self.decoder = _layers(config, config.decoder_layers)
        self.decoder_norm = nn.LayerNorm(width)
        heads = {name: two_layer_head(width, size) for name, size in self.sizes.items()}
        if config.action_head == "linear":
            heads["actions"] = LinearActionHead(width, action_size)
        else:
            heads["actions"] = two_layer_head(width, 2 * action_size)
        if config.state_head == "from-line":  # training starts from the interpolated line
            for parameter in [*heads["states"].parameters()][-2:]:
                nn.init.zeros_(parameter)
        self.heads = nn.ModuleDict(heads)
        waves = position_waves(config.window, width, config.position_scale)
        self.register_buffer("positions", waves, persistent=False)

    def forward(self, tokens: Tokens, mask: Mask, read: Mask | None = None) -> Prediction:
        """Predict the tokens in `read` (default: all) from the tokens in `mask`."""
        read = mask | True if read is None else read
        plan = decode_plan(
            tuple(token_indices(mask)), tuple(token_indices(read)), self.config.window
        )
        embedded = [
            self.embed_tokens(modality, tokens[modality][:, steps], steps)
            for modality, steps in plan.given_runs
        ]
        if embedded:
            encoded = self.encode(torch.cat(embedded, dim=1))
        else:
            encoded = tokens.states.new_empty(len(tokens.states), 0, self.config.width)
        return self.decode(encoded, plan, tokens.states[:, plan.given_state_steps])

    def embed_tokens(self, modality: int, x: Tensor, steps: Sequence[int]) -> Tensor:
        """Tokens [B, ., D] of normalised numbers [B, ., dim] at `steps`.

        With `model.state_tokens: with-change`, all given states must be passed in one call.
        """
        if modality == STATES and self.config.state_tokens == "with-change":
            x = with_changes(x, steps)
        place = self.encoder_modalities[modality] + self.positions[list(steps)]
        embedded: Tensor = self.embed[MODALITIES[modality]](x) + place
        return embedded

    def encode(self, own: Tensor, shared: Tensor | None = None) -> Tensor:
        """Encode tokens [B, V, D], with `shared` [G, W, D] in front of them: [B, W + V, D]."""
        for layer in self.encoder:
            own, shared = layer(own, shared), None
        encoded: Tensor = self.encoder_norm(own)
        return encoded

    def decode(self, encoded: Tensor, plan: "DecodePlan", given_states: Tensor) -> Prediction:
        """Predictions from encoded tokens [B, V, D].

        `given_states` are the given normalised states in the order of their steps: [B, ., S], or
        [G, ., S] if the rows of a group share them.
        """
        shared: Tensor | None = self._hidden_tokens(plan) if plan.hidden_count else None
        own = self._given_tokens(encoded, plan)
        for layer in self.decoder[:-1]:
            own, shared = layer(own, shared), None
        read = plan.read if shared is not None else plan.read.after_joining(plan.hidden_count)
        own = self.decoder[-1](own, shared, read)
        prediction = self._heads(self.decoder_norm(own), plan)
        if not prediction.states.shape[1] or self.config.state_head == "absolute":
            return prediction
        weights = plan.line_weights.to(given_states)
        line = torch.einsum("rk,gks->grs", weights, given_states)
        line = line.repeat_interleave(len(encoded) // len(given_states), dim=0)
        return replace(prediction, states=prediction.states + line)

    def _hidden_tokens(self, plan: "DecodePlan") -> Tensor:
        """Decoder inputs of mask tokens, the same for every row: [1, ., D]."""
        tokens = [
            self.decoder_embed[MODALITIES[modality]](self.mask_tokens[modality])
            + self.decoder_modalities[modality]
            + self.positions[list(steps)]
            for modality, steps in plan.hidden_runs
        ]
        return torch.cat(tokens)[None]

    def _given_tokens(self, encoded: Tensor, plan: "DecodePlan") -> Tensor:
        """Decoder inputs of the given tokens: [B, V, D]."""
        first, tokens = 0, []
        for modality, steps in plan.given_runs:
            part = encoded[:, first : first + len(steps)]
            place = self.decoder_modalities[modality] + self.positions[list(steps)]
            tokens.append(self.decoder_embed[MODALITIES[modality]](part) + place)
            first += len(steps)
        return torch.cat(tokens, dim=1) if tokens else encoded

    def _heads(self, x: Tensor, plan: "DecodePlan") -> Prediction:
        outputs = {name: x.new_empty(len(x), 0, size) for name, size in self.sizes.items()}
        mu = log_sigma = outputs.pop("actions")
        for modality, rows in plan.outputs:
            part = x[:, rows[0] : rows[-1] + 1] if _consecutive(rows) else x[:, rows]
            output = self.heads[MODALITIES[modality]](part)
            if modality == ACTIONS:
                mu, raw = output.chunk(2, dim=-1)
                low, high = self.config.log_sigma_min, self.config.log_sigma_max
                log_sigma = bounded_log_sigma(raw, low, high)
            else:
                outputs[MODALITIES[modality]] = output
        return Prediction(**outputs, mu=mu, log_sigma=log_sigma)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodePlan:
    """Which tokens the decoder is given, which are read, and where their outputs are.

    The decoder's tokens are the hidden ones, which all rows share, then the given ones. A run holds
    neighbouring tokens of one modality.
    """

    given_runs: list[Run]  # modality and steps, in the order of the encoded tokens
    hidden_runs: list[Run]  # modality and steps
    hidden_count: int
    read: ReadTokens
    outputs: list[Run]  # modality, and rows among the tokens read, in the order of their steps
    given_state_steps: list[int]  # ascending
    line_weights: Tensor  # [states read, states given] of `interpolation.line_weights`


@lru_cache(maxsize=4096)  # training draws many different masks
def decode_plan(given: TokenIndices, read: TokenIndices, length: int) -> DecodePlan:
    """The plan for windows of `length` steps; `given` is in the order of the encoded tokens."""
    everywhere = [TokenIndex(k, t) for k, t in product(range(len(MODALITIES)), range(length))]
    given_set, read_set = set(given), set(read)
    hidden = [token for token in everywhere if token not in given_set]
    read_shared = [i for i, token in enumerate(hidden) if token in read_set]
    read_own = [i for i, token in enumerate(given) if token in read_set]
    order = [hidden[i] for i in read_shared] + [given[i] for i in read_own]
    row = {token: i for i, token in enumerate(order)}
    given_steps, read_steps = _state_steps(given), _state_steps(read)
    return DecodePlan(
        given_runs=_runs((token, token.step) for token in given),
        hidden_runs=_runs((token, token.step) for token in hidden),
        hidden_count=len(hidden),
        read=ReadTokens(shared=read_shared, own=read_own),
        outputs=_runs((token, row[token]) for token in everywhere if token in read_set),
        given_state_steps=list(given_steps),
        line_weights=line_weights(given_steps, read_steps),
    )


def _runs(numbered: Iterable[tuple[TokenIndex, int]]) -> list[Run]:
    """Group the numbers of neighbouring tokens of one modality."""
    return [
        (modality, [number for _, number in run])
        for modality, run in groupby(numbered, key=lambda pair: pair[0].modality)
    ]


def _state_steps(tokens: TokenIndices) -> tuple[int, ...]:
    return tuple(sorted(token.step for token in tokens if token.modality == STATES))


def _consecutive(rows: list[int]) -> bool:
    return rows == list(range(rows[0], rows[0] + len(rows)))


def _layers(config: ModelConfig, count: int) -> nn.ModuleList:
    sizes = (config.width, config.heads, config.expansion, config.dropout)
    return nn.ModuleList(TransformerLayer(*sizes) for _ in range(count))
