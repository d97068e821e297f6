"""Sets up the device, precision and memory of torch's computations on this machine."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from m3pc.config.schema import ComputeConfig
from m3pc.types import InputError

# On some machines a bf16 product ends the process by SIGILL although the CPU flags list bf16.
BF16 = (
    "import torch; torch.nn.functional.linear("
    "torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16))"
)

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # options of the GNU C library's mallopt
MAX_KEPT, MAX_KEPT_BLOCK = 1 << 30, 32 << 20  # bytes
CACHED_NUMBERS = 64_000  # rows times width whose intermediate results fit into a CPU's caches


def prepare_compute(config: ComputeConfig) -> None:
    """Set the number of threads; InputError if device or precision do not work here."""
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.mps.is_available()}
    if not available[config.device]:
        devices = ", ".join(name for name, works in available.items() if works)
        raise InputError(f"compute.device is {config.device}, which is not here; give {devices}")
    if config.device == "cpu" and config.precision == "bf16" and not bf16_works():
        raise InputError("compute.precision is bf16, which does not work on this CPU; give fp32")


def keep_freed_memory() -> bool:
    """Keep freed tensors' memory in this process; False if the C library cannot.

    Otherwise each batch gets its megabytes from the kernel again, page by page.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not the GNU C library
        return False
    return bool(mallopt(TRIM_THRESHOLD, MAX_KEPT) and mallopt(MMAP_THRESHOLD, MAX_KEPT_BLOCK))


def chunk_rows(device: str, width: int) -> int:
    """Rows of a model of this width to compute at a time.

    On a CPU, intermediate results should fit into its caches. An accelerator takes all rows: small
    batches leave it idle, and the planner server halves a batch that does not fit into memory.
    """
    return CACHED_NUMBERS // width if device == "cpu" else sys.maxsize


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn an out-of-memory error of any device into a MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        raise


def autocast(config: ComputeConfig) -> AbstractContextManager[object]:
    """A context in which matrix products have the configured precision."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(config.device, dtype=torch.bfloat16)


def bf16_works() -> bool:
    """Whether this CPU can multiply bfloat16, tried in a child process because it may crash."""
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", BF16], capture_output=True, check=False, timeout=60
        )
    except subprocess.TimeoutExpired:
        return False
    return child.returncode == 0
