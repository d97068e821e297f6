"""Every bad file is refused with a one-line message, and nothing is left behind."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from m3pc.datagen.importing import ingest
from m3pc.datasets.source import ImportOptions
from m3pc.types import InputError
from tests.support.episodes.foreign_files import (
    PARTS,
    Columns,
    demonstration,
    nothing_left,
    policy,
    transitions,
    write_hdf5,
    write_npz,
    write_robomimic,
)
from tests.support.runs.refusals import (
    LIMITS,
    assert_refused,
    command,
    external_link,
    external_storage,
    put,
    refusal,
    shape,
    soft_link,
    virtual,
    without,
)

# Numbers that D4RL columns must not hold, and shapes that they must not have.


COLUMNS: dict[str, tuple[Callable[[Columns], Columns], str]] = {
    "no rows": (lambda c: {k: v[:0] for k, v in c.items()}, "/observations has shape [0, 3]"),
    "NaN state": (put("observations", 6, np.nan), "episode 1: states hold NaN or Inf at step 1"),
    "NaN final state": (put("next_observations", 4, np.nan), "episode 0: states hold NaN or Inf"),
    "NaN successor": (put("next_observations", 2, np.nan), "episode 0: states hold NaN or Inf"),
    "NaN action": (put("actions", 0, np.nan), "actions hold NaN or Inf at step 0"),
    "NaN reward": (put("rewards", 2, np.nan), "rewards hold NaN or Inf at step 2"),
    "Inf reward": (put("rewards", 3, np.inf), "rewards hold NaN or Inf at step 3"),
    "-Inf state": (put("observations", 1, -np.inf), "states hold NaN or Inf"),
    "too large for float32": (put("rewards", 1, 1e39), "rewards hold NaN or Inf at step 1"),
    "action beyond 1": (put("actions", 9, -1.5), "an action reaches 1.5, expected [-1, 1]"),
    "flag 2": (put("terminals", 1, 2), "/terminals holds values other than 0 and 1"),
    "flag -1": (put("timeouts", 1, -1), "/timeouts holds values other than 0 and 1"),
    "flag 0.5": (put("terminals", 1, 0.5), "/terminals holds values other than 0 and 1"),
    "flag NaN": (put("timeouts", 1, np.nan), "/timeouts holds values other than 0 and 1"),
    "short rewards": (shape("rewards", lambda c: c[:-1]), "[16, 16, 15, 16, 16] rows"),
    "short actions": (shape("actions", lambda c: c[1:]), "[16, 15, 16, 16, 16] rows"),
    "long flags": (shape("timeouts", lambda c: np.tile(c, 2)), "[16, 16, 16, 16, 32] rows"),
    "short successors": (shape("next_observations", lambda c: c[:-1]), "shape [15, 3]"),
    "narrow successors": (shape("next_observations", lambda c: c[:, :2]), "shape [16, 2]"),
    "states of rank 3": (shape("observations", lambda c: c[None]), "shape [1, 16, 3]"),
    "a single state": (shape("observations", lambda c: c[0, 0]), "/observations has shape []"),
    "wide rewards": (shape("rewards", lambda c: np.tile(c[:, None], 2)), "shape [16, 2]"),
    "wide flags": (shape("terminals", lambda c: np.tile(c[:, None], 2)), "shape [16, 2]"),
    "actions of width 0": (shape("actions", lambda c: c[:, :0]), "/actions has shape [16, 0]"),
    "states of width 65537": (
        lambda c: {k: np.zeros((1, 65_537)) if "obs" in k else v[:1] for k, v in c.items()},
        "states is 65537",
    ),
    "complex rewards": (shape("rewards", lambda c: c * 1j), "/rewards holds complex64"),
    "text": (shape("rewards", lambda c: c.astype("S8")), "/rewards holds |S8"),
    "no observations": (without("observations"), "neither D4RL"),
    "no actions": (without("actions"), "neither D4RL"),
    "no rewards": (without("rewards"), "neither D4RL"),
    "no terminals": (without("terminals"), "neither D4RL"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_bad_columns_of_d4rl_are_refused(name: str, tmp_path: Path) -> None:
    change, word = COLUMNS[name]
    path = write_hdf5(tmp_path / "bad.hdf5", change(transitions(np.random.default_rng(1))))
    assert word in refusal(path, tmp_path / "out")


def test_an_episode_longer_than_the_step_limit_is_refused(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "bad.hdf5", transitions(np.random.default_rng(1)))
    message = refusal(path, tmp_path / "out", max_episode_steps=4)
    assert "episode 0 has 5 steps, more than the step limit 4" in message


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    columns = without("rewards")(transitions(np.random.default_rng(1)))
    path = write_hdf5(tmp_path / "bad.hdf5", columns)
    assert "/ has no 'rewards'" in refusal(f"d4rl:{path}", tmp_path / "out")


# Features of HDF5 that a plain array of numbers does not need.


def strings(file: h5py.File, column: Any) -> None:
    file.create_dataset("rewards", data=["1"] * len(column), dtype=h5py.string_dtype())


def lists(file: h5py.File, column: Any) -> None:
    file.create_dataset("rewards", column.shape, h5py.vlen_dtype(np.float32))


def references(file: h5py.File, column: Any) -> None:
    file.create_dataset("rewards", column.shape, h5py.ref_dtype)


def compound(file: h5py.File, column: Any) -> None:
    file.create_dataset("rewards", column.shape, [("a", "f4"), ("b", "f4")])


def small_arrays(file: h5py.File, column: Any) -> None:
    file.create_dataset("rewards", column.shape, np.dtype("(3,)f4"))


def huge(file: h5py.File, column: Any) -> None:
    """A billion rows in the header, none on disk."""
    file.create_dataset("rewards", (10**9,), "f4", chunks=(1024,), compression="gzip")


def plugin_filter(file: h5py.File, column: Any) -> None:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((4,))
    properties.set_filter(32_015, h5py.h5z.FLAG_OPTIONAL, ())  # the number of Zstandard's plug-in
    space = h5py.h5s.create_simple(column.shape)
    h5py.h5d.create(file.id, b"rewards", h5py.h5t.NATIVE_FLOAT, space, properties)


TRICKS: dict[str, tuple[Callable[[h5py.File, Any], None], str]] = {
    "external link": (external_link, "/rewards is a ExternalLink"),
    "soft link": (soft_link, "/rewards is a SoftLink"),
    "external storage": (external_storage, "/rewards keeps its data in other files"),
    "virtual": (virtual, "/rewards keeps its data in other files"),
    "strings": (strings, "/rewards holds object, expected numbers"),
    "lists": (lists, "/rewards holds object, expected numbers"),
    "references": (references, "/rewards holds object, expected numbers"),
    "compound": (compound, "expected numbers"),
    "small arrays": (small_arrays, "expected numbers"),
    "huge": (huge, "/rewards has shape (1000000000,)"),
    "empty space": (lambda f, c: f.create_dataset("rewards", data=h5py.Empty("f4")), "shape None"),
    "plug-in filter": (plugin_filter, "needs the plug-in filters [32015]"),
    "group": (lambda f, c: f.create_group("rewards"), "/rewards is a group, expected an array"),
    "data type": (lambda f, c: f.__setitem__("rewards", np.dtype("f4")), "expected an array"),
}


@pytest.mark.parametrize("name", TRICKS)
def test_more_than_plain_arrays_is_refused(name: str, tmp_path: Path) -> None:
    trick, word = TRICKS[name]
    columns = transitions(np.random.default_rng(2))
    path = write_hdf5(tmp_path / "bad.hdf5", without("rewards")(columns))
    with h5py.File(path, "a") as file:
        trick(file, columns["rewards"])
    assert word in refusal(path, tmp_path / "out")


# Files that are not HDF5, and paths that are not files.


def test_files_that_are_not_hdf5_are_refused(tmp_path: Path) -> None:
    good = write_hdf5(tmp_path / "good.hdf5", transitions(np.random.default_rng(3))).read_bytes()
    bad = tmp_path / "bad.hdf5"
    for content in (b"", b"hello, world\n" * 50, good[: len(good) // 2], good[8:]):
        bad.write_bytes(content)
        assert "bad.hdf5 is not readable as HDF5" in refusal(bad, tmp_path / "out")


def test_paths_that_are_not_files_are_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    out = tmp_path / "out"
    assert "neither a file nor a folder" in refusal(tmp_path / "pipe", out)
    assert "neither a file nor a folder" in refusal(os.devnull, out)
    assert "data/metadata.json is missing" in refusal(tmp_path / "folder", out)
    assert "no file or folder" in refusal(tmp_path / "dangling", out)
    assert "no file or folder" in refusal("a" * 5000, out)
    assert "no file or folder" in refusal("~nobody-of-this-name/file", out)


def test_an_unknown_id_is_refused_with_similar_ones(tmp_path: Path) -> None:
    message = refusal("d4rl:hopper-medum-v2", tmp_path / "out")
    assert "did you mean" in message
    assert "d4rl:hopper-medium-v2" in message
    assert "begins with 'atari'" in refusal("atari:pong", tmp_path / "out")


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "good.hdf5", transitions(np.random.default_rng(4)))
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(InputError, match="cannot be made"):
        ingest(str(path), file / "out", ImportOptions(), LIMITS, lambda progress: None)
    (tmp_path / ".out.partial").symlink_to(tmp_path)
    assert "cannot be made" in refusal(path, tmp_path / "out")
    assert file.read_text() == "precious"


# robomimic


def second_demo(change: Callable[[Columns], Columns]) -> Callable[[Columns], list[Columns]]:
    return lambda demo: [demo, change(demo)]


DEMOS: dict[str, tuple[Callable[[Columns], list[Columns]], str]] = {
    "another width": (
        second_demo(
            lambda d: d | {f"{w}/object": d[f"{w}/object"][:, :4] for w in ("obs", "next_obs")}
        ),
        "episode 1: states are float32 [5, 13], expected float32 [5, 19]",
    ),
    "a lost key": (second_demo(without("obs/object")), "/data/demo_2/obs lacks"),
    "a lost next key": (second_demo(without("next_obs/object")), "/data/demo_2/next_obs lacks"),
    "short obs": (second_demo(shape("obs/object", lambda c: c[1:])), "lengths: [4, 4, 4, 3]"),
    "lost steps": (second_demo(lambda d: d | {k: d[k][:0] for k in d}), "neither of them 0"),
    "more next_obs": (
        second_demo(lambda d: {k: np.tile(v, (2, 1)) if "next" in k else v for k, v in d.items()}),
        "next_obs of [8, 19]",
    ),
    "short rewards": (second_demo(shape("rewards", lambda c: c[1:])), "[4, 4, 3, 4] rows of obs"),
    "done 2": (second_demo(put("dones", -1, 2)), "/data/demo_2/dones holds values other"),
    "done NaN": (second_demo(put("dones", -1, np.nan)), "/data/demo_2/dones holds values other"),
    "NaN": (second_demo(put("obs/object", 1, np.nan)), "episode 1: states hold NaN"),
    "no rewards": (second_demo(without("rewards")), "/data/demo_2 has no 'rewards'"),
    "no actions": (second_demo(without("actions")), "/data/demo_2 has no 'actions'"),
    "no dones": (second_demo(without("dones")), "/data/demo_2 has no 'dones'"),
    "no obs": (second_demo(lambda d: {k: d[k] for k in d if k[:4] != "obs/"}), "has no 'obs'"),
    "no demo": (lambda d: [], "neither D4RL"),
}


@pytest.mark.parametrize("name", DEMOS)
def test_bad_demonstrations_are_refused(name: str, tmp_path: Path) -> None:
    change, word = DEMOS[name]
    demos = change(demonstration(np.random.default_rng(5), 4, done=True))
    path = write_robomimic(tmp_path / "bad.hdf5", demos, env_name="Lift" if demos else None)
    assert word in refusal(path, tmp_path / "out")


def test_bad_groups_of_robomimic_are_refused(tmp_path: Path) -> None:
    out, demo = tmp_path / "out", demonstration(np.random.default_rng(6), 4, done=True)
    path = write_robomimic(tmp_path / "bad.hdf5", [demo])
    assert "lacks the observations ['camera']; choose with --keys" in refusal(
        path, out, keys=("object", "camera")
    )
    with h5py.File(path, "a") as file:
        file["data"].attrs["env_args"] = "no JSON"
    assert "env_args that are not JSON" in refusal(path, out)
    with h5py.File(path, "a") as file:
        del file["data"].attrs["env_args"]
        file["data"].move("demo_1", "demo_x")
    assert "/data has no demo_0, demo_1, ...; found ['demo_x']" in refusal(path, out)
    array = write_hdf5(tmp_path / "array.hdf5", {"data": demo["obs/object"]})
    assert "neither D4RL" in refusal(array, out)
    assert "/data is an array, expected a group" in refusal(f"robomimic:{array}", out)


# The command as users run it


def test_the_command_ends_with_2_and_a_message(tmp_path: Path) -> None:
    columns = transitions(np.random.default_rng(10))
    linked = write_hdf5(tmp_path / "linked.hdf5", without("rewards")(columns))
    with h5py.File(linked, "a") as file:
        file["rewards"] = h5py.ExternalLink("linked.hdf5", "/terminals")
    (tmp_path / "text.hdf5").write_text("hello")
    os.mkfifo(tmp_path / "pipe")
    arrays = policy(np.random.default_rng(9)) | {"fc0.bias": np.array([None])}
    pickled = write_npz(tmp_path / "hopper-0.npz", arrays)
    cases: list[tuple[list[Path | str], str]] = [
        (["import", linked], "ExternalLink"),
        (["import", tmp_path / "text.hdf5"], "not readable as HDF5"),
        (["import", tmp_path / "pipe"], "neither a file nor a folder"),
        (["import", "d4rl:hopper-medum-v2"], "did you mean"),
        (["import", linked, "--sha256", "00"], "SHA-256"),
        (["import", linked, "--memory-limit", "0.25"], "raise --memory-limit"),
        (["regenerate", pickled, "--steps", "5"], "Object arrays cannot be loaded"),
    ]
    for arguments, word in cases:
        with nothing_left(tmp_path):
            assert_refused(command(*arguments[:2], tmp_path / "out", *arguments[2:]), word)


def test_the_command_refuses_a_damaged_store(tmp_path: Path) -> None:
    (tmp_path / "MANIFEST").write_text("00000000 {}\n")
    for name in ("info", "sample"):
        assert_refused(command(name, tmp_path), "MANIFEST line 1 was changed")
        assert_refused(command(name, tmp_path / "nowhere"), "is not a store")


assert sum(PARTS.values()) == 19  # the width in the messages above
