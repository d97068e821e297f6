"""What a run explored: by planning or by noise, what it collected, and the pictures of it."""

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.config.overrides import replace as changed
from m3pc.core.history import HistoryBuffer
from m3pc.core.rng import NOISE, counter_stream
from m3pc.core.seeding import lock_step_episode
from m3pc.distributed import launch
from m3pc.distributed.endpoints import RunEndpoints
from m3pc.distributed.fleet import ProcessFleet
from m3pc.envs import normalised_score
from m3pc.model import checkpoint
from m3pc.online import results
from m3pc.online.exploration import Exploration, read_exploration, scaled, score_unit
from m3pc.online.local import run_local
from m3pc.online.run_control import write_status
from m3pc.online.run_folder import OnlineRun, open_run
from m3pc.online.staleness import Staleness
from m3pc.telemetry.catalogue import STALENESS
from m3pc.telemetry.recorder import Recorder, mean, quantile
from m3pc.tracking import run_log
from m3pc.types import AppendKey, Episode, Version, Window
from planner.policy import Policy
from planner.server.service import PlannerService
from planner.server.wire import decision_from_bytes, request_to_bytes
from replay.format.payload import encode
from replay.format.segment import Segment, concatenated, segment_of
from replay.store.store import Store
from replay.writing.writer import Writer
from tests.support.episodes.episodes import numbered
from tests.support.runs.commands import assert_one_sentence, invoke, line_with
from tests.support.runs.small_online import new_run
from tests.support.runs.small_run import ignore

PNG = b"\x89PNG\r\n\x1a\n"
SIGMA = 0.3
SECONDS = 30.0


# Noise


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> OnlineRun:
    """A short lock-step run that explores with noise, and with another ratio than in tests."""
    path = tmp_path_factory.mktemp("noisy") / "noisy-0"
    run = new_run(
        path,
        online__noise=SIGMA,
        online__steps=60,
        evaluation__every=1000,
        planner__evaluate_by="sample",
        planner__explore_by="sample",
        conditioning__exploration="maximum",
        conditioning__exploration_ratio=0.3,
    )
    run_local(path, ignore)
    return run


def first_window(run: OnlineRun, number: int, episode: Episode) -> Window:
    """The planner's input at the first step of a collected episode."""
    config = run.config
    history = HistoryBuffer(
        1,
        window=config.model.window,
        horizon=config.planner.horizon,
        state_size=2,
        action_size=1,
    )
    history.begin(0, episode.states[0], lock_step_episode(config.seed, number)[1])
    return history.window([0])


def test_a_noisy_run_acts_by_the_policys_median_and_the_noise_of_its_episode(
    noisy: OnlineRun,
) -> None:
    by_median = {"planner.mode": "rcbc", "planner.explore_by": "mean"}
    policy = Policy(checkpoint.read(noisy.offline).weights, changed(noisy.config, by_median))
    for number, episode in zip(range(2), Store(noisy.replay).episodes(), strict=False):
        window = first_window(noisy, number, episode)
        median = policy.decide(window, explore=True)
        rng = counter_stream(int(window.seeds[0]), 0, NOISE)
        noise = np.float32(SIGMA) * rng.standard_normal(1, dtype=np.float32)
        expected = np.clip(median.actions[0] + noise, -1, 1)
        np.testing.assert_allclose(episode.actions[0], expected, atol=1e-6)
        assert np.isnan(episode.utility)  # nothing was planned


def test_a_noisy_run_has_the_target_returns_of_a_planned_one(noisy: OnlineRun) -> None:
    policy = Policy(checkpoint.read(noisy.offline).weights)
    for number, episode in zip(range(2), Store(noisy.replay).episodes(), strict=False):
        window = first_window(noisy, number, episode)
        planned, tested = (policy.decide(window, explore=way) for way in (True, False))
        assert episode.target_return == planned.target_returns[0] != tested.target_returns[0]


def test_rollout_actors_explore_with_the_same_noise_as_lock_step(noisy: OnlineRun) -> None:
    place = RunEndpoints(run=noisy.path, id=noisy.info.id, coordinator="")
    exploration = ProcessFleet(noisy, place).rollout_config(0).exploration
    episode = next(Store(noisy.replay).episodes())
    window = first_window(noisy, 0, episode)
    with PlannerService(checkpoint.read(noisy.offline).weights, noisy.config) as service:
        reply = asyncio.run(service.plan(request_to_bytes(exploration.request(window)), SECONDS))
    assert isinstance(reply, bytes)
    decision = exploration.add_noise(decision_from_bytes(reply), window)
    np.testing.assert_allclose(decision.actions[0], episode.actions[0], atol=1e-6)
    assert decision.target_returns[0] == episode.target_return


def test_a_planned_run_has_utilities(tmp_path: Path) -> None:
    run_local(new_run(tmp_path / "planned", online__steps=20).path, ignore)
    first = next(Store(tmp_path / "planned" / "replay").episodes())
    assert np.isfinite(first.utility)


# What was collected


@pytest.fixture
def collected(tmp_path: Path) -> OnlineRun:
    """Episodes of 10, 20, 30 and 12 steps, the third aborted; the offline level is 60."""
    run = new_run(tmp_path / "run-0")
    with run_log.RunLog(run.path, done=0, unit="step") as log:
        log.write("evaluation", 0, {"return": 60.0, "error": 5.0, "updates": 0})
    writer = Writer(run.replay, run.header)
    for number, length in enumerate((10, 20, 30, 12)):
        episode = numbered(number, length, terminated=number != 2)  # its return: 1 + ... + length
        complete = replace(episode, truncated=False)
        writer.append(AppendKey(number % 2, 0, number // 2), encode(complete))
    writer.close()
    return run


def test_complete_episodes_are_listed_by_their_ends_and_aborted_ones_counted(
    collected: OnlineRun,
) -> None:
    exploration = read_exploration(collected)
    assert exploration.ends.tolist() == [10, 30, 72]
    assert exploration.returns.tolist() == [55, 210, 78]
    assert (exploration.steps, exploration.aborted, exploration.offline, exploration.unit) == (
        72,
        1,
        60,
        "return",
    )


def test_the_parts_are_thirds_of_the_steps(collected: OnlineRun) -> None:
    first, second, third = read_exploration(collected).parts()
    assert [(part.begin, part.end) for part in (first, second, third)] == [
        (0, 24),
        (24, 48),
        (48, 72),
    ]
    assert (first.episodes, first.mean, first.best, first.above) == (1, 55, 55, 0)
    assert (second.episodes, second.mean, second.best, second.above) == (1, 210, 210, 1)
    assert (third.episodes, third.mean, third.best, third.above) == (1, 78, 78, 1)


def test_without_an_evaluation_before_the_first_update_there_is_no_level(
    collected: OnlineRun,
) -> None:
    row = {"step": 0, "group": "evaluation", "return": 60.0, "updates": 3}
    (collected.path / run_log.NAME).write_text(json.dumps(row) + "\n")
    exploration = read_exploration(collected)
    assert exploration.offline is None
    assert all(np.isnan(part.above) for part in exploration.parts())


def test_a_part_without_an_episode_has_no_mean() -> None:
    exploration = Exploration(
        name="run",
        explorer="",
        unit="return",
        steps=9,
        ends=np.array([1]),
        returns=np.array([5.0]),
        aborted=0,
        offline=4.0,
    )
    first, second, _ = exploration.parts()
    assert (first.episodes, first.above, second.episodes) == (1, 1, 0)
    assert np.isnan([second.mean, second.best, second.above]).all()


def test_returns_become_scores_if_the_environment_has_them(collected: OnlineRun) -> None:
    hopper = replace(collected, info=replace(collected.info, env="d4rl/Hopper-v2"))
    assert score_unit(hopper) == "score"
    assert scaled(hopper, 1000.0) == normalised_score("d4rl/Hopper-v2", 1000.0)
    assert (score_unit(collected), scaled(collected, 7.0)) == ("return", 7)


# The command


def test_the_command_prints_thirds_and_draws_a_picture(
    collected: OnlineRun,
    noisy: OnlineRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    png = tmp_path / "both.png"
    done = invoke(capsys, monkeypatch, "explored", collected.path, noisy.path, "--png", str(png))
    assert done.code == 0, done.errors
    assert "run-0: planner q, offline return 60.0" in done.out
    assert "noisy-0: noise 0.3" in done.out
    assert "aborted episodes, left out: 1" in done.out
    second = line_with(done.out, "24 to 48").split()
    assert second[3:] == ["1", "210.0", "210.0", "100", "%"]
    assert png.read_bytes().startswith(PNG)


def test_a_run_that_collected_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path / "new")
    done = invoke(capsys, monkeypatch, "explored", run.path)
    assert_one_sentence(done, "has collected nothing yet; start it with m3pc resume")
    done = invoke(capsys, monkeypatch, "explored", tmp_path)
    assert_one_sentence(done, "is not an online run")


def test_runs_of_several_environments_are_refused(
    collected: OnlineRun,
    noisy: OnlineRun,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = json.loads((collected.path / "run.json").read_text())
    (collected.path / "run.json").write_text(json.dumps(facts | {"env": "Pendulum-v1"}))
    done = invoke(capsys, monkeypatch, "explored", collected.path, noisy.path)
    assert_one_sentence(done, "several environments")


# The pictures of a run


def test_a_finished_run_has_its_pictures(noisy: OnlineRun) -> None:
    for name in (results.CURVE, results.EXPLORATION):
        assert (noisy.path / name).read_bytes().startswith(PNG)


def test_the_last_evaluation_is_at_the_end(noisy: OnlineRun) -> None:
    rows = run_log.read_metrics(noisy.path, "evaluation")
    assert [row["step"] for row in rows] == [0, int(Store(noisy.replay).lengths.sum())]
    assert all(np.mean(row["returns"]) == pytest.approx(row["return"]) for row in rows)


def test_a_picture_that_fails_is_logged_and_the_other_is_drawn(
    collected: OnlineRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(results, "online_curve", broken)
    with caplog.at_level(logging.WARNING):
        results.save_pictures(collected)
    assert not (collected.path / results.CURVE).exists()
    assert (collected.path / results.EXPLORATION).exists()
    assert "event=picture-failed which=save_curve reason=RuntimeError('no ink')" in caplog.text


def test_an_empty_run_has_no_pictures_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(tmp_path / "run")
    Writer(run.replay, run.header).close()
    with caplog.at_level(logging.WARNING):
        results.save_pictures(run)
    assert caplog.text == ""
    assert not list(run.path.glob("*.png"))


# A run that a fleet finished


@pytest.mark.parametrize(
    ("change", "starts"),
    [
        ({}, False),
        ({"code": 143}, True),
        ({"reason": "stopped"}, True),
        ({"state": "learning"}, True),
        ({"of": 7}, True),
    ],
)
def test_a_finished_run_starts_nothing(
    change: dict[str, object], starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartedError(Exception):
        pass

    def connected(*arguments: Any, **named: Any) -> Any:
        raise StartedError

    monkeypatch.setattr(launch, "connected", connected)
    run = new_run(tmp_path / "run")
    status = {"state": "ended", "reason": "finished", "code": 0, "of": 400, "steps": 412}
    write_status(run.path, status | change)
    if starts:
        with pytest.raises(StartedError):
            launch.run_cluster(run.path, ignore, address=None)
    else:
        ended = launch.run_cluster(run.path, ignore, address=None)
        assert (ended.code, ended.reason, ended.steps) == (0, "finished", 412)


# How old the policies were


def segment(*versions: int, first: int = 0, slot: int = 0) -> Segment:
    episodes = [
        replace(numbered(0, 3), version=Version(epoch=2, number=number).packed)
        for number in versions
    ]
    return segment_of(episodes, [AppendKey(slot, 1, first + n) for n in range(len(versions))])


def test_staleness_of_each_episode_is_recorded_once() -> None:
    recorder = Recorder()
    old, new, other = segment(0, 0), segment(5, 8, first=2), segment(1, slot=1)
    staleness = Staleness(recorder, [old])
    staleness.poll([old, new], updates=10)
    staleness.poll([concatenated(old, new), other], updates=40)  # a log that became a segment
    snapshot = recorder.snapshot()
    assert sum(snapshot[STALENESS.name][""][:-1]) == 3
    assert mean(snapshot, STALENESS) == (5 + 2 + 39) / 3
    assert 25 < quantile(snapshot, STALENESS, 1.0) <= 50


def test_an_unknown_version_has_no_staleness_and_a_newer_one_has_0() -> None:
    recorder = Recorder()
    unknown = segment_of([replace(numbered(0, 3), version=-1)], [AppendKey(0, 0, 0)])
    staleness = Staleness(recorder, [])
    staleness.poll([unknown, segment(9, slot=1)], updates=3)  # the learner went back
    snapshot = recorder.snapshot()
    assert snapshot[STALENESS.name][""][0] == sum(snapshot[STALENESS.name][""][:-1]) == 1


def test_a_learner_records_the_staleness_of_new_episodes_only(collected: OnlineRun) -> None:
    from m3pc.online.trainer import Trainer

    trainer = Trainer(open_run(collected.path))
    trainer.refresh()
    assert STALENESS.name not in trainer.recorder.snapshot()
    writer = Writer(collected.replay, collected.header)
    writer.append(AppendKey(0, 1, 0), encode(numbered(0, 9)))
    trainer.refresh()
    writer.close()
    assert sum(trainer.recorder.snapshot()[STALENESS.name][""][:-1]) == 1
