"""What a process is told before it computes."""

import json
import subprocess
import sys

import pytest

from m3pc.model.device import keep_memory

PAGES = 16 * 1024  # of sixteen blocks of 4 MiB
SCRIPT = """
import json, resource, torch
from m3pc.model.device import keep_memory

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 20) for _ in range(16)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

torch.set_num_threads(1)
keep_memory()
print(json.dumps([faults() for _ in range(10)]))
"""


@pytest.mark.skipif(not keep_memory(), reason="not the GNU C library")
def test_memory_that_was_freed_is_not_asked_for_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], timeout=60, capture_output=True, check=True
    )
    counts = json.loads(done.stdout)
    assert sum(counts[1:]) < PAGES / 2, counts
