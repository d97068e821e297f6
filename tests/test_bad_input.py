"""Every bad input is refused with one sentence that says what was found, and leaves nothing."""

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gymnasium.spaces import Discrete

from m3pc.datasets.behaviour import LARGEST
from m3pc.datasets.sandbox import Limits, run_limited
from m3pc.datasets.source import Options
from m3pc.run.ingest import ingest
from m3pc.run.regenerate import load_policy
from m3pc.types import InputError
from replay.store import Store
from tests.foreign_files import (
    PARTS,
    Columns,
    demonstration,
    nothing_left,
    policy,
    swing,
    transitions,
    write_hdf5,
    write_minari,
    write_npz,
    write_robomimic,
)
from tests.shared_data import ROOT

LIMITS = Limits(memory=1 << 30, seconds=60)
WAITS = 600  # of 0.1 s, for another process


def refusal(source: Path | str, out: Path, limits: Limits = LIMITS, **options: Any) -> str:
    """The sentence with which an import is refused."""
    with nothing_left(out.parent), pytest.raises(InputError) as refused:
        ingest(str(source), out, Options(**options), limits, lambda progress: None)
    return sentence(refused)


def sentence(refused: pytest.ExceptionInfo[InputError]) -> str:
    message = str(refused.value)
    assert message
    assert "\n" not in message
    return message


def command(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "m3pc", "data", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=200, cwd=ROOT, check=False)


def assert_refused(done: subprocess.CompletedProcess[str], word: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# Numbers that D4RL columns must not hold, and shapes that they must not have.


def put(name: str, row: int, value: float) -> Callable[[Columns], Columns]:
    def change(columns: Columns) -> Columns:
        column = columns[name].astype(np.float64)
        column[row] = value
        return columns | {name: column}

    return change


def shape(name: str, change: Callable[[Any], Any]) -> Callable[[Columns], Columns]:
    return lambda columns: columns | {name: change(columns[name])}


def without(name: str) -> Callable[[Columns], Columns]:
    return lambda columns: {k: v for k, v in columns.items() if k != name}


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
    "flag 2": (put("terminals", 1, 2), "/terminals holds other values than 0 and 1"),
    "flag -1": (put("timeouts", 1, -1), "/timeouts holds other values than 0 and 1"),
    "flag 0.5": (put("terminals", 1, 0.5), "/terminals holds other values than 0 and 1"),
    "flag NaN": (put("timeouts", 1, np.nan), "/timeouts holds other values than 0 and 1"),
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


def test_an_episode_longer_than_the_horizon_is_refused(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "bad.hdf5", transitions(np.random.default_rng(1)))
    found = refusal(path, tmp_path / "out", horizon=4)
    assert "episode 0 has 5 steps, more than the step limit 4" in found


def test_a_column_that_its_kind_of_file_must_have_is_named(tmp_path: Path) -> None:
    columns = without("rewards")(transitions(np.random.default_rng(1)))
    path = write_hdf5(tmp_path / "bad.hdf5", columns)
    assert "/ has no 'rewards'" in refusal(f"d4rl:{path}", tmp_path / "out")


# Things that HDF5 can do and a plain array of numbers does not need.


def external_link(file: h5py.File, column: Any) -> None:
    write_hdf5(Path(file.filename).with_name("other.hdf5"), {"rewards": column})
    file["rewards"] = h5py.ExternalLink("other.hdf5", "/rewards")


def soft_link(file: h5py.File, column: Any) -> None:
    file["elsewhere"] = column
    file["rewards"] = h5py.SoftLink("/elsewhere")


def external_storage(file: h5py.File, column: Any) -> None:
    raw = Path(file.filename).with_name("raw")
    raw.write_bytes(column.tobytes())
    file.create_dataset(
        "rewards", column.shape, column.dtype, external=[(str(raw), 0, column.nbytes)]
    )


def virtual(file: h5py.File, column: Any) -> None:
    other = write_hdf5(Path(file.filename).with_name("other.hdf5"), {"rewards": column})
    layout = h5py.VirtualLayout(column.shape, column.dtype)
    layout[:] = h5py.VirtualSource(str(other), "rewards", column.shape)
    file.create_virtual_dataset("rewards", layout)


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
    "huge": (huge, "says it has shape (1000000000,)"),
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


# Files that are none, and things that are no files.


def test_files_that_are_not_hdf5_are_refused(tmp_path: Path) -> None:
    good = write_hdf5(tmp_path / "good.hdf5", transitions(np.random.default_rng(3))).read_bytes()
    bad = tmp_path / "bad.hdf5"
    for content in (b"", b"hello, world\n" * 50, good[: len(good) // 2], good[8:]):
        bad.write_bytes(content)
        assert "bad.hdf5 is not readable as HDF5" in refusal(bad, tmp_path / "out")


def test_things_that_are_no_files_are_refused_without_being_opened(tmp_path: Path) -> None:
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


def test_an_unknown_id_is_refused_with_the_ones_that_are_close(tmp_path: Path) -> None:
    found = refusal("d4rl:hopper-medum-v2", tmp_path / "out")
    assert "did you mean" in found
    assert "d4rl:hopper-medium-v2" in found
    assert "begins with 'atari'" in refusal("atari:pong", tmp_path / "out")


def test_an_out_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "good.hdf5", transitions(np.random.default_rng(4)))
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(InputError, match="cannot be made"):
        ingest(str(path), file / "out", Options(), LIMITS, lambda progress: None)
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
        "episode 1: states are float32 [5, 13], expected float32 [5, 14]",
    ),
    "a lost key": (second_demo(without("obs/object")), "/data/demo_2/obs lacks"),
    "a lost next key": (second_demo(without("next_obs/object")), "/data/demo_2/next_obs lacks"),
    "short obs": (second_demo(shape("obs/object", lambda c: c[1:])), "lengths: [4, 4, 4, 3]"),
    "lost steps": (second_demo(lambda d: d | {k: d[k][:0] for k in d}), "neither 0"),
    "more next_obs": (
        second_demo(lambda d: {k: np.tile(v, (2, 1)) if "next" in k else v for k, v in d.items()}),
        "next_obs of [8, 14]",
    ),
    "short rewards": (second_demo(shape("rewards", lambda c: c[1:])), "[4, 4, 3, 4] rows of obs"),
    "done 2": (second_demo(put("dones", -1, 2)), "/data/demo_2/dones holds other values"),
    "done NaN": (second_demo(put("dones", -1, np.nan)), "/data/demo_2/dones holds other values"),
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


# Minari


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
    "an empty space": (lambda m: m.update(action_space="{}"), "not readable as a Minari data set"),
    "a space of no text": (lambda m: m.update(action_space=None), "not text"),
    "an unknown format": (lambda m: m.update(data_format="zip"), "not readable as a Minari"),
    "another version": (lambda m: m.update(minari_version="9.9"), "not readable as a Minari"),
    "too many episodes": (lambda m: m.update(total_episodes=9), "cannot be read"),
    "no episodes": (lambda m: m.update(total_episodes=0), "not readable as a Minari data set"),
}


@pytest.mark.parametrize("name", METADATA)
def test_bad_metadata_of_minari_is_refused(name: str, tmp_path: Path) -> None:
    change, word = METADATA[name]
    folder = minari(tmp_path)
    edit_metadata(folder, change)
    assert word in refusal(folder, tmp_path / "out", horizon=9)


def test_minari_metadata_that_is_no_json_is_refused(tmp_path: Path) -> None:
    folder = minari(tmp_path)
    for content in (b"", b"\xff\x00garbage", b"[]", b"[" * 100_000):
        (folder / "data" / "metadata.json").write_bytes(content)
        found = refusal(folder, tmp_path / "out", horizon=9)
        assert "metadata.json is not JSON" in found or "RecursionError" in found


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
        ({"max_episode_steps": -1}, "horizon is -1"),
        ({"max_episode_steps": "many"}, "horizon is 'many'"),
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


def test_links_and_circles_inside_minari_files_are_refused_or_harmless(tmp_path: Path) -> None:
    folder, out = minari(tmp_path), tmp_path / "out"
    main = folder / "data" / "main_data.hdf5"
    with h5py.File(main, "a") as file:
        file["episode_0/round"] = file["/"]  # a hard link back: every walk must see it once
    ingest(str(folder), tmp_path / "good", Options(horizon=9), LIMITS, lambda progress: None)
    rewards = np.zeros(4)
    for trick, word in (
        (soft_link, "rewards is a SoftLink"),
        (external_link, "rewards is a ExternalLink"),
        (external_storage, "keeps its data in other files"),
        (virtual, "keeps its data in other files"),
    ):
        with h5py.File(main, "a") as file:
            trick(file, rewards)
        assert word in refusal(folder, out, horizon=9)
        with h5py.File(main, "a") as file:
            del file["rewards"]


def test_minari_data_of_other_kinds_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "does not say its step limit; give --horizon" in refusal(minari(tmp_path), out)
    folder = tmp_path / "minari" / "toy" / "pendulum-v0"
    assert "so --keys a cannot be chosen" in refusal(folder, out, horizon=9, keys=("a",))
    edit_metadata(
        folder, lambda m: m.update(action_space=m["action_space"].replace("2.0", "0.001"))
    )
    assert "an action reaches" in refusal(folder, out, horizon=9)
    edit_metadata(
        folder, lambda m: m.update(action_space=m["action_space"].replace("0.001", "Infinity"))
    )
    assert "expected a Box with finite bounds" in refusal(folder, out, horizon=9)
    (folder / "data" / "main_data.hdf5").write_bytes(b"")
    assert "main_data.hdf5 is not readable as HDF5" in refusal(folder, out, horizon=9)
    (folder / "data" / "main_data.hdf5").unlink()
    assert "not readable as a Minari data set" in refusal(folder, out, horizon=9)


def test_discrete_actions_of_minari_are_refused(tmp_path: Path) -> None:
    recorded = swing(np.random.default_rng(8), 4, ended="cut")
    recorded["actions"] = np.zeros(4, np.int64)
    folder = write_minari(tmp_path / "minari", [recorded], action_space=Discrete(2))
    found = refusal(folder, tmp_path / "out", horizon=9)
    assert "actions are in Discrete(2); expected a Box" in found


# Policies


def policy_refusal(path: Path) -> str:
    with nothing_left(path.parent), pytest.raises(InputError) as refused:
        load_policy(path, LIMITS)
    return sentence(refused)


Policy = dict[str, Any]
POLICIES: dict[str, tuple[Callable[[Policy], Policy], str]] = {
    "nothing": (lambda p: {}, "holds no policy"),
    "no bias": (without("fc1.bias"), "['fc1.bias'] missing"),
    "no last layer": (without("last_fc.weight"), "['last_fc.weight'] missing"),
    "a lost layer": (
        lambda p: {k.replace("fc1", "fc2"): v for k, v in p.items()},
        "['fc1.weight', 'fc1.bias'] missing",
    ),
    "NaN": (shape("fc1.weight", lambda w: w * np.nan), "fc1 holds NaN or Inf"),
    "too large": (
        shape("fc0.bias", lambda b: b.astype(np.float64) * 1e300),
        "fc0 holds NaN or Inf",
    ),
    "a narrow layer": (shape("fc1.weight", lambda w: w[:, 1:]), "expected [out, 8], [out]"),
    "a short bias": (shape("fc1.bias", lambda b: b[1:]), "fc1 has shapes [8, 8], [7]"),
    "a flat weight": (shape("fc0.weight", lambda w: w[0]), "fc0 has shapes [11], [8]"),
    "two widths": (
        lambda p: {k: v[:1] if "log_std" in k else v for k, v in p.items()},
        "different widths",
    ),
    "text": (shape("fc0.bias", lambda b: b.astype("U8")), "['fc0.bias'] are not arrays of numbers"),
    "complex": (shape("fc0.bias", lambda b: b * 1j), "['fc0.bias'] are not arrays of numbers"),
    "pickled objects": (shape("fc0.bias", lambda b: b.astype(object)), "Object arrays cannot be"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_bad_policies_are_refused(name: str, tmp_path: Path) -> None:
    change, word = POLICIES[name]
    path = write_npz(tmp_path / "hopper.npz", change(policy(np.random.default_rng(9))))
    assert word in policy_refusal(path)


def test_a_pickle_inside_a_policy_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    harm = np.empty(1, dtype=object)
    harm[0] = Harm()
    arrays = policy(np.random.default_rng(9)) | {"extra": harm}
    path = write_npz(tmp_path / "hopper.npz", arrays)
    assert "Object arrays cannot be loaded" in policy_refusal(path)
    assert not marker.exists()


def test_a_policy_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hopper.npz"
    block = bytes(1 << 20)
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("fc0.weight.npy", "w") as member,
    ):
        for _ in range((LARGEST >> 20) + 1):
            member.write(block)
    assert path.stat().st_size < LARGEST / 100
    assert f"a policy needs at most {LARGEST}" in policy_refusal(path)


def test_an_array_that_says_it_is_larger_than_it_is_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hopper.npz"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999,), }"
    with zipfile.ZipFile(path, "w") as archive:
        size = len(header).to_bytes(2, "little")
        archive.writestr("fc0.weight.npy", b"\x93NUMPY\x01\x00" + size + header)
    assert "raise --memory-limit" in policy_refusal(path)


def test_files_without_a_policy_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "hopper.npz"
    arrays = write_npz(tmp_path / "good.npz", policy(np.random.default_rng(9))).read_bytes()
    for content, word in (
        (b"", "is not readable as HDF5"),
        (b"text", "is not readable as HDF5"),
        (arrays[:-100], "is not readable as HDF5"),  # the list of a zip stands at its end
        (arrays[:200] + bytes(400) + arrays[600:], "cannot be read"),
    ):
        file.write_bytes(content)
        assert word in policy_refusal(file)
    columns = transitions(np.random.default_rng(9))
    assert "holds no behaviour policy" in policy_refusal(
        write_hdf5(tmp_path / "hopper.hdf5", columns)
    )
    linked = tmp_path / "hopper-linked.hdf5"
    with h5py.File(linked, "w") as f:
        f["metadata"] = h5py.ExternalLink("hopper.hdf5", "/")
    assert "/metadata is a ExternalLink" in policy_refusal(linked)


# The command as users run it


def test_the_command_ends_with_2_and_one_sentence(tmp_path: Path) -> None:
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


# The sandbox


def test_a_file_that_needs_more_than_the_memory_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.hdf5"
    with h5py.File(path, "w") as file:  # 800 MB of zeros, none of which is on disk
        file.create_dataset("observations", (10**8, 2), "f4", chunks=(1024, 2))
        for name in ("actions", "rewards", "terminals"):
            file.create_dataset(name, (10**8,), "f4", chunks=(1024,))
    assert path.stat().st_size < 1 << 16
    limits = Limits(memory=512 << 20, seconds=60)
    assert "needs more than 512 MiB; raise --memory-limit" in refusal(
        path, tmp_path / "out", limits
    )


DEEDS = {
    "loop": "longer than 1 s; raise --time-limit",
    "sleep": "longer than 1 s; raise --time-limit",
    "crash": "brought its reader down (SIGSEGV)",
    "abort": "brought its reader down (SIGABRT)",
    "leave": "failed with exit code 3",
    "print": "the reader said 'hello",
    "print bytes": "the reader said",
    "print a list": "the reader said '[1, 2]",
    "print text for numbers": "the reader said",
    "print deep": "the reader said",
    "print without end": "the reader said 'xxx",
    "complain without end": "failed with exit code 3",
}


@pytest.mark.parametrize("deed", DEEDS)
def test_a_child_that_misbehaves_is_ended_and_refused(deed: str, tmp_path: Path) -> None:
    seconds = 1.0 if deed in ("loop", "sleep") else 60.0
    pid_file = tmp_path / "pid"
    job = {"deed": deed, "pid_file": str(pid_file), "out": str(tmp_path)}
    with pytest.raises(InputError) as refused:
        run_limited("tests.unruly_child", job, Limits(seconds=seconds), lambda progress: None)
    assert DEEDS[deed] in str(refused.value)
    assert len(str(refused.value)) < 1000
    assert not pid_file.exists() or not alive(int(pid_file.read_text()))


SLOW_IMPORT = """
import sys
from pathlib import Path
import m3pc.run.ingest as run
from m3pc.datasets.source import Options

source, out, pid_file, deed = sys.argv[1:]
real = run.run_limited
run.run_limited = lambda module, job, *rest: real(
    "tests.unruly_child", job | {"deed": deed, "pid_file": pid_file}, *rest
)
run.ingest(source, Path(out), Options(), run.Limits(seconds=100), lambda progress: None)
"""


def test_a_child_that_writes_no_store_is_refused(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "good.hdf5", transitions(np.random.default_rng(11)))
    (tmp_path / "pid").write_text("")
    arguments = [str(path), str(tmp_path / "out"), str(tmp_path / "pid"), "write nothing"]
    with nothing_left(tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", SLOW_IMPORT, *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=ROOT,
            check=False,
        )
    assert "InputError" in done.stderr
    assert "is not a store: it has no MANIFEST" in done.stderr


def test_a_killed_import_ends_whole_and_the_next_one_clears_up(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "good.hdf5", transitions(np.random.default_rng(12)))
    out, pid_file, stage = tmp_path / "out", tmp_path / "pid", tmp_path / ".out.partial"
    arguments = [str(path), str(out), str(pid_file), "sleep"]
    with subprocess.Popen([sys.executable, "-c", SLOW_IMPORT, *arguments], cwd=ROOT) as first:
        try:
            wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
            reader = int(pid_file.read_text())
            # A second import of the same name finds the first alive, and leaves its work alone.
            assert "is being written by another process" in refusal(path, out)
            assert (stage / "half").read_text() == "written"
            assert alive(reader)
        finally:
            first.kill()
    wait_until(lambda: not alive(reader))  # it must not write on into what is now the next one's
    assert (stage / "half").read_text() == "written"
    assert not out.exists()
    store = ingest(str(path), out, Options(), LIMITS, lambda progress: None)
    assert store.totals == Store(out).totals
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good.hdf5", "out", "pid"]
    assert sorted(p.name for p in out.iterdir()) == ["MANIFEST", "segments"]


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not yet waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(reached: Callable[[], bool]) -> None:
    for _ in range(WAITS):
        if reached():
            return
        time.sleep(0.1)
    raise AssertionError("what the other process was to do did not happen")


assert sum(PARTS.values()) == 14  # the width that the sentences above speak of
