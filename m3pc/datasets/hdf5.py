"""HDF5 from strangers: only plain arrays of numbers, sized before they are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from m3pc.types import InputError

LARGEST = 4 << 30  # bytes of one array in memory
BUILT_IN_FILTERS = {1, 2, 3, 4, 5, 6, 32000}  # deflate ... scale-offset, and h5py's own lzf
LONGEST_TEXT = 1 << 10  # bytes
NUMBERS = "fiub"  # numpy kinds: float, int, unsigned, bool


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    with _readable(path.name):
        file = h5py.File(path, "r")
    with file:
        yield file


def members(group: h5py.Group) -> list[str]:
    """Names in a group, none of which leads out of the file."""
    with _readable(group.name):
        links = {name: group.get(name, getlink=True) for name in group}
    for name, link in links.items():
        _refuse_link(_path(group, name), link)
    return list(links)


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Whatever the HDF5 library says of a damaged file becomes one sentence."""
    try:
        yield
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{what} is not readable as HDF5: {error}") from error


def refuse_links(file: h5py.File) -> None:
    """Look at all of a file that another library is going to read, at each object once."""
    links: dict[str, object] = {}
    names: list[str] = []
    with _readable(Path(file.filename).name):
        file.visititems_links(links.__setitem__)  # h5py loses what these functions raise
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


def _refuse_elsewhere(found: h5py.Group | h5py.Dataset) -> None:
    if isinstance(found, h5py.Dataset) and (found.is_virtual or found.external):
        raise InputError(f"{found.name} keeps its data in other files, which are not read")


def subgroup(group: h5py.Group, name: str) -> h5py.Group:
    found = _member(group, name)
    if not isinstance(found, h5py.Group):
        raise InputError(f"{found.name} is an array, expected a group")
    return found


def array(group: h5py.Group, name: str) -> NDArray[Any]:
    """One array of numbers, refused by its header before a byte of it is read."""
    found = _member(group, name)
    if not isinstance(found, h5py.Dataset):
        raise InputError(f"{found.name} is a group, expected an array")
    with _readable(found.name):
        _check_header(found)
        values: NDArray[Any] = found[()]
    return values


def text(group: h5py.Group, name: str) -> bytes:
    """One short text, as bytes."""
    found = _member(group, name)
    if not isinstance(found, h5py.Dataset):
        raise InputError(f"{found.name} is a group, expected a text")
    with _readable(found.name):
        _refuse_elsewhere(found)
        if found.shape != () or found.dtype.kind not in "SO" or found.nbytes > LONGEST_TEXT:
            raise InputError(f"{found.name} holds {found.dtype} {found.shape}, expected a text")
        value = found[()]
    return bytes(value) if isinstance(value, bytes) else repr(value).encode()


def texts(group: h5py.Group, name: str) -> list[str]:
    """A list of short texts of one size each, as names of demonstrations are kept."""
    found = _member(group, name)
    if not isinstance(found, h5py.Dataset):
        raise InputError(f"{found.name} is a group, expected texts")
    with _readable(found.name):
        _check_header(found, kinds="S")
        if found.ndim != 1 or found.dtype.itemsize > LONGEST_TEXT:
            raise InputError(f"{found.name} holds {found.dtype} {found.shape}, expected texts [n]")
        return [bytes(value).decode(errors="replace") for value in found[()]]


def _member(group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset:
    path = _path(group, name)
    with _readable(path):
        link = group.get(name, getlink=True)
    if link is None:
        raise InputError(f"{group.name} has no {name!r}; found {members(group)[:12]}")
    _refuse_link(path, link)
    with _readable(path):
        return group[name]


def _path(group: h5py.Group, name: str) -> str:
    return f"{group.name.rstrip('/')}/{name}"


def _check_header(found: h5py.Dataset, kinds: str = NUMBERS) -> None:
    if found.dtype.kind not in kinds:
        expected = "numbers" if kinds == NUMBERS else "texts of one size"
        raise InputError(f"{found.name} holds {found.dtype}, expected {expected}")
    _refuse_elsewhere(found)
    if found.shape is None or found.size * max(found.dtype.itemsize, 8) > LARGEST:
        raise InputError(
            f"{found.name} says it has shape {found.shape}; at most {LARGEST} bytes are read"
        )
    properties = found.id.get_create_plist()
    filters = {properties.get_filter(i)[0] for i in range(properties.get_nfilters())}
    if not filters <= BUILT_IN_FILTERS:
        unknown = sorted(filters - BUILT_IN_FILTERS)
        raise InputError(f"{found.name} needs the plug-in filters {unknown}, which are not loaded")


def vector(group: h5py.Group, name: str) -> NDArray[Any]:
    """An array [n] or [n, 1] as [n]."""
    values = array(group, name)
    if values.ndim == 2 and values.shape[1] == 1:
        return values[:, 0]
    if values.ndim != 1:
        raise InputError(
            f"{_path(group, name)} has shape {list(values.shape)}, expected [n] or [n, 1]"
        )
    return values


def flags(group: h5py.Group, name: str) -> NDArray[np.bool_]:
    """A vector of yes and no, in whatever kind of number."""
    values = vector(group, name)
    if not np.isin(values, (0, 1)).all():
        raise InputError(f"{_path(group, name)} holds other values than 0 and 1")
    return values.astype(np.bool_)


def matrix(group: h5py.Group, name: str) -> NDArray[np.float32]:
    """An array [n, width] as float32; a number too large becomes Inf and is refused later."""
    values = array(group, name)
    if values.ndim == 1 and len(values):
        values = values[:, None]
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(
            f"{_path(group, name)} has shape {list(values.shape)}, "
            "expected [n, width] with neither 0"
        )
    return to_float32(values)


def to_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)
