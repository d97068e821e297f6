"""The example configurations resolve, and change their preset."""

import pytest

from m3pc.config.presets import PRESETS, resolve
from tests.support.episodes.shared_data import ROOT


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.yaml")))
def test_an_example_changes_the_small_preset(name: str) -> None:
    config = resolve(file=ROOT / "examples" / name)
    assert config.model.width == PRESETS["small"].model.width
    assert config != PRESETS["small"]


def test_the_example_for_goals_trains_the_masks_of_backward_planning() -> None:
    mixture = resolve(file=ROOT / "examples/goals.yaml").masks.mixture
    assert mixture.path > 0 and mixture.inverse > 0
