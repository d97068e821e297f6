"""Exit codes of every M3PC process. Scripts, supervisors and Kubernetes may rely on them."""

from typing import Final

OK: Final = 0
CHECK_FAILED: Final = 1  # a check such as `m3pc replay verify` found something
BAD_INPUT: Final = 2
PARKED: Final = 3  # every rollout actor ended too often
CONTROL_LOST: Final = 69  # the Ray cluster is gone for good
INTERNAL: Final = 70  # a bug, a process that hangs, or one that ended too often
IO_FAILED: Final = 74
OUT_OF_MEMORY: Final = 75
DIVERGED: Final = 76
INTERRUPTED: Final = 130
TERMINATED: Final = 143  # ended by a signal before everything was saved
