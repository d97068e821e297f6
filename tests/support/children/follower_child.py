"""A second learner in a process of its own, and the tasks that both learners do.

Each line of the standard input is a task: rendezvous, name, arguments. The answer is a line of
JSON. The test is the first learner and does the same in its own process.
"""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.online import OnlineLearner
from learner.process_group import ProcessGroup
from learner.rendezvous import Rendezvous, create_rendezvous, join
from m3pc.config.schema import Config
from m3pc.model.device import prepare_compute
from m3pc.online.lead_learner import FollowerLearner
from m3pc.online.run_folder import open_run
from m3pc.types import DivergedError, TransitionBatch
from tests.support.episodes.shared_data import ROOT
from tests.support.models.small_weights import (
    ACTIONS,
    STATES,
    tiny_config,
    tiny_weights,
    window_batch,
)

Numbers = dict[str, float]
ROWS = 8  # of a batch; with two mask groups and two learners each has two at a time
READY = "ready"
POISON = 3  # a row that the second learner works on


class FollowerProcess:
    """The second learner's process, as the tests see it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.children.follower_child"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid, self._ready = self._process.pid, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)

    def start(self, task: str, *, seconds: float = 60.0, **arguments: Any) -> ProcessGroup:
        """Give it a task; returns the group, of which this process is the first learner."""
        self._ready = self._ready or self.answer() == READY
        rendezvous, store = create_rendezvous("127.0.0.1", size=2, device="cpu", seconds=seconds)
        line = {"rendezvous": asdict(rendezvous), "task": task, "arguments": arguments}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        return join(rendezvous, 0, store)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def settings(preset: str, **changes: object) -> Config:
    """Without dropout, and with a larger epsilon: Adam divides by the size of a gradient, so that
    rounding alone would move a weight whose gradient is 0, such as the bias of keys."""
    plain = {"model__dropout": 0.0, "online__batch": ROWS, "optimiser__epsilon": 1e-4}
    return tiny_config(preset, **(plain | changes))


def transitions(seed: int) -> TransitionBatch[NDArray[Any]]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[Any]:
        return rng.standard_normal((ROWS, *shape)).astype(np.float32)

    return TransitionBatch(
        states=normal(STATES),
        actions=np.tanh(normal(ACTIONS)),
        rewards=normal(),
        next_states=normal(STATES),
        terminals=(rng.random(ROWS) < 0.3).astype(np.float32),
        returns=normal(),
    )


def digest(learner: OnlineLearner) -> str:
    """SHA-256 of everything that learning changes."""
    sha = hashlib.sha256()
    for name, tensor in sorted(everything(learner).items()):
        sha.update(name.encode() + tensor.detach().numpy().tobytes())
    return sha.hexdigest()


def everything(learner: OnlineLearner) -> dict[str, Tensor]:
    return {
        **learner.state(),
        **{f"weights.{name}": x for name, x in learner.model.model.state_dict().items()},
        **{f"critic weights.{name}": x for name, x in learner.critic.critic.state_dict().items()},
    }


def learner(group: ProcessGroup, preset: str = "small", **changes: object) -> OnlineLearner:
    config = settings(preset, **changes)
    prepare_compute(config.compute)
    return OnlineLearner(tiny_weights(config), {}, config, group)


# Tasks


def updates(group: ProcessGroup, count: int, **changes: Any) -> tuple[list[Numbers], str]:
    """Losses of each update, and the digest after the last."""
    shared = learner(group, **changes)
    return [update(shared, number) for number in range(count)], digest(shared)


def update(learner: OnlineLearner, number: int) -> Numbers:
    batches = [transitions(10 * number + k) for k in range(3)]
    return learner.update(number, window_batch(ROWS, seed=number), batches)


def poisoned(group: ProcessGroup, what: str) -> tuple[str, bool]:
    """An update that is not finite with the second learner alone: why each learner skipped it, and
    whether its weights and moments are untouched."""
    shared = learner(group)
    update(shared, 0)
    before = digest(shared)
    windows, batch = window_batch(ROWS), transitions(0)
    if what == "loss":
        windows.rewards[POISON] = math.nan
    elif what == "critic loss":
        batch = replace(batch, rewards=np.where(np.arange(ROWS) == POISON, math.inf, batch.rewards))
    elif group.rank == 1:
        module = shared.model.model if what == "gradient" else shared.critic.critic
        parameter = next(iter(module.parameters()))
        parameter.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
    try:
        if "critic" in what:
            shared.critic.update(batch)
        else:
            shared.model.update(1, windows)
    except DivergedError as error:
        return str(error), digest(shared) == before
    return "", False


def noise(group: ProcessGroup) -> list[list[float]]:
    """What is drawn before, inside and after `per_rank_rng`."""
    torch.manual_seed(7)
    before = torch.rand(3)
    with group.per_rank_rng():
        inside = torch.rand(3)
    group.barrier()  # neither leaves while the other still connects
    return [x.tolist() for x in (before, inside, torch.rand(3))]


def follow(group: ProcessGroup, run: str, bad_from: int = 1 << 40) -> Any:
    """Follow the first learner through a run. From update `bad_from` on, the windows of this
    learner alone have rewards that are NaN."""
    follower = FollowerLearner(open_run(Path(run)), group)
    trainer = follower.trainer
    update = trainer.learner.update

    def spoilt(number: int, windows: Any, batches: Any) -> Numbers:
        if number >= bad_from:
            windows.rewards[:] = math.nan
        return update(number, windows, batches)

    setattr(trainer.learner, "update", spoilt)  # noqa: B010
    reason = ""
    try:
        follower.work()
    except DivergedError as error:
        reason = str(error)
    bits = digest(trainer.learner)
    return [bits, trainer.updates, trainer.skipped, trainer.fingerprint(), reason]


def hang(group: ProcessGroup) -> None:
    """The second process stops after the first barrier; the first waits at the next."""
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.barrier()


TASKS: Mapping[str, Callable[..., Any]] = {
    "updates": updates,
    "poisoned": poisoned,
    "noise": noise,
    "hang": hang,
    "follow": follow,
}


def main() -> None:
    say(READY)
    for line in sys.stdin:
        task = json.loads(line)
        group = join(Rendezvous(**task["rendezvous"]), 1)
        try:
            answer = TASKS[task["task"]](group, **task["arguments"])
        finally:
            group.leave()
        say(answer)


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
