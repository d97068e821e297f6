"""`m3pc goal`: the output, files and pictures of played episodes, and refusals.

States of the toy are (seed, steps done), whatever the actions: every distance is known by hand.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from m3pc.evaluation.goal_pictures import draw_tracking
from m3pc.evaluation.statistics import wilson_interval
from m3pc.types import InputError
from planner.policy import Policy
from tests.support.envs.countdown import COUNTDOWN
from tests.support.runs.commands import Command, assert_one_sentence, line_with
from tests.support.runs.goal_runs import OWN, assert_drawn, result

# Users' own goals


def test_both_planners_are_compared_with_a_state_to_hold(goal: Command) -> None:
    done = goal("../toy", "--goals=zero.npy", "--steps=4", "--within=2", "--seed=5", *OWN)
    assert done.code == 0, done.errors
    content = result()
    (case,) = content["cases"]
    assert (content["task"], content["waypoints"], content["env"]) == (
        "own goals",
        "own",
        COUNTDOWN,
    )
    assert (content["episodes"], content["steps"], content["key"]) == (3, 4, [1])
    assert list(case["planners"]) == ["goal", "goal-mask"]
    for planner in case["planners"].values():
        assert planner["lengths"] == [4, 4, 4]
        assert planner["traces"] == [[[0], [1], [2], [3], [4]]] * 3
        for episode in planner["episodes"]:
            assert episode["rms"] == pytest.approx(math.sqrt((1 + 4 + 9 + 16) / 4))
            assert (episode["distance"], episode["final"]) == (2.5, 4)
            assert (episode["within"], episode["success"]) == (0.5, 0)
        assert planner["summary"]["distance"] == {"mean": 2.5, "low": 2.5, "high": 2.5}
        low, high = wilson_interval(0, 3)
        assert planner["summary"]["success"] == {"mean": 0, "low": low, "high": high}
    assert case["references"] == [[[0]] * 5]
    assert case["difference"]["rms"] == {"mean": 0, "low": 0, "high": 0}
    assert case["out_of_distribution"] is None
    assert "4.000 [4.000, 4.000]" in line_with(done.out, " final ")
    assert "one state of zero.npy, held" in done.out
    assert sorted(os.listdir("out")) == ["result.json", "tracking.png"]
    assert_drawn(Path("out/tracking.png"))


def test_the_mean_of_one_episode_has_no_interval(goal: Command) -> None:
    options = ("--goals=zero.npy", "--steps=4", "--key=1", "--episodes=1", "--no-video")
    done = goal("../toy", *options, "--out=out")
    assert done.code == 0, done.errors
    case = result()["cases"][0]
    summary = case["planners"]["goal"]["summary"]
    assert summary["distance"] == {"mean": 2.5, "low": None, "high": None}
    assert case["difference"]["success"] == {"mean": 0, "low": None, "high": None}
    low, high = wilson_interval(0, 1)
    assert summary["success"] == {"mean": 0, "low": low, "high": high}
    assert line_with(done.out, " final ").split()[1:] == ["4.000", "4.000", "0.000"]


def test_a_table_that_is_followed_is_a_success(goal: Command) -> None:
    done = goal("../toy", "--goals=way.npy", *OWN)
    assert done.code == 0, done.errors
    content = result()
    (case,) = content["cases"]
    assert content["steps"] == 6  # as many as there are rows after the first
    assert case["references"] == [[[0], [1], [2], [3], [4], [5], [6]]]
    for planner in case["planners"].values():
        assert planner["summary"]["rms"]["mean"] == 0
        assert planner["summary"]["success"]["mean"] == planner["summary"]["within"]["mean"] == 1


def test_a_document_names_its_key_and_starts_where_an_episode_does(goal: Command) -> None:
    goals = [{"step": 2, "state": [0, 4]}, {"step": 4, "state": [0, 4]}]
    document = {"format": 1, "goals": goals, "key": [1], "between": "linear"}
    Path("goals.json").write_text(json.dumps(document))
    done = goal("../toy", "--goals=goals.json", "--episodes=2", "--out=out", "--no-video")
    assert done.code == 0, done.errors
    (case,) = result()["cases"]
    assert case["references"][0] == [[0], [2], [4], [4], [4]]
    assert case["planners"]["goal"]["episodes"][0]["distance"] == (1 + 2 + 1 + 0) / 4
    # Dimension 0 is the seed, so the ways to the goal differ; the key's do not.
    assert len(case["references"]) == 2
    assert case["references"][0] == case["references"][1]


def test_planners_see_subgoals_and_the_last_is_held(goal: Command) -> None:
    windows: list[Any] = []
    real = Policy.decide

    def decide(self: Policy, window: Any, *, explore: bool = False) -> Any:
        windows.append(window.states[0, :, 1].tolist())
        return real(self, window, explore=explore)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "decide", decide)
        options = ("--planner=goal", "--spacing=3", "--steps=50")
        assert goal("../toy", "--goals=way.npy", *options, *OWN).code == 0
    # 51 rows, for 50 is the environment's limit: 2 2 2 5 5 5 and then 6.
    assert windows[0] == [0, 2, 2, 5, 5, 5, 6, 6]
    assert windows[8] == [4, 5, 6, 7, 8, 6, 6, 6]
    assert windows[49] == [45, 46, 47, 48, 49, 6, 6, 6]
    content = result()
    assert content["spacing"] == 3
    assert content["cases"][0]["subgoals"][:4] == [[2, 2], [5, 5], [8, 6], [11, 6]]
    assert content["cases"][0]["difference"] is None
    assert list(content["cases"][0]["planners"]) == ["goal"]


def test_subgoals_are_drawn_where_all_episodes_have_the_same(
    goal: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert goal("../toy", "--goals=way.npy", "--spacing=3", *OWN).code == 0
    drawn: list[Any] = []
    monkeypatch.setattr("m3pc.plots.tracking", lambda path, panels: drawn.extend(panels))
    content = result()
    draw_tracking(content, Path("same.png"))
    content["cases"][0]["references"] *= 2  # a way for each of two episodes
    draw_tracking(content, Path("differ.png"))
    assert [panel.subgoals[0].tolist()[:2] for panel in drawn] == [[2, 5], []]
    assert drawn[1].goal.tolist() == drawn[0].goal.tolist()


def test_with_data_the_distance_of_the_goals_is_printed(goal: Command) -> None:
    done = goal("../toy", "--goals=way.npy", "--data=../walks", *OWN)
    assert done.code == 0, done.errors
    distances = result()["cases"][0]["out_of_distribution"]
    assert distances["goals"] == 0  # the data's first episode is the very table
    assert distances["visited"]["goal"] > 1000  # the toy's seeds are large numbers
    assert sum(distances["explained"]) == pytest.approx(1)
    assert "goals 0.0, visited by goal" in done.out
    assert_drawn(Path("out/states.png"))


def test_videos_and_a_filmstrip_show_the_first_episode_of_each_planner(goal: Command) -> None:
    import imageio_ffmpeg  # type: ignore[import-untyped]

    options = ("--key=1", "--episodes=1", "--out=out")
    done = goal("../toy", "--goals=way.npy", *options)
    assert done.code == 0, done.errors
    names = ("own-goals-goal.mp4", "own-goals-goal-mask.mp4")
    for name in names:
        assert f"video: out/{name}" in done.out
        frames, _ = imageio_ffmpeg.count_frames_and_secs(f"out/{name}")
        assert frames == 6
    assert_drawn(Path("out/own-goals-filmstrip.png"))
    others = ("own-goals-filmstrip.png", "result.json", "tracking.png")
    assert sorted(os.listdir("out")) == sorted([*names, *others])


def test_results_stay_beside_the_checkpoint_and_never_overwrite_another(goal: Command) -> None:
    for seed in ("1", "2", "1"):
        options = ("--goals=way.npy", "--key=1", "--episodes=1", "--no-video")
        assert goal("../toy", *options, f"--seed={seed}").code == 0
    names = sorted(os.listdir("../toy/goals"))
    assert [name[:19] for name in names] == ["own-goals-own-seed1", "own-goals-own-seed2"]


def test_results_of_changed_goals_have_another_folder(goal: Command) -> None:
    options = ("--goals=way.npy", "--key=1", "--episodes=1", "--no-video")
    for _ in range(2):
        assert goal("../toy", *options).code == 0
        np.save("way.npy", np.load("way.npy") + 1)
    assert len(os.listdir("../toy/goals")) == 2


def test_a_key_that_is_given_twice_counts_once(goal: Command) -> None:
    assert goal("../toy", "--goals=way.npy", "--key=1", *OWN).code == 0
    content = result()
    assert (content["key"], content["key_names"]) == ([1], ["state[1]"])


# Tasks


def test_a_wiggle_is_tried_at_each_frequency(goal: Command) -> None:
    options = ("--frequency=2", "--frequency=6", "--steps=12", "--episodes=2", "--no-video")
    done = goal("../hopper", "--task=hopper-wiggle", "--waypoints=released", "--out=out", *options)
    assert done.code == 0, done.errors
    content = result()
    assert content["env"] == 'd4rl/Hopper-v2 {"terminate_when_unhealthy": false}'
    assert (content["waypoints"], content["spacing"], content["steps"]) == ("released", 5, 12)
    assert [(case["name"], case["cycles"]) for case in content["cases"]] == [
        ("hopper-wiggle-2", 2),
        ("hopper-wiggle-6", 6),
    ]
    for case in content["cases"]:
        angle = -0.05 * math.sin(2 * math.pi * case["cycles"] * 12 / 999)
        assert case["references"][0][12] == [pytest.approx(angle, abs=1e-4)]
        first, second = case["planners"].values()
        starts = [[trace[0] for trace in planner["traces"]] for planner in (first, second)]
        assert starts[0] == starts[1]  # the same first states
        assert first["traces"] != second["traces"]
    assert_drawn(Path("out/tracking.png"))


def test_the_filmstrip_shows_the_goal_states_too(goal: Command) -> None:
    options = ("--frequency=6", "--steps=3", "--episodes=1", "--out=out")
    done = goal("../hopper", "--task=hopper-wiggle", *options)
    if done.code == 2 and "cannot be rendered" in done.errors:
        pytest.skip(done.errors)  # no GL on this machine
    assert done.code == 0, done.errors
    with Image.open("out/hopper-wiggle-6-filmstrip.png") as strip:
        assert strip.height > 600  # three rows: two planners, and the goal states


def test_the_configuration_chooses_the_kind_of_waypoints(goal: Command) -> None:
    options = ("--task=hopper-wiggle", "--frequency=2", "--steps=2", "--episodes=1", "--no-video")
    for sets, kind in (((), "paper"), (("--set=goal.waypoints=released",), "released")):
        assert goal("../hopper", *options, "--out=out", *sets).code == 0
        assert result()["waypoints"] == kind


def test_users_own_goals_replace_a_tasks_waypoints(goal: Command) -> None:
    np.save("pose.npy", np.ones(11))
    options = ("--task=hopper-wiggle", "--goals=pose.npy", "--steps=3", *OWN[1:])
    assert goal("../hopper", *options).code == 0
    content = result()
    assert (content["task"], content["waypoints"], content["key"]) == ("hopper-wiggle", "own", [1])
    assert content["cases"][0]["references"] == [[[1]] * 4]
    assert content["tolerance"] == 0.025


def test_a_document_names_the_key_of_a_task_too(goal: Command) -> None:
    goals = [{"step": 2, "state": [1] * 11}]
    Path("pose.json").write_text(json.dumps({"format": 1, "goals": goals, "key": 4}))
    options = ("--task=hopper-wiggle", "--goals=pose.json", "--steps=2", *OWN[1:])
    assert goal("../hopper", *options).code == 0
    assert (result()["key"], result()["key_names"]) == ([4], ["state[4]"])
    assert goal("../hopper", *options, "--key=2").code == 0
    assert result()["key"] == [2]


SHORT = (*("--task=hopper-wiggle", "--frequency=6", "--steps=3", "--episodes=2"), "--no-video")


def test_the_difference_does_not_depend_on_the_order_of_planners(goal: Command) -> None:
    differences = []
    for modes in (("goal", "goal-mask"), ("goal-mask", "goal")):
        done = goal("../hopper", *SHORT, *(f"--planner={mode}" for mode in modes), "--out=out")
        assert done.code == 0, done.errors
        assert "goal - goal-mask" in done.out
        (case,) = result()["cases"]
        rms, mask_rms = (
            case["planners"][m]["summary"]["rms"]["mean"] for m in ("goal", "goal-mask")
        )
        assert rms != mask_rms
        assert case["difference"]["rms"]["mean"] == pytest.approx(rms - mask_rms)
        merged = goal("out/result.json", "--json=merged.json")
        assert "goal - goal-mask" in merged.out
        (case,) = json.loads(Path("merged.json").read_text())["cases"]
        assert case["difference"]["rms"]["mean"] == pytest.approx(rms - mask_rms)
        differences.append(case["difference"])
    assert differences[0] == differences[1]


def test_results_do_not_depend_on_the_processes(goal: Command) -> None:
    for processes in ("1", "2"):
        options = (f"--processes={processes}", f"--out={processes}")
        assert goal("../hopper", *SHORT, *options).code == 0
    assert Path("1/result.json").read_bytes() == Path("2/result.json").read_bytes()


@pytest.mark.parametrize("name", ["cheetah", "nameless"])
def test_a_given_environment_may_be_another_robots(name: str, goal: Command) -> None:
    np.save("pose.npy", np.ones(17))
    options = ("--goals=pose.npy", "--steps=2", "--data=../walkers", *OWN[1:])
    task = ("--task=walker-split", "--env=d4rl/Walker2d-v2")
    assert goal(f"../{name}", *task, *options).code == 0
    assert result()["env"] == "d4rl/Walker2d-v2"


def test_a_checkpoint_that_names_no_robot_is_played_in_the_tasks_environment(goal: Command) -> None:
    np.save("pose.npy", np.ones(17))
    options = ("--goals=pose.npy", "--steps=2", "--data=../walkers", *OWN[1:])
    assert goal("../nameless", "--task=walker-split", *options).code == 0
    assert result()["env"] == 'd4rl/Walker2d-v2 {"terminate_when_unhealthy": false}'


# Refusals

WIGGLE = "--task=hopper-wiggle"
BAD: dict[str, tuple[list[str], str]] = {
    "nothing to reach": (["../toy"], "nothing to reach; give --task hopper-wiggle"),
    "unknown task": (["../toy", "--task=fly"], "there is no task 'fly'; give one of hopper-wiggle"),
    "no key": (["../toy", "--goals=zero.npy"], "give --key N (from 0)"),
    "no such dimension": (["../toy", "--goals=zero.npy", "--key=2"], "from 0 to 1"),
    "no such dimension of a task": (["../hopper", WIGGLE, "--key=11"], "from 0 to 10"),
    "another robot": (["../toy", WIGGLE], "but hopper-wiggle is of Hopper"),
    "another robot of the same sizes": (
        ["../walker", "--task=cheetah-flip", "--data=../walkers"],
        "../walker is of Walker2d (d4rl/Walker2d-v2), but cheetah-flip is of HalfCheetah",
    ),
    "a nut for a can": (
        ["../nut", "--task=can-place"],
        "../nut is of NutAssemblySquare (robosuite/NutAssemblySquare), but can-place is of "
        "PickPlaceCan",
    ),
    "another robot's data": (
        ["../cheetah", "--task=cheetah-flip", "--data=../walkers"],
        "../walkers is of Walker2d (Walker2d-v4), but cheetah-flip is of HalfCheetah",
    ),
    "another robot's data without a task": (
        ["../cheetah", "--goals=pose.npy", "--key=1", "--data=../walkers"],
        "../walkers is of Walker2d (Walker2d-v4), but the checkpoint is of HalfCheetah",
    ),
    "another robot's sizes": (
        ["../toy", WIGGLE, "--env=d4rl/Hopper-v2"],
        "have shapes (11,) and (3,), those of ../toy",
    ),
    "goals of another": (["../hopper", "--goals=zero.npy", "--key=1"], "expected rows of 11"),
    "no goals": (["../toy", "--goals=none.npy", "--key=1"], "none.npy is not a .npy of numbers"),
    "another planner": (["../toy", "--goals=zero.npy", "--planner=m"], "'m' reaches no goals"),
    "other waypoints": (["../hopper", WIGGLE, "--waypoints=best"], "no waypoints 'best'"),
    "no data": (["../cheetah", "--task=cheetah-flip"], "give --data"),
    "data of another": (["../hopper", WIGGLE, "--data=../walks"], "has states of 2 numbers"),
    "no store": (["../hopper", WIGGLE, "--data=nowhere"], "nowhere"),
    "no frequency": (
        ["../cheetah", "--task=cheetah-flip", "--frequency=2"],
        "cheetah-flip has no frequency",
    ),
    "two kinds of waypoints": (
        ["../toy", "--goals=zero.npy", "--key=1", "--waypoints=paper"],
        "--goals has its own waypoints; leave out --waypoints",
    ),
    "an endless tolerance": (
        ["../hopper", WIGGLE, "--within=inf"],
        "--within is inf; give a finite",
    ),
    "settled by training": (["../hopper", WIGGLE, "--set=model.width=8"], "settled by training"),
    "no checkpoint": (["nowhere", WIGGLE], "nowhere is not a checkpoint"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(name: str, goal: Command) -> None:
    arguments, words = BAD[name]
    np.save("pose.npy", np.ones(17))
    before = sorted(map(str, Path("..").rglob("*")))
    assert_one_sentence(goal(*arguments, "--episodes=1"), words)
    assert sorted(map(str, Path("..").rglob("*"))) == before


def test_on_a_machine_that_cannot_render_the_error_says_what_to_do(
    goal: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(*arguments: object, **options: object) -> None:
        raise InputError("it cannot be rendered; go without a video")

    monkeypatch.setattr("m3pc.evaluation.goals.record_video", render)
    done = goal("../toy", "--goals=way.npy", "--key=1", "--episodes=1", "--out=out")
    assert (done.code, "go without a video" in done.errors) == (2, True)
    assert sorted(os.listdir("out")) == ["result.json", "tracking.png"]  # what came before stays
