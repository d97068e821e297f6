"""The bidirectional trajectory model: some tokens in, any token out.

B rows, G groups of rows that share tokens, V tokens given, T steps, S state, A action, D width.

A token is one modality at one step. The encoder sees the tokens that are given, the decoder those
and a mask token for every other place; attention has no order, so tokens may come in any. What many
rows have in common is computed once: `shared` tokens [G, W, D] stand for all B / G rows of a group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3pc.config.schema import ModelConfig
from m3pc.model.interpolation import line_weights, with_changes
from m3pc.model.masks import ACTIONS, MODALITIES, STATES, Mask, TokenIndex, places
from m3pc.model.normalisation import Tokens
from m3pc.model.squashed_gaussian import bounded_log_sigma

Places = tuple[TokenIndex, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What was read, at the steps that were read, in their order; None where none was."""

    states: Tensor | None = None  # [B, ., S] normalised, as are rewards and returns
    rewards: Tensor | None = None  # [B, ., 1]
    returns: Tensor | None = None  # [B, ., 1]
    mu: Tensor | None = None  # [B, ., A] of actions before the tanh
    log_sigma: Tensor | None = None  # [B, ., A]


class TrajectoryModel(nn.Module):
    """Weights and how tokens pass through them. `state_size` S, `action_size` A."""

    positions: Tensor

    def __init__(self, config: ModelConfig, state_size: int, action_size: int) -> None:
        super().__init__()
        self.config = config
        width, sizes = config.width, (state_size, action_size, 1, 1)
        named = dict(zip(MODALITIES, sizes, strict=True))
        told = named | {"states": state_size * (1 + (config.state_tokens == "with-change"))}
        self.embed = nn.ModuleDict({name: nn.Linear(size, width) for name, size in told.items()})
        self.encoder_modalities = nn.Parameter(torch.zeros(len(MODALITIES), width))
        self.encoder = _layers(config, config.encoder_layers)
        self.encoder_norm = nn.LayerNorm(width)
        self.mask_tokens = nn.Parameter(torch.zeros(len(MODALITIES), width))
        self.decoder_embed = nn.ModuleDict({name: nn.Linear(width, width) for name in MODALITIES})
        self.decoder_modalities = nn.Parameter(torch.zeros(len(MODALITIES), width))
        self.decoder = _layers(config, config.decoder_layers)
        self.decoder_norm = nn.LayerNorm(width)
        heads = {name: _two_layers(width, size) for name, size in named.items()}
        if config.action_head == "linear":
            heads["actions"] = LinearActionHead(width, action_size)
        else:
            heads["actions"] = _two_layers(width, 2 * action_size)
        if config.state_head == "from-line":  # which is where learning starts
            for parameter in [*heads["states"].parameters()][-2:]:
                nn.init.zeros_(parameter)
        self.heads = nn.ModuleDict(heads)
        self.register_buffer("positions", _positions(config), persistent=False)

    def forward(self, tokens: Tokens, mask: Mask, read: Mask | None = None) -> Prediction:
        """Every token, or those to `read`, from those that a mask [modality, T] shows."""
        given = tuple(places(mask))
        by_modality = [
            self.embedded(modality, tokens[modality][:, steps], steps)
            for modality, steps in _runs(given)
        ]
        wanted = tuple(places(mask | True if read is None else read))
        seen = tokens.states[:, [place.step for place in given if place.modality == STATES]]
        if not by_modality:
            nothing = tokens.states.new_empty(len(tokens.states), 0, self.config.width)
            return self.decode(nothing, given, wanted, seen)
        return self.decode(self.encode(torch.cat(by_modality, dim=1)), given, wanted, seen)

    def embedded(self, modality: int, x: Tensor, steps: Sequence[int]) -> Tensor:
        """Tokens [B, ., D] of normalised numbers [B, ., dim] that stand at `steps`, which are all
        that are given of the modality where changes are told."""
        if modality == STATES and self.config.state_tokens == "with-change":
            x = with_changes(x, steps)
        place = self.encoder_modalities[modality] + self.positions[list(steps)]
        embedded: Tensor = self.embed[MODALITIES[modality]](x) + place
        return embedded

    def encode(self, own: Tensor, shared: Tensor | None = None) -> Tensor:
        """[B, V, D], and [G, W, D] in front of them -> [B, W + V, D]."""
        for layer in self.encoder:
            own, shared = layer(own, shared), None
        encoded: Tensor = self.encoder_norm(own)
        return encoded

    def decode(self, memory: Tensor, given: Places, read: Places, seen: Tensor) -> Prediction:
        """The numbers at the places `read`, from encoded tokens [B, V, D] of the places `given`.

        `seen` [B, ., S] or, shared by a group's rows, [G, ., S]: the normalised states among those
        given, in the order of their steps."""
        layout = _layout(given, read, self.config.window)
        shared: Tensor | None = self._hidden(layout.hidden) if layout.hidden else None
        own = self._seen(memory, given)
        for layer in self.decoder[:-1]:
            own, shared = layer(own, shared), None
        rows = layout.read if shared is not None else layout.read.joined(len(layout.hidden))
        own = self.decoder[-1](own, shared, rows)
        found = self._heads(self.decoder_norm(own), layout.runs)
        if found.states is None or self.config.state_head == "absolute":
            return found
        weights = line_weights(_steps(given), _steps(read)).to(seen)
        line = torch.einsum("rk,gks->grs", weights, seen)
        line = line.repeat_interleave(len(memory) // len(seen), dim=0)
        return replace(found, states=found.states + line)

    def _hidden(self, where: Places) -> Tensor:
        """Decoder inputs of mask tokens, the same for every row: [1, ., D]."""
        tokens = [
            self.decoder_embed[MODALITIES[modality]](self.mask_tokens[modality])
            + self.decoder_modalities[modality]
            + self.positions[list(steps)]
            for modality, steps in _runs(where)
        ]
        return torch.cat(tokens)[None]

    def _seen(self, memory: Tensor, where: Places) -> Tensor:
        first, tokens = 0, []
        for modality, steps in _runs(where):
            part = memory[:, first : first + len(steps)]
            place = self.decoder_modalities[modality] + self.positions[list(steps)]
            tokens.append(self.decoder_embed[MODALITIES[modality]](part) + place)
            first += len(steps)
        return torch.cat(tokens, dim=1) if tokens else memory

    def _heads(self, x: Tensor, runs: "Sequence[tuple[int, list[int]]]") -> Prediction:
        found: dict[str, Tensor] = {}
        for modality, rows in runs:
            part = x[:, rows[0] : rows[-1] + 1] if _consecutive(rows) else x[:, rows]
            out = self.heads[MODALITIES[modality]](part)
            if modality == ACTIONS:
                found["mu"], raw = out.chunk(2, dim=-1)
                low, high = self.config.log_sigma_min, self.config.log_sigma_max
                found["log_sigma"] = bounded_log_sigma(raw, low, high)
            else:
                found[MODALITIES[modality]] = out
        return Prediction(**found)


class TransformerLayer(nn.Module):
    """Attention, then a feed-forward part, each behind a LayerNorm and beside a residual."""

    def __init__(self, width: int, heads: int, expansion: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        nn.init.xavier_uniform_(self.qkv.weight)
        self.expand = nn.Linear(width, expansion * width)
        self.contract = nn.Linear(expansion * width, width)

    def forward(
        self, own: Tensor, shared: Tensor | None = None, read: "Read | None" = None
    ) -> Tensor:
        """New tokens for `shared` and `own`, in this order, or only for those that are read."""
        width = own.shape[-1]
        query, query_bias = self.qkv.weight[:width], self.qkv.bias[:width]
        pair, pair_bias = self.qkv.weight[width:], self.qkv.bias[width:]
        normed = self.norm1(own)
        normed_shared = None if shared is None else self.norm1(shared)

        def project(x: Tensor) -> Tensor:
            return functional.linear(x, pair, pair_bias)

        keys, values = _join(
            None if normed_shared is None else project(normed_shared), project(normed)
        ).chunk(2, dim=-1)
        if read is not None:
            own, normed = own[:, read.own], normed[:, read.own]
            if shared is not None and normed_shared is not None:
                shared, normed_shared = shared[:, read.shared], normed_shared[:, read.shared]
        queries = functional.linear(_join(normed_shared, normed), query, query_bias)
        x = _join(shared, own)
        x = x + self._drop(self.out(self._attend(queries, keys, values)))
        return x + self._drop(self._feed_forward(x))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (self._by_head(x) for x in (queries, keys, values))
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return mixed.transpose(1, 2).flatten(2)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def _feed_forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.contract(self._drop(functional.gelu(self.expand(self.norm2(x)))))
        return inner

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout) if self.training and self.dropout else x


class LinearActionHead(nn.Module):
    """Mean and log sigma of actions by one linear map each, side by side."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.mu, self.log_sigma = nn.Linear(width, size), nn.Linear(width, size)
        for part in (self.mu, self.log_sigma):
            nn.init.orthogonal_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.mu(x), self.log_sigma(x)], dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Which shared and which own tokens are read."""

    shared: list[int]
    own: list[int]

    def joined(self, shared: int) -> "Read":
        """The same tokens where so many shared ones have become the first of each row's own."""
        return Read(shared=[], own=self.shared + [shared + row for row in self.own])


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a decoder's tokens lie: hidden ones in front, then those given; then what is read."""

    hidden: Places
    read: Read
    runs: list[tuple[int, list[int]]]  # by modality: rows among those read, in order of steps


@lru_cache(maxsize=4096)  # random masks are many
def _layout(given: Places, read: Places, length: int) -> Layout:
    everywhere = [TokenIndex(k, t) for k in range(len(MODALITIES)) for t in range(length)]
    seen, wanted = set(given), set(read)
    hidden = tuple(place for place in everywhere if place not in seen)
    shared = [i for i, place in enumerate(hidden) if place in wanted]
    own = [i for i, place in enumerate(given) if place in wanted]
    order = [hidden[i] for i in shared] + [given[i] for i in own]
    row = {place: i for i, place in enumerate(order)}
    runs = [
        (modality, [row[place] for place in everywhere if place in wanted and place[0] == modality])
        for modality in range(len(MODALITIES))
    ]
    return Layout(
        hidden=hidden,
        read=Read(shared=shared, own=own),
        runs=[(modality, rows) for modality, rows in runs if rows],
    )


def _runs(where: Sequence[TokenIndex]) -> list[tuple[int, list[int]]]:
    """Neighbours of one modality together: modality and steps."""
    return [
        (modality, [place.step for place in run])
        for modality, run in groupby(where, key=lambda place: place.modality)
    ]


def _steps(where: Places) -> tuple[int, ...]:
    """Those of the states, in order."""
    return tuple(sorted(place.step for place in where if place.modality == STATES))


def _consecutive(rows: list[int]) -> bool:
    return rows == list(range(rows[0], rows[0] + len(rows)))


def _join(shared: Tensor | None, own: Tensor) -> Tensor:
    """[G, W, D] in front of each of its rows among [B, V, D]."""
    if shared is None:
        return own
    groups, count = len(shared), len(own) // len(shared)
    parts = (shared[:, None].expand(-1, count, -1, -1), own.view(groups, count, *own.shape[1:]))
    return torch.cat(parts, dim=2).flatten(0, 1)


def _layers(config: ModelConfig, count: int) -> nn.ModuleList:
    sizes = (config.width, config.heads, config.expansion, config.dropout)
    return nn.ModuleList(TransformerLayer(*sizes) for _ in range(count))


def _two_layers(width: int, size: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, size)
    )


def _positions(config: ModelConfig) -> Tensor:
    """Sines, then cosines, of the step in the window: [T, D]."""
    half = config.width // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(config.window, dtype=torch.float64)[:, None] * rates
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    return (config.position_scale * waves).float()
