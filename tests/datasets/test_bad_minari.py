"""Bad Minari datasets are refused, and no code that they name is run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gymnasium.spaces import Discrete

from m3pc.datagen.importing import ingest
from m3pc.datasets.source import ImportOptions
from tests.support.episodes.foreign_files import swing, write_minari
from tests.support.runs.refusals import (
    LIMITS,
    external_link,
    external_storage,
    refusal,
    soft_link,
    virtual,
)


def minari(tmp_path: Path, **extra: Any) -> Path:
    return write_minari(
        tmp_path / "minari", [swing(np.random.default_rng(7), 4, ended="cut")], **extra
    )


def edit_metadata(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "data" / "metadata.json"
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))


METADATA: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no action space": (lambda m: m.pop("action_space"), "KeyError: 'action_space'"),
    "an empty space": (lambda m: m.update(action_space="{}"), "not readable as a Minari dataset"),
    "a space of no text": (lambda m: m.update(action_space=None), "not text"),
    "an unknown format": (lambda m: m.update(data_format="zip"), "not readable as a Minari"),
    "another version": (lambda m: m.update(minari_version="9.9"), "not readable as a Minari"),
    "too many episodes": (lambda m: m.update(total_episodes=9), "cannot be read"),
    "no episodes": (lambda m: m.update(total_episodes=0), "not readable as a Minari dataset"),
}


@pytest.mark.parametrize("name", METADATA)
def test_bad_metadata_of_minari_is_refused(name: str, tmp_path: Path) -> None:
    change, word = METADATA[name]
    folder = minari(tmp_path)
    edit_metadata(folder, change)
    assert word in refusal(folder, tmp_path / "out", max_episode_steps=9)


def test_minari_metadata_that_is_no_json_is_refused(tmp_path: Path) -> None:
    folder = minari(tmp_path)
    for content in (b"", b"\xff\x00garbage", b"[]", b"[" * 100_000):
        (folder / "data" / "metadata.json").write_bytes(content)
        message = refusal(folder, tmp_path / "out", max_episode_steps=9)
        assert "metadata.json is not JSON" in message or "RecursionError" in message


@pytest.mark.parametrize("space", ["action_space", "observation_space"])
def test_no_code_that_minari_metadata_names_is_run(space: str, tmp_path: Path) -> None:
    """Minari makes the environment where a space is missing; any function may be its maker."""
    folder, marker = minari(tmp_path, env="Pendulum-v1"), tmp_path / "marker"

    def harm(metadata: dict[str, Any]) -> None:
        del metadata[space]
        spec = json.loads(metadata["env_spec"])
        spec |= {"entry_point": "os:mkdir", "kwargs": {"path": str(marker)}}
        metadata["env_spec"] = json.dumps(spec)

    edit_metadata(folder, harm)
    assert space in refusal(folder, tmp_path / "out")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"id": "evil:Pendulum-v1"}, "'evil:Pendulum-v1' would load a module"),
        ({"max_episode_steps": -1}, "max_episode_steps is -1"),
        ({"max_episode_steps": "many"}, "max_episode_steps is 'many'"),
    ],
)
def test_bad_specs_of_minari_environments_are_refused(
    change: dict[str, Any], word: str, tmp_path: Path
) -> None:
    folder = minari(tmp_path, env="Pendulum-v1")

    def edit(metadata: dict[str, Any]) -> None:
        metadata["env_spec"] = json.dumps(json.loads(metadata["env_spec"]) | change)

    edit_metadata(folder, edit)
    assert word in refusal(folder, tmp_path / "out")


def test_links_and_cycles_in_minari_files_are_refused_or_harmless(tmp_path: Path) -> None:
    folder, out = minari(tmp_path), tmp_path / "out"
    main = folder / "data" / "main_data.hdf5"
    with h5py.File(main, "a") as file:
        file["episode_0/round"] = file["/"]  # a hard link back to the root: a cycle
    ingest(
        str(folder),
        tmp_path / "good",
        ImportOptions(max_episode_steps=9),
        LIMITS,
        lambda progress: None,
    )
    rewards = np.zeros(4)
    for trick, word in (
        (soft_link, "rewards is a SoftLink"),
        (external_link, "rewards is a ExternalLink"),
        (external_storage, "keeps its data in other files"),
        (virtual, "keeps its data in other files"),
    ):
        with h5py.File(main, "a") as file:
            trick(file, rewards)
        assert word in refusal(folder, out, max_episode_steps=9)
        with h5py.File(main, "a") as file:
            del file["rewards"]


def test_minari_data_of_other_kinds_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "does not say its step limit; give --horizon" in refusal(minari(tmp_path), out)
    folder = tmp_path / "minari" / "toy" / "pendulum-v0"
    assert "so --keys a cannot be chosen" in refusal(folder, out, max_episode_steps=9, keys=("a",))
    edit_metadata(
        folder, lambda m: m.update(action_space=m["action_space"].replace("2.0", "0.001"))
    )
    assert "an action reaches" in refusal(folder, out, max_episode_steps=9)
    edit_metadata(
        folder, lambda m: m.update(action_space=m["action_space"].replace("0.001", "Infinity"))
    )
    assert "expected a Box with finite bounds" in refusal(folder, out, max_episode_steps=9)
    (folder / "data" / "main_data.hdf5").write_bytes(b"")
    assert "main_data.hdf5 is not readable as HDF5" in refusal(folder, out, max_episode_steps=9)
    (folder / "data" / "main_data.hdf5").unlink()
    assert "not readable as a Minari dataset" in refusal(folder, out, max_episode_steps=9)


def test_discrete_actions_of_minari_are_refused(tmp_path: Path) -> None:
    recorded = swing(np.random.default_rng(8), 4, ended="cut")
    recorded["actions"] = np.zeros(4, np.int64)
    folder = write_minari(tmp_path / "minari", [recorded], action_space=Discrete(2))
    message = refusal(folder, tmp_path / "out", max_episode_steps=9)
    assert "actions are in Discrete(2); expected a Box" in message
