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
from planner.forward import Guidance, PlanningBatch, candidates, propose, score_plans
from planner.utility import softmax_weights

CONFIG = PRESETS["paper"]
LENGTH = CONFIG.model.window
STATES, ACTIONS, NOW, STEP, HORIZON = 11, 3, 4, 100, 1000  # hopper, in the middle of an episode
ASKED = 1.0  # the return that the policy is asked for
LARGEST_ERROR = 1e-5
GUIDES: tuple[Guidance, ...] = ("m", "q")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(f"paper size, N = {CONFIG.planner.candidates}, {given.threads} thread(s), fp32")
    print("guide   dense s   ours s   dense/ours   largest error: utility   action")
    largest = 0.0
    with torch.inference_mode():
        for guide in GUIDES:
            world = World(guide)
            dense, ours = fastest([world.dense, world.ours], given.rounds)
            utility, action = world.errors()
            largest = max(largest, utility, action)
            times = f"{guide:5} {dense:9.3f} {ours:8.3f} {dense / ours:11.2f}x"
            print(f"{times} {utility:23.1e} {action:8.1e}")
    sys.exit(int(largest > LARGEST_ERROR))


class World:
    """A random model and one question; the same noise for both planners."""

    def __init__(self, guide: Guidance) -> None:
        self.guide = guide
        self.model = TrajectoryModel(CONFIG.model, STATES, ACTIONS).eval()
        self.critic = Critic(CONFIG.critic, STATES, ACTIONS)
        sizes = {"states": STATES, "rewards": 1, "returns": 1}
        self.moments = {name: (torch.randn(n), torch.rand(n) + 0.5) for name, n in sizes.items()}
        # Times 900 steps and a temperature of 1, one more digit of a return is one of the action.
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
        question = PlanningBatch(
            states=self.states[None],
            actions=self.actions[None],
            now=NOW,
            steps=torch.tensor([STEP]),
            max_episode_steps=HORIZON,
        )
        mu, log_sigma = propose(self.model, self.normaliser, question, torch.tensor([ASKED]))
        plans = candidates(mu, log_sigma, self.noise[None], 1.0)
        found = score_plans(
            self.model,
            self.critic,
            self.normaliser,
            CONFIG,
            question,
            plans,
            self.guide,
        )
        weights = softmax_weights(found, inverse_temperature=1.0, standardised=False).weights
        return found[0], torch.einsum("en,ena->ea", weights, plans[:, :, 0])[0]

    def dense(self) -> tuple[Tensor, Tensor]:
        (mean, std), (low, scale) = self.moments["states"], self.moments["returns"]
        inputs = {
            "states": (self.states[None] - mean) / std,
            "actions": self.actions[None],
            "rewards": torch.zeros(1, LENGTH, 1),
            "returns": ((ASKED - low) / scale).expand(1, LENGTH, 1),
        }
        mask = reference.mask("policy", NOW, LENGTH)
        policy = reference.network(self.state, CONFIG.model, inputs, mask)
        plans = reference.propose(policy.mu[0, NOW:], policy.log_sigma[0, NOW:], self.noise, 1.0)
        found = reference.score(
            self.state,
            self.critic.quality,
            CONFIG,
            self.moments,
            self.states,
            self.actions,
            NOW,
            STEP,
            HORIZON,
            plans,
            self.guide,
        )
        _, action = reference.choose(CONFIG, self.guide, found, plans[:, 0])
        return found, action

    def errors(self) -> tuple[float, float]:
        """Relative to the largest utility, and absolute."""
        (ours, our_action), (dense, dense_action) = self.ours(), self.dense()
        utility = (ours - dense).abs().max() / dense.abs().max()
        return utility.item(), (our_action - dense_action).abs().max().item()


def fastest(works: list[Callable[[], object]], rounds: int) -> list[float]:
    """Best time of each, in turns, so that a busy moment of the machine hits all alike."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
