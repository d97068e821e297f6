"""The settings that are shown resolve, and differ from their preset in what they say."""

from pathlib import Path

import pytest

from m3pc.config.presets import PRESETS, resolve
from tests.support.episodes.shared_data import ROOT

FILES = sorted((ROOT / "examples").glob("*.yaml"))


def test_there_are_files_to_check() -> None:
    assert len(FILES) >= 2


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_is_a_configuration_of_its_own(path: Path) -> None:
    found = resolve(file=path)
    assert found.model.width == PRESETS["small"].model.width
    assert found != PRESETS["small"]


def test_goals_train_what_backward_planning_asks() -> None:
    mixture = resolve(file=ROOT / "examples/goals.yaml").masks.mixture
    assert mixture.path > 0 and mixture.inverse > 0
