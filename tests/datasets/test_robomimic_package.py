"""Our reading of robomimic's files against robomimic's own, where that is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.datasets.hdf5 import open_hdf5
from m3pc.datasets.robomimic import read_robomimic
from m3pc.datasets.source import ImportOptions
from tests.support.episodes.shared_data import shared_file

if find_spec("robomimic") is None:
    pytest.skip("needs robomimic: pip install 'm3pc[robomimic]'", allow_module_level=True)

PARTS = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object")


def their_reading(path: Path, subset: str) -> Any:
    from robomimic.utils import obs_utils
    from robomimic.utils.dataset import SequenceDataset

    obs_utils.initialize_obs_utils_with_obs_specs([{"obs": {"low_dim": list(PARTS)}}])
    return SequenceDataset(
        hdf5_path=str(path),
        obs_keys=PARTS,
        dataset_keys=("actions", "rewards", "dones"),
        hdf5_cache_mode=None,
        hdf5_use_swmr=False,
        filter_by_attribute=subset or None,
        load_next_obs=True,
    )


@pytest.mark.parametrize(
    ("name", "subset"),
    [("square_ph_low_dim", ""), ("ph_lift_low_dim", ""), ("mg_can_low_dim", "")],
)
def test_our_reading_is_robomimics_own_up_to_success(name: str, subset: str) -> None:
    path = shared_file(f"robomimic/{name}.hdf5")
    theirs = their_reading(path, subset)
    with open_hdf5(path) as file:
        ours = list(read_robomimic(file, ImportOptions(subset=subset)).episodes)
    assert len(ours) == theirs.n_demos
    order = sorted(range(theirs.n_demos), key=lambda i: int(theirs.demos[i][5:]))
    for episode, index in zip(ours, order, strict=True):
        meta = theirs.get_trajectory_at_index(index)
        steps = len(episode)
        now, after = (
            np.concatenate([meta[when][part][:steps] for part in PARTS], axis=1, dtype=np.float32)
            for when in ("obs", "next_obs")
        )
        np.testing.assert_array_equal(episode.states, np.concatenate([now, after[-1:]]))
        np.testing.assert_array_equal(episode.actions, meta["actions"][:steps].astype(np.float32))
        np.testing.assert_array_equal(episode.rewards, meta["rewards"][:steps].astype(np.float32))
        ended = np.flatnonzero(meta["dones"])
        assert steps == (ended[0] + 1 if len(ended) else len(meta["dones"]))
        assert episode.terminated == bool(len(ended))
