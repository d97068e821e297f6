"""Building blocks of the trajectory model: transformer layers, heads and position waves.

B rows, G groups of rows that share tokens, V own and W shared tokens, D width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTokens:
    """Positions of the tokens that are read, among the shared ones and among each row's own."""

    shared: list[int]
    own: list[int]

    def after_joining(self, shared_count: int) -> "ReadTokens":
        """The same tokens once the shared ones have become the first of each row's own."""
        return ReadTokens(shared=[], own=self.shared + [shared_count + i for i in self.own])


class TransformerLayer(nn.Module):
    """Pre-norm attention and feed-forward part, each with a residual connection."""

    def __init__(self, width: int, heads: int, expansion: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        nn.init.xavier_uniform_(self.qkv.weight)
        self.expand = nn.Linear(width, expansion * width)
        self.contract = nn.Linear(expansion * width, width)

    def forward(
        self, own: Tensor, shared: Tensor | None = None, read: ReadTokens | None = None
    ) -> Tensor:
        """New tokens for `shared` [G, W, D] and `own` [B, V, D], in this order: [B, W + V, D].

        With `read`, only the tokens to read are computed.
        """
        # `qkv` is one parameter, sliced by hand instead of applied at once: every token is a key
        # and a value, but only tokens that are read need a query.
        width = own.shape[-1]
        query_weight, query_bias = self.qkv.weight[:width], self.qkv.bias[:width]
        kv_weight, kv_bias = self.qkv.weight[width:], self.qkv.bias[width:]
        normed = self.norm1(own)
        normed_shared = None if shared is None else self.norm1(shared)

        def keys_and_values(x: Tensor) -> Tensor:
            return functional.linear(x, kv_weight, kv_bias)

        # Shared tokens are projected once for their group, then repeated for its rows.
        keys, values = join_shared(
            None if normed_shared is None else keys_and_values(normed_shared),
            keys_and_values(normed),
        ).chunk(2, dim=-1)
        if read is not None:
            own, normed = own[:, read.own], normed[:, read.own]
            if shared is not None and normed_shared is not None:
                shared, normed_shared = shared[:, read.shared], normed_shared[:, read.shared]
        queries = functional.linear(join_shared(normed_shared, normed), query_weight, query_bias)
        x = join_shared(shared, own)
        x = x + self._drop(self.out(self._attend(queries, keys, values)))
        return x + self._drop(self._feed_forward(x))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (self._split_heads(x) for x in (queries, keys, values))
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return mixed.transpose(1, 2).flatten(2)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.contract(self._drop(functional.gelu(self.expand(self.norm2(x)))))
        return hidden

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout) if self.training and self.dropout else x


class LinearActionHead(nn.Module):
    """Mean and log sigma of actions by one linear map each, side by side."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.mu, self.log_sigma = nn.Linear(width, size), nn.Linear(width, size)
        for linear in (self.mu, self.log_sigma):
            nn.init.orthogonal_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.mu(x), self.log_sigma(x)], dim=-1)


def two_layer_head(width: int, size: int) -> nn.Module:
    """The head of every modality, except of actions if `model.action_head` is `linear`."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, size)
    )


def join_shared(shared: Tensor | None, own: Tensor) -> Tensor:
    """Put a group's shared tokens [G, W, D] in front of each row's own [B, V, D]."""
    if shared is None:
        return own
    groups, rows_per_group = len(shared), len(own) // len(shared)
    parts = (
        shared[:, None].expand(-1, rows_per_group, -1, -1),
        own.view(groups, rows_per_group, *own.shape[1:]),
    )
    return torch.cat(parts, dim=2).flatten(0, 1)


def position_waves(length: int, width: int, scale: float) -> Tensor:
    """Sines, then cosines, of each step in the window: [T, D]."""
    half = width // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    return (scale * waves).float()
