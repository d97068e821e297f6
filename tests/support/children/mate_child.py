"""A second learner in a process of its own, and what both do.

Each line of the standard input is a task: where to meet, what to do, with what. The answer is a
line of JSON. The tests are the first learner and do the same in their own process.
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
from learner.rendezvous import Rendezvous, invite, join
from m3pc.config.schema import Config
from m3pc.model.device import prepare_compute
from m3pc.online.lead_learner import FollowerLearner
from m3pc.online.run_folder import open_run
from m3pc.types import DivergedError, TransitionBatch
from tests.support.episodes.shared_data import ROOT
from tests.support.models.small_weights import ACTIONS, STATES, segments, tiny_config, tiny_weights

Numbers = dict[str, float]
ROWS = 8  # of a batch; with two mask groups and two learners each has two at a time
READY = "ready"
POISON = 3  # a row that the second learner works on


class Other:
    """The process, as the tests see it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.children.mate_child"],
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

    def told(self, task: str, *, seconds: float = 60.0, **arguments: Any) -> ProcessGroup:
        """Once it has the task and has joined: this process as the first learner."""
        self._ready = self._ready or self.answer() == READY
        meeting, table = invite("127.0.0.1", size=2, device="cpu", seconds=seconds)
        line = {"meeting": asdict(meeting), "task": task, "arguments": arguments}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        return join(meeting, 0, table)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def settings(preset: str, **changes: object) -> Config:
    """Adam divides by the size of a gradient: without a larger epsilon rounding alone would move
    what has none, such as the bias of keys."""
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
    """Of every bit that learning changes."""
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


# What both do


def updates(group: ProcessGroup, count: int, **changes: Any) -> tuple[list[Numbers], str]:
    """Losses of each update, and all bits after the last."""
    found = learner(group, **changes)
    return [update(found, number) for number in range(count)], digest(found)


def update(found: OnlineLearner, number: int) -> Numbers:
    batches = [transitions(10 * number + k) for k in range(3)]
    return found.update(number, segments(ROWS, seed=number), batches)


def poisoned(group: ProcessGroup, what: str) -> tuple[str, bool]:
    """An update that goes wrong with the second learner alone: why each left it out, and whether
    its weights and moments are untouched."""
    found = learner(group)
    update(found, 0)
    before = digest(found)
    pieces, batch = segments(ROWS), transitions(0)
    if what == "loss":
        pieces.rewards[POISON] = math.nan
    elif what == "critic loss":
        batch = replace(batch, rewards=np.where(np.arange(ROWS) == POISON, math.inf, batch.rewards))
    elif group.rank == 1:
        part = found.model.model if what == "gradient" else found.critic.critic
        parameter = next(iter(part.parameters()))
        parameter.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
    try:
        if "critic" in what:
            found.critic.update(batch)
        else:
            found.model.update(1, pieces)
    except DivergedError as error:
        return str(error), digest(found) == before
    return "", False


def noise(group: ProcessGroup) -> list[list[float]]:
    """What is drawn before, inside and after `own_noise`."""
    torch.manual_seed(7)
    before = torch.rand(3)
    with group.per_rank_rng():
        inside = torch.rand(3)
    group.barrier()  # nobody leaves while the other still comes
    return [x.tolist() for x in (before, inside, torch.rand(3))]


def along(group: ProcessGroup, run: str, bad_from: int = 1 << 40) -> Any:
    """Follow the first learner through a run. From update `bad_from` on this learner alone has
    pieces without a number in them."""
    mate = FollowerLearner(open_run(Path(run)), group)
    real = mate.trainer.learner.update

    def spoilt(number: int, pieces: Any, batches: Any) -> Numbers:
        if number >= bad_from:
            pieces.rewards[:] = math.nan
        return real(number, pieces, batches)

    setattr(mate.trainer.learner, "update", spoilt)  # noqa: B010
    try:
        mate.work()
        error = ""
    except DivergedError as found:
        error = str(found)
    trainer = mate.trainer
    return [digest(trainer.learner), trainer.updates, trainer.left_out, trainer.seen(), error]


def hang(group: ProcessGroup) -> None:
    """The second stops after the first meeting; the first waits for another."""
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.barrier()


TASKS: Mapping[str, Callable[..., Any]] = {
    "updates": updates,
    "poisoned": poisoned,
    "noise": noise,
    "hang": hang,
    "along": along,
}


def main() -> None:
    say(READY)
    for line in sys.stdin:
        order = json.loads(line)
        group = join(Rendezvous(**order["meeting"]), 1)
        try:
            answer = TASKS[order["task"]](group, **order["arguments"])
        finally:
            group.leave()
        say(answer)


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
