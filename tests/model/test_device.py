"""What a process sets before it computes, and how it reports a lack of memory."""

import json
import subprocess
import sys

import pytest
import torch

from m3pc.model.device import keep_freed_memory, memory_errors

PAGES = 16 * 1024  # of sixteen blocks of 4 MiB
SCRIPT = """
import json, resource, torch
from m3pc.model.device import keep_freed_memory

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 20) for _ in range(16)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

torch.set_num_threads(1)
keep_freed_memory()
print(json.dumps([faults() for _ in range(10)]))
"""


@pytest.mark.skipif(not keep_freed_memory(), reason="not the GNU C library")
def test_memory_that_was_freed_is_not_asked_for_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], timeout=60, capture_output=True, check=True
    )
    counts = json.loads(done.stdout)
    assert sum(counts[1:]) < PAGES / 2, counts


def test_a_lack_of_memory_is_a_memory_error_on_every_device() -> None:
    with pytest.raises(MemoryError), memory_errors():
        torch.empty(1 << 60)
    with pytest.raises(MemoryError), memory_errors():
        raise torch.OutOfMemoryError("no")


def test_other_failures_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), memory_errors():
        raise RuntimeError("shapes differ")
