"""The metrics of a run on disk: damaged lines, and a full disk."""

from pathlib import Path

import pytest

from m3pc.tracking.run_log import NAME, RunLog, read_metrics
from tests.support.faults.full_disk import fill_disk


@pytest.mark.parametrize("damaged", [b'{"step": 2, "gro', b"[1]\n", b"\xff\xfe\n", b"\0\0\0"])
def test_a_line_that_a_power_cut_damaged_is_skipped_and_later_deleted(
    damaged: bytes, tmp_path: Path
) -> None:
    with RunLog(tmp_path, done=0, unit="step") as log:
        log.write("evaluation", 1, {"return": 5.0})
    intact = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(intact + damaged)
    assert read_metrics(tmp_path, "evaluation") == [{"step": 1, "return": 5.0}]
    with RunLog(tmp_path, done=1, unit="step"):
        assert (tmp_path / NAME).read_bytes() == intact


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_ends_a_run_only_if_its_log_is_vital(tmp_path: Path) -> None:
    with RunLog(tmp_path, done=0, vital=False) as spared:
        fill_disk(spared.file)
        spared.write("fleet", 1, {"steps": 1.0})
    vital = RunLog(tmp_path, done=0)
    fill_disk(vital.file)
    with pytest.raises(OSError, match="No space left"):
        vital.write("fleet", 1, {"steps": 1.0})
    with pytest.raises(OSError, match="No space left"):
        vital.__exit__(None, None, None)
