"""The device and precision that were asked for, or an InputError where the machine has them not."""

import ctypes
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext

import torch

from m3pc.config.schema import ComputeConfig
from m3pc.types import InputError

# In a child: on some machines a bf16 product ends the process by SIGILL, whatever CPU flags say.
BF16 = (
    "import torch; torch.nn.functional.linear("
    "torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16))"
)

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of the GNU C library's mallopt
KEPT, LARGEST_KEPT = 1 << 30, 32 << 20  # bytes: in all, of one block


def prepare_compute(config: ComputeConfig) -> None:
    """Set the threads; refuse what does not work here."""
    torch.set_num_threads(config.threads)
    keep_memory()
    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.mps.is_available()}
    if not found[config.device]:
        here = ", ".join(name for name, there in found.items() if there)
        raise InputError(f"compute.device is {config.device}, which is not here; give {here}")
    if config.device == "cpu" and config.precision == "bf16" and not bf16_works():
        raise InputError("compute.precision is bf16, which does not work on this CPU; give fp32")


def keep_memory() -> bool:
    """Whether memory that tensors free stays with this process from now on.

    Otherwise each batch gets its megabytes from the kernel anew, page by page.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library: it does as it likes
        return False
    return bool(mallopt(TRIM_THRESHOLD, KEPT) and mallopt(MMAP_THRESHOLD, LARGEST_KEPT))


def autocast(config: ComputeConfig) -> AbstractContextManager[object]:
    """Products in the wanted precision inside the block."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(config.device, dtype=torch.bfloat16)


def bf16_works() -> bool:
    """Whether this CPU lives through a product of bfloat16."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", BF16], capture_output=True, check=False, timeout=60
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
