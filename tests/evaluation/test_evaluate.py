"""What an evaluation says, and the video of an episode."""

import json
import math
import os
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.core.seeding import evaluation_episode
from m3pc.evaluation.episodes import Evaluation, evaluate
from m3pc.evaluation.video import record_video
from m3pc.types import Decision, InputError, Window
from tests.support.envs.countdown import COUNTDOWN, Countdown
from tests.support.fakes.fake_planner import FakePlanner


def evaluation(returns: list[float], *, env_id: str = "Pendulum-v1") -> Evaluation:
    ones = np.ones(len(returns))
    return Evaluation(
        env_id=env_id,
        engine="by hand 1.0",
        seed=0,
        returns=np.array(returns),
        lengths=np.full(len(returns), 20),
        effective_candidates=2 * ones,
        utility_std=math.nan * ones,
        first_target_returns=100 * ones,
        mean_target_returns=90.5 * ones,
        decisions=60,
        seconds=4.0,
    )


def test_the_numbers_of_three_episodes_of_twenty_steps() -> None:
    result = evaluate(
        "Pendulum-v1",
        FakePlanner(1),
        episodes=3,
        seed=5,
        slots=2,
        clock=iter([10.0, 14.0]).__next__,
        max_episode_steps=20,
    )
    assert (result.env_id, result.seed) == ("Pendulum-v1", 5)
    assert result.engine == f"gymnasium {metadata.version('gymnasium')}"
    assert result.lengths.tolist() == [20, 20, 20]
    assert len(set(result.returns.tolist())) == 3
    assert result.effective_candidates.tolist() == [2, 2, 2]
    assert np.isnan(result.utility_std).all()
    assert result.first_target_returns.tolist() == [100, 100, 100]
    assert result.mean_target_returns.tolist() == [90.5, 90.5, 90.5]  # 100, 99, ..., 81
    assert (result.decisions, result.seconds, result.decisions_per_second) == (60, 4, 15)
    assert result.score is result.score_error is None


def test_returns_are_in_the_order_of_the_episodes_for_any_number_of_slots() -> None:
    runs = [
        evaluate("d4rl/Hopper-v2", FakePlanner(3), episodes=4, seed=1, slots=slots)
        for slots in (1, 2, 9)
    ]
    assert len(set(runs[0].lengths.tolist())) > 1
    for run in runs[1:]:
        assert run.returns.tolist() == runs[0].returns.tolist()
        assert run.lengths.tolist() == runs[0].lengths.tolist()
        assert run.decisions == runs[0].decisions == runs[0].lengths.sum()
    assert runs[0].engine == f"mujoco {metadata.version('mujoco')}"
    assert runs[0].score is not None
    assert 0 < runs[0].score < 100


def test_each_episode_has_its_own_seeds() -> None:
    planner = FakePlanner(1)
    evaluate("Pendulum-v1", planner, episodes=3, seed=5, slots=3, max_episode_steps=1)
    (window,) = planner.asked
    assert window.seeds.tolist() == [evaluation_episode(5, number)[1] for number in range(3)]
    assert len(set(window.states[:, 0, 0].tolist())) == 3


def test_the_error_of_a_mean_by_hand() -> None:
    two = evaluation([1, 3])  # standard deviation: the square root of 2
    assert two.mean == 2
    assert two.standard_error == pytest.approx(1)
    one = evaluation([7])
    assert one.mean == 7
    assert math.isnan(one.standard_error)


def test_scores_are_on_d4rls_scale() -> None:
    hopper = evaluation([3233.3, 3235.3], env_id="d4rl/Hopper-v2")
    assert hopper.score == pytest.approx(100)
    assert hopper.score_error == pytest.approx(100 / 3254.572305)  # error 1, range 3234.3 + 20.27


def test_json_has_plain_numbers_and_no_nan() -> None:
    numbers = evaluation([1, 3]).as_json()
    assert json.loads(json.dumps(numbers, allow_nan=False)) == {
        "env": "Pendulum-v1",
        "engine": "by hand 1.0",
        "seed": 0,
        "episodes": 2,
        "mean": 2,
        "standard_error": pytest.approx(1),
        "score": None,
        "score_error": None,
        "decisions": 60,
        "seconds": 4,
        "decisions_per_second": 15,
        "returns": [1, 3],
        "lengths": [20, 20],
        "effective": [2, 2],
        "spread": [None, None],
        "first_conditions": [100, 100],
        "mean_conditions": [90.5, 90.5],
    }


def test_progress_counts_decisions_and_episodes() -> None:
    reports: list[Mapping[str, Any]] = []
    evaluate(
        "Pendulum-v1",
        FakePlanner(1),
        episodes=3,
        seed=0,
        slots=2,
        max_episode_steps=2,
        on_progress=reports.append,
    )
    counts = [(report["episodes"], report["decisions"]) for report in reports]
    assert counts == [(0, 2), (0, 4), (1, 4), (2, 4), (2, 5), (2, 6), (3, 6)]
    assert {report["of"] for report in reports} == {3}
    assert ["mean return" in report for report in reports] == [False] * 2 + [True] * 5


@pytest.mark.parametrize(("episodes", "slots"), [(0, 1), (1, 0)])
def test_nothing_to_evaluate_is_refused(episodes: int, slots: int) -> None:
    with pytest.raises(InputError, match=r"0 e.*; give"):
        evaluate("Pendulum-v1", FakePlanner(1), episodes=episodes, seed=0, slots=slots)


class Failing(FakePlanner):
    def decide(self, window: Window, *, explore: bool = False) -> Decision:
        raise ConnectionError("the planner is gone")


def test_a_planner_that_fails_leaves_no_environment_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError):
        evaluate(COUNTDOWN, Failing(1), episodes=3, seed=0, slots=2)
    with pytest.raises(ConnectionError):
        record_video(COUNTDOWN, Failing(1), tmp_path / "film.mp4", seed=0)
    assert Countdown.open == 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def gl(monkeypatch: pytest.MonkeyPatch) -> None:
    """What filming sets in the environment is undone after the test."""
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", "egl"))


@pytest.mark.usefixtures("gl")
def test_a_video_shows_every_fourth_step_of_episode_0(tmp_path: Path) -> None:
    path = tmp_path / "videos" / "hopper.mp4"
    try:
        rollout = record_video("d4rl/Hopper-v2", FakePlanner(3), path, seed=1)
    except InputError as error:
        pytest.skip(str(error))  # no GL on this machine; the toy below needs none
    assert path.read_bytes()[4:8] == b"ftyp"
    assert path.stat().st_size > 1000
    assert list(path.parent.iterdir()) == [path]
    frames, seconds, frame_bytes = film(path)
    assert (frames, frame_bytes) == (math.ceil(len(rollout.episode) / 4), 320 * 320 * 3)
    assert seconds == pytest.approx(frames / 31.25, abs=0.02)  # a quarter of 125 a second
    result = evaluate("d4rl/Hopper-v2", FakePlanner(3), episodes=1, seed=1, slots=1)
    assert result.returns[0] == rollout.episode.rewards.sum(dtype=np.float64)


@pytest.mark.usefixtures("gl")
def test_environments_without_a_size_are_cropped_to_even_sides(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    path.write_bytes(b"an older film")
    limit: dict[str, Any] = {"max_episode_steps": 9}
    rollout = record_video(COUNTDOWN, FakePlanner(1), path, seed=0, every=2, **limit)
    assert len(rollout.episode) == 9
    assert path.read_bytes()[4:8] == b"ftyp"
    # Steps 1, 3, 5, 7, 9 of 20 a second; sides of 99 and 65.
    assert film(path) == (5, 0.5, 98 * 64 * 3)


def film(path: Path) -> tuple[int, float, int]:
    """Frames, seconds, bytes of a frame without compression."""
    import imageio_ffmpeg  # type: ignore[import-untyped]

    frames, seconds = imageio_ffmpeg.count_frames_and_secs(path)
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), *raw]
    pixels = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
    return frames, seconds, len(pixels) // frames


@pytest.mark.usefixtures("gl")
def test_what_cannot_be_rendered_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    with pytest.raises(InputError, match=r"Countdown.*no screen\. .*MUJOCO_GL.*m3pc doctor"):
        record_video(COUNTDOWN, FakePlanner(1), path, seed=0, broken=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("gl")
def test_a_back_end_is_chosen_only_where_none_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit: dict[str, Any] = {"max_episode_steps": 1}
    for setting, chosen in ((None, "egl"), ("osmesa", "osmesa")):
        monkeypatch.delenv("MUJOCO_GL")
        if setting:
            monkeypatch.setenv("MUJOCO_GL", setting)
        record_video(COUNTDOWN, FakePlanner(1), tmp_path / "film.mp4", seed=0, **limit)
        assert os.environ["MUJOCO_GL"] == chosen
