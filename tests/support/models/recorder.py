"""A random network of unusual sizes, and a recording of the dense reference's outputs of it.

B rows, T steps, S state, A action, N plans, M networks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torch.nn.functional import linear

from benchmarks import reference
from m3pc.config.overrides import replace
from m3pc.config.presets import PRESETS
from m3pc.config.schema import Config
from m3pc.model import checkpoint
from m3pc.model.btm import TrajectoryModel
from m3pc.model.critic import Critic
from m3pc.model.weights import Weights, gather_tensors
from tests.support.episodes.foreign_files import write_npz

Arrays = dict[str, NDArray[Any]]
S, A, T, B, N, ROWS, AFTER = 4, 2, 5, 3, 9, 12, 7
OTHER = replace(
    PRESETS["parity"],
    {
        "model.width": 12,
        "model.heads": 3,
        "model.encoder_layers": 1,
        "model.decoder_layers": 2,
        "model.expansion": 2,
        "model.window": T,
        "critic.width": 7,
        "critic.layers": 1,
    },
)
QUESTIONS = {"rcbc1": "policy", "fd1": "dynamics", "id3": "inverse", "pi0": "path"}
OUTPUTS = {name: name for name in ("states", "rewards", "returns", "mu")} | {"log_std": "log_sigma"}
GUIDES: Mapping[str, reference.Guidance] = {"q": "q", "rtg": "m"}
NETS = tuple[Tensor, ...]  # weight [M, out, in] and bias [M, out] of each layer in turn


class Recorder:
    """A random network, and the outputs of the dense reference."""

    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(3)
        self.model, self.critic = TrajectoryModel(OTHER.model, S, A), Critic(OTHER.critic, S, A)
        for parameter in [*self.model.parameters(), *self.critic.parameters()]:
            parameter.data = 0.5 * self.normal(*parameter.shape)
        self.targets = {
            name: x.data + 0.2 * self.normal(*x.shape)
            for name, x in self.critic.q.named_parameters()
        }
        sizes = {"states": S, "actions": A, "rewards": 1, "returns": 1}
        self.inputs = {name: self.normal(B, T, size) for name, size in sizes.items()}
        self.inputs["actions"] = self.inputs["actions"].tanh()
        self.moments = {
            name: (self.normal(size), 1 + self.normal(size).square())
            for name, size in sizes.items()
            if name != "actions"
        }
        self.critic.state_mean, self.critic.state_std = self.moments["states"]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The checkpoint and the recording."""
        weights = Weights(
            version=0,
            config=OTHER,
            state_size=S,
            action_size=A,
            max_episode_steps=30,
            env=None,
            tensors=gather_tensors(
                self.model,
                self.critic,
                arrays={
                    f"{name}.{part}": value.numpy()
                    for name, pair in self.moments.items()
                    for part, value in zip(("mean", "std"), pair, strict=True)
                },
                envelope=np.zeros(30, np.float32),
                return_range=np.zeros(2, np.float32),
            ),
        )
        training = {f"critic.target.{name}": tensor for name, tensor in self.targets.items()}
        checkpoint.write(folder / "checkpoint", weights, training, {})
        arrays = {name: np.asarray(value) for name, value in self.arrays().items()}
        return folder / "checkpoint", write_npz(folder / "golden.npz", arrays)

    def arrays(self) -> dict[str, Any]:
        with torch.no_grad():
            arrays = {f"input_{name}": x for name, x in self.inputs.items()}
            arrays |= self.answers() | self.plan(1)
        return arrays | self.update()

    def answers(self) -> dict[str, Any]:
        masks = {
            name: reference.mask(pattern, int(name[-1]), T) for name, pattern in QUESTIONS.items()
        }
        masks["random0"] = torch.rand(4, T, generator=self.rng) < 0.6
        tokens = {name: self.normalised(name, x) for name, x in self.inputs.items()}
        noise = self.normal(B, T, A)
        arrays: dict[str, Any] = {"loss_temperature": 0.3, "loss_entropy_noise": noise}
        for name, visible in masks.items():
            outputs = reference.network(self.state, OTHER.model, tokens, visible)
            arrays[f"visible_{name}"] = visible
            arrays |= {f"out_{name}_{k}": getattr(outputs, v) for k, v in OUTPUTS.items()}
            if name in ("rcbc1", "random0"):
                terms = losses(outputs, tokens, visible[1], noise, temperature=0.3)
                arrays |= {f"loss_{name}_{term}": value for term, value in terms.items()}
        return arrays

    def plan(self, now: int) -> dict[str, Any]:
        candidates = self.normal(N, T - now, A).tanh()
        arrays: dict[str, Any] = {f"plan{now}_candidates": candidates}
        arrays["plan_discount_lambda"] = [0.9, 0.4]
        window = (self.inputs["states"][0], self.inputs["actions"][0])
        for theirs, guide in GUIDES.items():
            config = replace(OTHER, {"planner.discount": 0.9, "planner.lam": 0.4})
            place = (*window, now, now, 30, candidates, guide)
            utilities = reference.score(self.state, self.min_q, config, self.moments, *place)
            xi = 2 / float(utilities.std())
            weights, action = chosen(config, guide, xi, utilities, candidates[:, 0])
            parts = {"utility": utilities, "xi": xi, "weights": weights, "action": action}
            arrays |= {f"plan{now}_{theirs}_{part}": value for part, value in parts.items()}
        return arrays

    def update(self) -> dict[str, Any]:
        """One update of V, then of Q, then of its targets, each with its own Adam."""
        discount, expectile, tau, rate = 0.8, 0.9, 0.05, 0.01
        states, following = self.normal(ROWS, S), self.normal(ROWS, S)
        actions, rewards = self.normal(ROWS, A).tanh(), self.normal(ROWS, 1)
        ends = (torch.arange(ROWS)[:, None] % 3 == 0).float()
        q, v = networks(self.critic.q.state_dict()), networks(self.critic.v.state_dict())
        slow = networks(self.targets)
        s, pairs = self.normalised("states", states), self.pairs(states, actions)
        goal = rewards + discount * (1 - ends) * forward(v, self.normalised("states", following))[0]
        ahead = forward(slow, pairs).amin(dim=0).detach() - forward(v, s)[0]
        value_loss = (torch.where(ahead > 0, expectile, 1 - expectile) * ahead.square()).mean()
        q_loss = (forward(q, pairs) - goal.detach()).square().mean()
        step(v, value_loss, rate)
        step(q, q_loss, rate)
        slow = tuple((1 - tau) * old + tau * new.detach() for old, new in zip(slow, q, strict=True))
        after = {
            "q": forward(q, pairs).amin(dim=0),
            "q_target": forward(slow, pairs).amin(dim=0),
            "v": forward(v, s)[0],
        }
        batch = {"states": states, "actions": actions, "rewards": rewards}
        batch |= {"next_states": following, "terminals": ends}
        return {
            **{f"iql_{name}": column for name, column in batch.items()},
            **{f"iql_after_{name}": x[:AFTER, 0].detach() for name, x in after.items()},
            "iql_settings": [discount, expectile, tau, rate],
            "iql_value_loss": value_loss.item(),
            "iql_q_loss": q_loss.item(),
        }

    @property
    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def normalised(self, name: str, x: Tensor) -> Tensor:
        mean, std = self.moments.get(name, (torch.zeros(1), torch.ones(1)))
        return (x - mean) / std

    def pairs(self, states: Tensor, actions: Tensor) -> Tensor:
        return torch.cat([self.normalised("states", states), actions], dim=1)

    def min_q(self, states: Tensor, actions: Tensor) -> Tensor:
        nets = networks(self.critic.q.state_dict())
        return forward(nets, self.pairs(states, actions)).amin(dim=0)[:, 0].detach()


def networks(state: Mapping[str, Tensor]) -> NETS:
    """Copies of the layers in turn."""
    order = [f"{kind}{i}" for i in range(len(state) // 2) for kind in ("weight", "bias")]
    return tuple(state[name].detach().clone().requires_grad_() for name in order)


def forward(nets: NETS, x: Tensor) -> Tensor:
    """[B, in] -> [M, B, out]."""

    def one(member: int) -> Tensor:
        y = x
        for weight, bias in zip(nets[::2], nets[1::2], strict=True):
            y = linear(y, weight[member], bias[member])
            y = y if weight is nets[-2] else y.relu()
        return y

    return torch.stack([one(member) for member in range(len(nets[0]))])


def step(nets: NETS, loss: Tensor, rate: float) -> None:
    adam = torch.optim.Adam(nets, rate)
    torch.autograd.backward(loss)
    adam.step()


def chosen(
    config: Config, guide: reference.Guidance, xi: float, utilities: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    settings = replace(config, {f"planner.{guide}.inverse_temperature": xi})
    return reference.choose(settings, guide, utilities, first)


def losses(
    outputs: reference.Outputs,
    tokens: Mapping[str, Tensor],
    seen: Tensor,
    noise: Tensor,
    *,
    temperature: float,
) -> dict[str, float]:
    """The authors' pretraining loss by its formulas, with torch's own distributions."""
    mu, sigma = outputs.mu[:, ~seen], outputs.log_sigma[:, ~seen].exp()
    squashed: Any = TransformedDistribution(Normal(mu, sigma), [TanhTransform()])
    drawn = torch.tanh(mu + sigma * noise[:, ~seen])
    terms = {
        name: float((getattr(outputs, name) - tokens[name]).square().mean())
        for name in ("states", "rewards", "returns")
    }
    error = (outputs.mu.tanh() - tokens["actions"]).square() * seen[:, None]
    terms["actions"] = float(error.mean())
    terms["nll"] = float(-squashed.log_prob(tokens["actions"][:, ~seen]).mean())
    terms["entropy"] = float(-squashed.log_prob(drawn).mean())
    total = sum(terms.values()) - (1 + temperature) * terms["entropy"]
    return terms | {"total": total}
