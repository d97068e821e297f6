"""`m3pc goal` and `goal-compare` in a folder with small checkpoints and data."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from m3pc.model import checkpoint
from replay.store.store import write_store
from tests.support.envs.countdown import COUNTDOWN
from tests.support.episodes.episodes import header, numbered
from tests.support.models.small_weights import tiny_config, tiny_weights

SIZES = {"toy": (2, 1, COUNTDOWN), "hopper": (11, 3, "d4rl/Hopper-v2"),
         "cheetah": (17, 6, "d4rl/HalfCheetah-v2"), "walker": (17, 6, "d4rl/Walker2d-v2"),
         "nut": (23, 7, "robosuite/NutAssemblySquare"), "nameless": (17, 6, None)}  # fmt: skip

OWN = ("--key=1", "--episodes=3", "--out=out", "--no-video")  # options for users' own goals


def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write checkpoints and small data sets, and enter an empty folder beside them."""
    for name, (states, actions, env) in SIZES.items():
        weights = tiny_weights(tiny_config(), states=states, actions=actions, env=env)
        checkpoint.write(tmp_path / name, weights, {}, {})
    other = tiny_weights(tiny_config(), seed=1, states=2, actions=1, env=COUNTDOWN)
    checkpoint.write(tmp_path / "other", other, {}, {})
    with write_store(tmp_path / "walks", header()) as writer:
        for number in range(3):
            writer.append(numbered(number, 20))
    with write_store(
        tmp_path / "walkers", header(states=17, actions=6, env="Walker2d-v4")
    ) as writer:
        episode = numbered(0, 80, states=17)
        writer.append(replace(episode, actions=np.repeat(episode.actions, 6, axis=1)))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", "egl"))
    np.save("zero.npy", np.zeros(2))
    np.save("way.npy", np.stack([np.zeros(7), np.arange(7)], axis=1))


def result(folder: str = "out") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return content


def assert_drawn(path: Path, *, width: int = 400) -> None:
    """The file is a picture that is not empty."""
    with Image.open(path) as image:
        assert image.width >= width
        assert len(set(image.convert("L").resize((200, 100)).tobytes())) > 10
