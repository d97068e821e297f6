"""Reads HDF5 files from unknown sources: only plain arrays, whose headers are checked first."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from m3pc.types import InputError

MAX_ARRAY_BYTES = 4 << 30  # in memory
BUILT_IN_FILTERS = {1, 2, 3, 4, 5, 6, 32000}  # deflate ... scale-offset, and h5py's own lzf
MAX_TEXT_BYTES = 1 << 10
NUMBER_KINDS = "fiub"  # numpy's dtype kinds: float, int, unsigned, bool


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """The file opened for reading. InputError if it is not HDF5."""
    with _readable(path.name):
        file = h5py.File(path, "r")
    with file:
        yield file


def member_names(group: h5py.Group) -> list[str]:
    """Names of a group's members. Links, which may lead out of the file, are refused."""
    with _readable(group.name):
        links = {name: group.get(name, getlink=True) for name in group}
    for name, link in links.items():
        _refuse_link(_path(group, name), link)
    return list(links)


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Turn the HDF5 library's errors about a damaged file into InputErrors."""
    try:
        yield
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{what} is not readable as HDF5: {error}") from error


def refuse_links(file: h5py.File) -> None:
    """Refuse links and external data in a file that another library is going to read."""
    links: dict[str, object] = {}
    names: list[str] = []
    with _readable(Path(file.filename).name):
        file.visititems_links(links.__setitem__)  # h5py drops exceptions of its callbacks
        file.visit(names.append)
        for path, link in links.items():
            _refuse_link(path, link)
        for name in names:
            _refuse_elsewhere(file[name])


def _refuse_link(path: str, link: object) -> None:
    if not isinstance(link, h5py.HardLink):
        raise InputError(
            f"{path} is a {type(link).__name__}, which may lead to another place or file; "
            "only plain groups and arrays are read"
        )


def _refuse_elsewhere(member: h5py.Group | h5py.Dataset) -> None:
    if isinstance(member, h5py.Dataset) and (member.is_virtual or member.external):
        raise InputError(f"{member.name} keeps its data in other files, which are not read")


def subgroup(group: h5py.Group, name: str) -> h5py.Group:
    member = _member(group, name)
    if not isinstance(member, h5py.Group):
        raise InputError(f"{member.name} is an array, expected a group")
    return member


def read_array(group: h5py.Group, name: str) -> NDArray[Any]:
    """Read an array of numbers; if its header shows anything else, InputError without reading."""
    member = _member(group, name)
    if not isinstance(member, h5py.Dataset):
        raise InputError(f"{member.name} is a group, expected an array")
    with _readable(member.name):
        _check_header(member)
        values: NDArray[Any] = member[()]
    return values


def read_text(group: h5py.Group, name: str) -> bytes:
    """A short text, as bytes."""
    member = _member(group, name)
    if not isinstance(member, h5py.Dataset):
        raise InputError(f"{member.name} is a group, expected a text")
    with _readable(member.name):
        _refuse_elsewhere(member)
        if member.shape != () or member.dtype.kind not in "SO" or member.nbytes > MAX_TEXT_BYTES:
            raise InputError(f"{member.name} holds {member.dtype} {member.shape}, expected a text")
        value = member[()]
    return bytes(value) if isinstance(value, bytes) else repr(value).encode()


def read_texts(group: h5py.Group, name: str) -> list[str]:
    """An array of short texts of fixed size, such as names of demonstrations."""
    member = _member(group, name)
    if not isinstance(member, h5py.Dataset):
        raise InputError(f"{member.name} is a group, expected texts")
    with _readable(member.name):
        _check_header(member, kinds="S")
        if member.ndim != 1 or member.dtype.itemsize > MAX_TEXT_BYTES:
            raise InputError(
                f"{member.name} holds {member.dtype} {member.shape}, expected texts [n]"
            )
        return [bytes(value).decode(errors="replace") for value in member[()]]


def _member(group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset:
    path = _path(group, name)
    with _readable(path):
        link = group.get(name, getlink=True)
    if link is None:
        raise InputError(f"{group.name} has no {name!r}; found {member_names(group)[:12]}")
    _refuse_link(path, link)
    with _readable(path):
        return group[name]


def _path(group: h5py.Group, name: str) -> str:
    return f"{group.name.rstrip('/')}/{name}"


def _check_header(member: h5py.Dataset, kinds: str = NUMBER_KINDS) -> None:
    if member.dtype.kind not in kinds:
        expected = "numbers" if kinds == NUMBER_KINDS else "texts of one size"
        raise InputError(f"{member.name} holds {member.dtype}, expected {expected}")
    _refuse_elsewhere(member)
    if member.shape is None or member.size * max(member.dtype.itemsize, 8) > MAX_ARRAY_BYTES:
        raise InputError(
            f"{member.name} has shape {member.shape}; at most {MAX_ARRAY_BYTES} bytes are read"
        )
    properties = member.id.get_create_plist()
    filters = {properties.get_filter(i)[0] for i in range(properties.get_nfilters())}
    if not filters <= BUILT_IN_FILTERS:
        unknown = sorted(filters - BUILT_IN_FILTERS)
        raise InputError(f"{member.name} needs the plug-in filters {unknown}, which are not loaded")


def read_vector(group: h5py.Group, name: str) -> NDArray[Any]:
    """An array [n] or [n, 1] as [n]."""
    values = read_array(group, name)
    if values.ndim == 2 and values.shape[1] == 1:
        return values[:, 0]
    if values.ndim != 1:
        raise InputError(
            f"{_path(group, name)} has shape {list(values.shape)}, expected [n] or [n, 1]"
        )
    return values


def read_flags(group: h5py.Group, name: str) -> NDArray[np.bool_]:
    """A vector of zeros and ones, of any number type, as booleans."""
    values = read_vector(group, name)
    if not np.isin(values, (0, 1)).all():
        raise InputError(f"{_path(group, name)} holds values other than 0 and 1")
    return values.astype(np.bool_)


def read_matrix(group: h5py.Group, name: str) -> NDArray[np.float32]:
    """An array [n] or [n, width] as float32 [n, width]; neither size may be 0."""
    values = read_array(group, name)
    if values.ndim == 1 and len(values):
        values = values[:, None]
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(
            f"{_path(group, name)} has shape {list(values.shape)}, "
            "expected [n, width], neither of them 0"
        )
    return to_float32(values)


def to_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """Numbers beyond float32 become Inf, which the store refuses."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)
