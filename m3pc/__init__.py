"""M³PC: one masked trajectory model that is pretrained offline, plans online and keeps learning."""

__version__ = "0.1.0"
