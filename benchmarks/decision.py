"""One planned action at the paper's size: ours against the dense reference, in one run.

python -m benchmarks.decision [--threads 1] [--rounds 5]

Ends with 1 if the two differ by more than rounding.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import reference
from m3pc.config.presets import PRESETS
from m3pc.model.btm import TrajectoryModel
from m3pc.model.critic import Critic
from m3pc.model.normalisation import Normaliser
from planner.forward import Guidance, PlanningBatch, plan

CONFIG = PRESETS["paper"]
LENGTH = CONFIG.model.window
STATES, ACTIONS, NOW = 11, 3, 4  # hopper
STEP, MAX_EPISODE_STEPS = 100, 1000  # in the middle of an episode
TARGET_RETURN = 1.0
MAX_ERROR = 1e-5
GUIDANCES: tuple[Guidance, ...] = ("m", "q")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"paper size, N = {CONFIG.planner.candidates}, {options.threads} thread(s), fp32")
    print("guide   dense s   ours s   dense/ours   largest error: utility   action")
    largest = 0.0
    with torch.inference_mode():
        for guidance in GUIDANCES:
            decision = PaperDecision(guidance)
            dense, ours = fastest([decision.dense, decision.ours], options.rounds)
            utility, action = decision.errors()
            largest = max(largest, utility, action)
            times = f"{guidance:5} {dense:9.3f} {ours:8.3f} {dense / ours:11.2f}x"
            print(f"{times} {utility:23.1e} {action:8.1e}")
    sys.exit(int(largest > MAX_ERROR))


class PaperDecision:
    """A random model and one window; the same noise for both planners."""

    def __init__(self, guidance: Guidance) -> None:
        self.guidance = guidance
        self.model = TrajectoryModel(CONFIG.model, STATES, ACTIONS).eval()
        self.critic = Critic(CONFIG.critic, STATES, ACTIONS)
        sizes = {"states": STATES, "rewards": 1, "returns": 1}
        self.moments = {name: (torch.randn(n), torch.rand(n) + 0.5) for name, n in sizes.items()}
        # With 900 steps left and a temperature of 1, an error of a return is multiplied by 900.
        self.moments["returns"] = (torch.zeros(1), torch.ones(1))
        arrays = {
            f"{name}.{part}": x.numpy()
            for name, pair in self.moments.items()
            for part, x in zip(("mean", "std"), pair, strict=True)
        }
        self.normaliser = Normaliser.from_arrays(arrays)
        self.state = dict(self.model.state_dict())
        self.states, self.actions = torch.randn(LENGTH, STATES), torch.rand(LENGTH, ACTIONS) * 2 - 1
        self.noise = torch.randn(CONFIG.planner.candidates, LENGTH - NOW, ACTIONS)

    def ours(self) -> tuple[Tensor, Tensor]:
        """Utilities [N] and the action [A]."""
        batch = PlanningBatch(
            states=self.states[None],
            actions=self.actions[None],
            now=NOW,
            steps=torch.tensor([STEP]),
            target_returns=torch.tensor([TARGET_RETURN]),
            max_episode_steps=MAX_EPISODE_STEPS,
        )
        output = plan(
            self.model,
            self.critic,
            self.normaliser,
            CONFIG,
            batch,
            self.guidance,
            noise=self.noise[None],
            chance=torch.zeros(1),
            sample=torch.tensor([False]),
        )
        return output.utilities[0], output.actions[0]

    def dense(self) -> tuple[Tensor, Tensor]:
        """Utilities [N] and the action [A]."""
        (mean, std), (low, scale) = self.moments["states"], self.moments["returns"]
        inputs = {
            "states": (self.states[None] - mean) / std,
            "actions": self.actions[None],
            "rewards": torch.zeros(1, LENGTH, 1),
            "returns": ((TARGET_RETURN - low) / scale).expand(1, LENGTH, 1),
        }
        mask = reference.mask("policy", NOW, LENGTH)
        policy = reference.network(self.state, CONFIG.model, inputs, mask)
        plans = reference.propose(policy.mu[0, NOW:], policy.log_sigma[0, NOW:], self.noise, 1.0)
        utilities = reference.score(
            self.state,
            self.critic.min_q,
            CONFIG,
            self.moments,
            self.states,
            self.actions,
            NOW,
            STEP,
            MAX_EPISODE_STEPS,
            plans,
            self.guidance,
        )
        _, action = reference.choose(CONFIG, self.guidance, utilities, plans[:, 0])
        return utilities, action

    def errors(self) -> tuple[float, float]:
        """Of utilities, relative to the largest one; of the action, absolute."""
        (ours, our_action), (dense, dense_action) = self.ours(), self.dense()
        utility = (ours - dense).abs().max() / dense.abs().max()
        return utility.item(), (our_action - dense_action).abs().max().item()


def fastest(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Shortest duration of each, in turns, so that a busy moment affects all alike."""
    durations = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            durations[i] = min(durations[i], time.perf_counter() - start)
    return durations


if __name__ == "__main__":
    main()
