"""The benchmark of the live store runs, counts correctly, and loses no episode."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import replay
from benchmarks.appends import MODES


def test_every_episode_of_the_benchmark_is_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["replay", "--quick", "--dir", str(tmp_path)])
    replay.main()
    numbers = json.loads(capsys.readouterr().out.splitlines()[-1])
    sampling, appending, protections = (
        numbers[name] for name in ("sampling", "appending", "protections")
    )
    rows = appending["rows"]
    audits = [
        sampling["audit"],
        *protections["audits"].values(),
        *(audit for row in rows for audit in row["audits"]),
    ]
    for audit in audits:
        assert (audit["missing"], audit["twice"], audit["strange"]) == (0, 0, 0)
        assert 0 < audit["episodes"] < audit["steps"]
    assert {(row["mode"], row["producers"]) for row in rows} == {
        (mode, producers) for mode in MODES for producers in replay.QUICK.producers
    }
    for row in rows:
        assert 1 <= row["group"] <= row["producers"]
        assert 0 < row["ack_ms"]["p50"] <= row["ack_ms"]["p99"] <= row["ack_ms"]["max"]
    loads = sampling["loads"]
    assert [loads[name]["offered"] > 0 for name in ("still", "rest", "usual", "hard")] == [
        False,
        False,
        True,
        True,
    ]
    assert all(row["windows"] > 0 for row in (*loads.values(), protections["on"]))
    assert loads["still"]["refreshes"] == 0
    assert protections["on_of_off"][1] > 0
    assert not list(tmp_path.iterdir())
