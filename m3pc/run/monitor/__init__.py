"""A Prometheus that watches runs on this machine, and what it saw."""
