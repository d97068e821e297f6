"""The Arrow store of episodes: `format` on disk, `store` to read, `writing`, `sampling`, `server`.

Other programs can import the names in `__all__` from here; each is loaded on first use.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay.format.manifest import Header
    from replay.format.payload import encode
    from replay.sampling.mixture import Mixture
    from replay.sampling.sampler import Sampler
    from replay.store.store import Store, write_store
    from replay.writing.group_commit import GroupCommitter
    from replay.writing.writer import Writer, WriterOptions

__all__ = [
    "GroupCommitter",
    "Header",
    "Mixture",
    "Sampler",
    "Store",
    "Writer",
    "WriterOptions",
    "encode",
    "write_store",
]

HOMES = {
    "GroupCommitter": "replay.writing.group_commit",
    "Header": "replay.format.manifest",
    "Mixture": "replay.sampling.mixture",
    "Sampler": "replay.sampling.sampler",
    "Store": "replay.store.store",
    "Writer": "replay.writing.writer",
    "WriterOptions": "replay.writing.writer",
    "encode": "replay.format.payload",
    "write_store": "replay.store.store",
}

# Modules and names in the README of 0.1: they can be imported for one more release.
FORMER = {
    "replay.appender": {"Appender": "GroupCommitter"},
    "replay.payload": {"encode": "encode"},
    "replay.writer": {"Options": "WriterOptions", "Writer": "Writer"},
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'replay' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def _former(path: str) -> ModuleType:
    def resolve(name: str) -> Any:
        return __getattr__(FORMER[path].get(name, name))

    module = ModuleType(path)
    module.__dict__["__getattr__"] = resolve
    return module


sys.modules.update({path: _former(path) for path in FORMER})
