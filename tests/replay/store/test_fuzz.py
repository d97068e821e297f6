"""Mutants by the hundred: the importer and the store accept or refuse, and never fall over.

HDF5 keeps no checksum over its numbers, so about half of its mutants are read without complaint:
a hash (`--sha256`, or the catalogue's) is the only thing that tells them from the original. The
store keeps one of everything, so none of its mutants may pass.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from m3pc.types import InputError
from replay.store.store import Store
from tests.support.episodes.foreign_files import (
    as_v1,
    demonstration,
    nothing_left,
    transitions,
    write_hdf5,
    write_robomimic,
    write_small_store,
)
from tests.support.episodes.shared_data import ROOT
from tests.support.faults.fuzz_runner import mutate

SIZES = [300, pytest.param(10_000, marks=pytest.mark.long)]
STORE_SIZES = [2_000, pytest.param(10_000, marks=pytest.mark.long)]


def run(task: str, files: list[Path], count: int, folder: Path) -> list[dict[str, str]]:
    folder.mkdir()
    order = {"task": task, "files": list(map(str, files)), "count": count, "seed": 7}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.faults.fuzz_runner"],
        input=json.dumps(order | {"folder": str(folder)}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        timeout=5400,
        check=True,
    )
    results: list[dict[str, str]] = json.loads(done.stdout)
    assert len(results) == count
    return results


@pytest.mark.parametrize("count", SIZES)
def test_mutants_of_hdf5_are_read_or_refused(count: int, tmp_path: Path) -> None:
    """Where one brings the HDF5 library itself down, the real command must survive exactly it."""
    rng = np.random.default_rng(1)
    columns = transitions(rng)
    demos = [demonstration(rng, 6, done=True), demonstration(rng, 4, done=False)]
    files = [
        write_hdf5(tmp_path / "plain.hdf5", columns),
        write_hdf5(tmp_path / "packed.hdf5", as_v1(columns), compression="gzip", shuffle=True),
        write_robomimic(tmp_path / "robomimic.hdf5", demos),
    ]
    results = run("convert", files, count, tmp_path / "mutants")
    outcomes = Counter(result["outcome"] for result in results)
    assert min(outcomes["ok"], outcomes["refused"]) > count // 10  # they reach all the depths
    harmful = [result for result in results if result["outcome"] not in ("ok", "refused")]
    assert not [result for result in harmful if result["outcome"] == "broken"]
    assert len(harmful) < 20  # each is tried again below, and that takes its time
    for result in harmful:
        with nothing_left(tmp_path):
            mutant, out = tmp_path / "mutants" / result["file"], tmp_path / "out"
            line = [sys.executable, "-m", "m3pc", "data", "import", str(mutant), str(out)]
            done = subprocess.run(
                [*line, "--memory-limit", "2", "--time-limit", "20"],
                capture_output=True,
                text=True,
                timeout=100,
                cwd=ROOT,
                check=False,
            )
        assert done.returncode == 2, result
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("count", STORE_SIZES)
def test_no_mutant_of_a_store_is_accepted(count: int, tmp_path: Path) -> None:
    store = write_small_store(tmp_path / "store", np.random.default_rng(2))
    files = sorted(path for path in store.rglob("*") if path.is_file())
    good = {path: path.read_bytes() for path in files}
    refused = 0
    for number in range(count):
        path = files[number % len(files)]
        path.write_bytes(mutate(good[path], np.random.default_rng([8, number])))
        with pytest.raises(InputError, match=path.name):
            Store(store)
        refused += 1
        path.write_bytes(good[path])
    assert refused == count
    assert Store(store).totals.episodes == 4


@pytest.mark.parametrize("count", SIZES)
def test_mutants_of_arrow_with_a_matching_hash_do_no_harm(count: int, tmp_path: Path) -> None:
    """Only Arrow and our own checks protect here: wrong numbers pass, wrong shapes do not."""
    store = write_small_store(tmp_path / "store", np.random.default_rng(3))
    results = run("open", sorted(store.glob("segments/*.arrow")), count, tmp_path / "mutants")
    outcomes = Counter(result["outcome"] for result in results)
    assert set(outcomes) == {"ok", "refused"}
    assert min(outcomes.values()) > count // 10
