"""Malicious files: none of their code runs, no output grows without bound, nothing is left behind.

Features of HDF5 are in test_bad_input.py, archives of arrays in test_bad_policies.py.
"""

import os
import pickle
import socket
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from m3pc.datagen import convert
from m3pc.datagen.importing import ingest
from m3pc.datasets import behaviour
from m3pc.datasets.source import ImportOptions
from m3pc.model.device import bf16_works
from m3pc.types import InputError
from replay.store.store import Store
from tests.support.episodes.foreign_files import (
    demonstration,
    policy,
    swing,
    transitions,
    write_hdf5,
    write_minari,
    write_npz,
    write_small_store,
)
from tests.support.faults.resealed_store import replace_segment_file
from tests.support.runs.refusals import LIMITS, refusal

HARM = "open({marker!r}, 'w').close()\n"


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


# Code


def plant(folder: Path, marker: Path, *modules: str) -> None:
    for name in modules:
        (folder / f"{name}.py").write_text(HARM.format(marker=str(marker)))


def test_no_module_that_came_with_a_file_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user changes to the downloaded folder and imports a file from there."""
    path = write_hdf5(tmp_path / "good.hdf5", transitions(np.random.default_rng(1)))
    marker = tmp_path / "marker"
    plant(tmp_path, marker, "h5py", "numpy", "pydantic", "pyarrow", "minari", "resource")
    monkeypatch.chdir(tmp_path)
    ingest("good.hdf5", tmp_path / "out", ImportOptions(), LIMITS, lambda progress: None)
    assert not marker.exists()
    assert path.exists()


@pytest.mark.long  # torch is loaded once more
def test_no_module_of_the_folder_is_loaded_to_try_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    plant(tmp_path, marker, "torch")
    monkeypatch.chdir(tmp_path)
    bf16_works()
    assert not marker.exists()


def pickled_type(marker: Path) -> pa.Field:
    """A column whose type old versions of Arrow unpickled."""
    return pa.field(
        "observations",
        pa.list_(pa.float32(), 3),
        metadata={
            "ARROW:extension:name": "arrow.py_extension_type",
            "ARROW:extension:metadata": pickle.dumps(Harm(marker)),
        },
    )


def test_no_type_of_an_arrow_column_is_unpickled(tmp_path: Path) -> None:
    folder, marker = arrow_minari(tmp_path), tmp_path / "marker"
    [part] = folder.glob("data/0/*.arrow")
    with pa.ipc.open_file(part.read_bytes()) as reader:
        batch = reader.get_batch(0)
    place = batch.schema.get_field_index("observations")
    values = batch["observations"].cast(pa.list_(pa.float32(), 3))
    columns = [values if i == place else column for i, column in enumerate(batch.columns)]
    schema = batch.schema.set(place, pickled_type(marker))
    part.write_bytes(packed(pa.record_batch(columns, schema=schema), None))
    try:
        ingest(
            str(folder),
            tmp_path / "out",
            ImportOptions(max_episode_steps=9),
            LIMITS,
            lambda progress: None,
        )
    except InputError as error:
        assert "\n" not in str(error)
    assert not marker.exists()


def test_names_in_a_file_reach_no_terminal_unfiltered(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "bad.hdf5", transitions(np.random.default_rng(2)))
    with h5py.File(path, "a") as file:
        file["\x1b[2J\x1b]0;title\x07\u202ename"] = h5py.SoftLink("/rewards")
    message = refusal(path, tmp_path / "out")
    assert "/?[2J?]0;title??name is a SoftLink" in message
    assert message.isprintable()


# Texts beside a policy, which may lead to other files as arrays may.


def outside(file: h5py.Group, secret: Path) -> None:
    file.create_dataset("nonlinearity", (1,), "S6", external=[(str(secret), 0, 6)])


def elsewhere(file: h5py.Group, secret: Path) -> None:
    other = secret.with_name("other.hdf5")
    with h5py.File(other, "w") as target:
        target["text"] = np.bytes_(b"secret")
    layout = h5py.VirtualLayout((1,), "S6")
    layout[0] = h5py.VirtualSource(str(other), "text", ())
    file.create_virtual_dataset("nonlinearity", layout)


TEXTS: dict[str, tuple[Callable[[h5py.Group, Path], object], str]] = {
    "kept in another file": (outside, "keeps its data in other files"),
    "put together from others": (elsewhere, "keeps its data in other files"),
    "a link": (lambda g, s: g.__setitem__("nonlinearity", h5py.SoftLink("/a")), "is a SoftLink"),
    "long": (
        lambda g, s: g.create_dataset("nonlinearity", (), "S4000"),
        "holds |S4000 (), expected a text",
    ),
    "many": (lambda g, s: g.create_dataset("nonlinearity", (10**6,), "S4", chunks=(64,)), "a text"),
    "numbers": (lambda g, s: g.__setitem__("nonlinearity", 3.0), "holds float64 (), expected"),
    "a group": (lambda g, s: g.create_group("nonlinearity"), "is a group, expected a text"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_of_a_policy_is_read_from_its_own_file_alone(name: str, tmp_path: Path) -> None:
    trick, words = TEXTS[name]
    path, secret = tmp_path / "hopper.hdf5", tmp_path / "secret"
    secret.write_bytes(b"secret")
    with h5py.File(path, "w") as file:
        group = file.create_group("metadata/policy")
        for key, values in policy(np.random.default_rng(3)).items():
            group[key.replace(".", "/")] = values
        trick(group, secret)
    with pytest.raises(InputError) as refused:
        behaviour.main({"path": str(path), "out": str(tmp_path / "out.npz")})
    assert words in str(refused.value)
    assert "secret'" not in str(refused.value)
    assert not (tmp_path / "out.npz").exists()


# Archives


def test_an_archive_whose_list_lies_about_sizes_is_refused(tmp_path: Path) -> None:
    """The list says 99 bytes; what is packed would be 64 MB."""
    path = write_npz(tmp_path / "hopper.npz", policy(np.random.default_rng(4)))
    block = bytes(1 << 20)
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("extra.npy", "w") as member,
    ):
        for _ in range(64):
            member.write(block)
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    struct.pack_into("<I", content, entry + 24, 99)
    path.write_bytes(content)
    with pytest.raises((InputError, ValueError, zipfile.BadZipFile)):
        behaviour.main({"path": str(path), "out": str(tmp_path / "out.npz")})


def test_names_in_an_archive_are_not_used_as_paths(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    arrays = policy(np.random.default_rng(5))
    for prefix in ("../../", "/", str(tmp_path / "x") + "/"):
        path = write_npz(inner / "hopper.npz", {prefix + name: a for name, a in arrays.items()})
        with pytest.raises(InputError, match="holds no policy"):
            behaviour.main({"path": str(path), "out": str(inner / "out.npz")})
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "hopper.npz"]


# Sizes


def many_names(path: Path, count: int) -> Path:
    """One demonstration of zeros, packed, under many names."""
    demo = demonstration(np.random.default_rng(6), 40, done=True)
    wide: dict[str, NDArray[Any]] = {
        name: np.zeros((40, 500)) if name.endswith("object") else column
        for name, column in demo.items()
    }
    with h5py.File(path, "w") as file:
        for name, column in wide.items():
            file.create_dataset(f"data/demo_0/{name}", data=column, compression="gzip")
        for number in range(1, count):
            file[f"data/demo_{number}"] = file["data/demo_0"]
    return path


def test_one_array_under_many_names_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bound, half a megabyte becomes any number of gigabytes."""
    path, out = many_names(tmp_path / "links.hdf5", 1000), tmp_path / "out"
    monkeypatch.setattr(convert, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(convert, "MAX_RATIO", 1)
    out.mkdir()
    job = {"path": str(path), "kind": "", "name": path.name, "sha256": "", "out": str(out)}
    options = {"keys": ["object"], "max_episode_steps": None, "env": None}
    with pytest.raises(InputError, match=r"links.hdf5 unpacks to more than \d+ bytes"):
        convert.main(job | {"options": options})
    assert sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) < 1 << 20


def test_what_a_file_may_become_counts_what_it_has_on_disk(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    assert convert.max_store_bytes(sparse) == convert.MAX_BYTES
    full = tmp_path / "full"
    full.write_bytes(bytes(32 << 20))
    assert convert.max_store_bytes(full) >= convert.MAX_RATIO * (32 << 20)


def test_a_file_of_holes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "holes.hdf5"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    assert "holes.hdf5 is not readable as HDF5" in refusal(path, tmp_path / "out")


def arrow_minari(tmp_path: Path, length: int = 4) -> Path:
    recorded = swing(np.random.default_rng(7), length, ended="cut")
    return write_minari(tmp_path / "minari", [recorded], data_format="arrow")


def packed(batch: pa.RecordBatch, codec: str | None, notes: dict[str, str] | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata=notes)
    return bytes(sink.getvalue().to_pybytes())


def zeros(kind: pa.DataType, rows: int) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(
            zeros(kind.value_type, rows * kind.list_size), type=kind
        )
    if pa.types.is_boolean(kind):
        return pa.array(np.zeros(rows, np.bool_))
    return pa.array(np.zeros(rows, kind.to_pandas_dtype()))


def test_a_decompression_bomb_in_arrow_files_is_refused(tmp_path: Path) -> None:
    folder = arrow_minari(tmp_path)
    [part] = folder.glob("data/0/*.arrow")
    with pa.ipc.open_file(part.read_bytes()) as reader:
        batch = reader.get_batch(0)
    rows = 24_000_000  # 1.5 GB, under a limit of 1 GiB
    columns = [zeros(kind, rows) for kind in batch.schema.types]
    part.write_bytes(packed(pa.record_batch(columns, schema=batch.schema), "zstd"))
    assert part.stat().st_size < 1 << 20
    refusal(folder, tmp_path / "out", max_episode_steps=9)


# Columns of a store are memory-mapped, so opening one takes no more memory than its files.


@pytest.mark.parametrize(
    ("codec", "notes"),
    [("zstd", None), ("lz4", None), (None, {"ARROW:experimental_compression": "zstd"})],
)
@pytest.mark.parametrize("kind", ["steps", "episodes"])
def test_a_store_with_compressed_columns_is_not_read(
    kind: str, codec: str | None, notes: dict[str, str] | None, tmp_path: Path
) -> None:
    store = write_small_store(tmp_path / "store", np.random.default_rng(8))
    path = store / "segments" / f"000000.{kind}.arrow"
    with pa.ipc.open_file(path.read_bytes()) as reader:
        batch = reader.get_batch(0)
    replace_segment_file(store, path.name, packed(batch, None))
    assert Store(store).totals.episodes == 4
    replace_segment_file(store, path.name, packed(batch, codec, notes))
    with pytest.raises(InputError, match="is compressed"):
        Store(store)


# Folders


def pipe(place: Path) -> None:
    place.unlink()
    os.mkfifo(place)


def unix_socket(place: Path) -> None:
    place.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(place.parent)  # its name may be too long for a socket
        listener.bind(place.name)


def link_out(place: Path) -> None:
    place.rename(place.parents[4] / "outside.hdf5")
    place.symlink_to(place.parents[4] / "outside.hdf5")


def link_to_device(place: Path) -> None:
    place.unlink()
    place.symlink_to("/dev/zero")


ENTRIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (pipe, "is neither a file nor a folder"),
    "socket": (unix_socket, "is neither a file nor a folder"),
    "device": (link_to_device, "is neither a file nor a folder"),
    "file of another folder": (link_out, "is a link that leads out of pendulum-v0"),
    "folder of another": (
        lambda place: (place.parent / "more").symlink_to("/etc"),
        "is a link that leads out of pendulum-v0",
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_folder_with_anything_but_its_own_files_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, words = ENTRIES[name]
    recorded = swing(np.random.default_rng(7), 4, ended="cut")
    folder = write_minari(tmp_path / "minari", [recorded])
    make(folder / "data" / "main_data.hdf5")
    message = refusal(folder, tmp_path / "out", max_episode_steps=9)
    assert words in message


def test_a_link_inside_a_folder_is_one_of_its_files(tmp_path: Path) -> None:
    recorded = swing(np.random.default_rng(7), 4, ended="cut")
    folder = write_minari(tmp_path / "minari", [recorded])
    place = folder / "data" / "main_data.hdf5"
    place.rename(folder / "data" / "blob")
    place.symlink_to("blob")
    store = ingest(
        str(folder),
        tmp_path / "out",
        ImportOptions(max_episode_steps=9),
        LIMITS,
        lambda progress: None,
    )
    assert store.totals.episodes == 1
