"""The device and precision that were asked for, or an InputError where the machine has them not."""

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext

import torch

from m3pc.config import ComputeConfig
from m3pc.types import InputError

# In a child: on some machines a bf16 product ends the process by SIGILL, whatever CPU flags say.
BF16 = (
    "import torch; torch.nn.functional.linear("
    "torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16))"
)


def prepare_compute(config: ComputeConfig) -> None:
    """Set the threads; refuse what does not work here."""
    torch.set_num_threads(config.threads)
    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.mps.is_available()}
    if not found[config.device]:
        here = ", ".join(name for name, there in found.items() if there)
        raise InputError(f"compute.device is {config.device}, which is not here; give {here}")
    if config.device == "cpu" and config.precision == "bf16" and not bf16_works():
        raise InputError("compute.precision is bf16, which does not work on this CPU; give fp32")


def autocast(config: ComputeConfig) -> AbstractContextManager[object]:
    """Products in the wanted precision inside the block."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(config.device, dtype=torch.bfloat16)


def bf16_works() -> bool:
    """Whether this CPU lives through a product of bfloat16."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", BF16], capture_output=True, check=False, timeout=60
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
