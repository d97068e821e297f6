"""Settings that must be in place before numpy is imported."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
