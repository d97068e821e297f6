"""The metrics of a run on disk: cut lines, and a disk that takes no more."""

import os
from pathlib import Path

import pytest

from m3pc.tracking.run_log import NAME, RunLog, read


@pytest.mark.parametrize("spoilt", [b'{"step": 2, "gro', b"[1]\n", b"\xff\xfe\n", b"\0\0\0"])
def test_what_a_power_cut_spoilt_is_passed_over_and_then_cut(spoilt: bytes, tmp_path: Path) -> None:
    with RunLog(tmp_path, done=0, unit="step") as log:
        log.write("evaluation", 1, {"return": 5.0})
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole + spoilt)
    assert read(tmp_path, "evaluation") == [{"step": 1, "return": 5.0}]
    with RunLog(tmp_path, done=1, unit="step"):
        assert (tmp_path / NAME).read_bytes() == whole


def full(log: RunLog) -> None:
    """Let its file be on a disk without room."""
    log._file.close()
    log._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", encoding="utf-8")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_ends_a_run_only_if_its_log_is_vital(tmp_path: Path) -> None:
    with RunLog(tmp_path, done=0, vital=False) as spared:
        full(spared)
        spared.write("fleet", 1, {"steps": 1.0})
    vital = RunLog(tmp_path, done=0)
    full(vital)
    with pytest.raises(OSError, match="No space left"):
        vital.write("fleet", 1, {"steps": 1.0})
    with pytest.raises(OSError, match="No space left"):
        vital.__exit__(None, None, None)
