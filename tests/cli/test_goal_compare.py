"""`m3pc goal-compare`: results of several trained models in one experiment, and refusals."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.commands import Command, assert_one_sentence, line_with
from tests.support.runs.goal_runs import OWN, assert_drawn, result


def test_models_are_compared_by_their_means(goal: Command) -> None:
    for name in ("toy", "other"):
        options = ("--goals=zero.npy", "--steps=4", "--key=1", "--episodes=2", "--no-video")
        assert goal(f"../{name}", *options, f"--out={name}").code == 0
    changed = result("other")
    planner = changed["cases"][0]["planners"]["goal"]
    planner["summary"]["distance"]["mean"] = 3.5  # as if the other model were one further off
    planner["summary"]["success"]["mean"] = 1.0
    planner["traces"][1] = [[9]] * 5
    Path("other/result.json").write_text(json.dumps(changed))
    files = ("toy/result.json", "other/result.json")
    done = goal(*files, "--png=both.png", "--json=both.json")
    assert done.code == 0, done.errors
    (case,) = json.loads(Path("both.json").read_text())["cases"]
    half = 12.706 * math.sqrt(0.5) / math.sqrt(2)  # of 2.5 and 3.5
    distance = case["planners"]["goal"]["summary"]["distance"]
    assert distance["models"] == [2.5, 3.5]
    assert [distance["mean"], distance["low"], distance["high"]] == pytest.approx([3, 0, 3 + half])
    share = case["planners"]["goal"]["summary"]["success"]
    assert share == {"mean": 0.5, "low": 0, "high": 1, "models": [0, 1]}  # and not beyond
    difference = case["difference"]["distance"]
    assert difference["models"] == [0, 1]
    assert [difference["low"], difference["high"]] == pytest.approx([0.5 - half, 0.5 + half])
    shares = case["difference"]["success"]
    assert shares == {"mean": 0.5, "low": -1, "high": 1, "models": [0, 1]}
    trace = [[0], [1], [2], [3], [4]]
    assert case["planners"]["goal"]["traces"] == [trace, trace, trace, [[9]] * 5]
    assert "2 trained models" in done.out
    assert_drawn(Path("both.png"))


def test_one_model_has_no_interval(goal: Command) -> None:
    assert goal("../toy", "--goals=zero.npy", "--steps=4", *OWN).code == 0
    done = goal("out/result.json")
    assert done.code == 0, done.errors
    assert line_with(done.out, " final ").split()[1:] == ["4.000", "4.000", "0.000"]
    assert "1 trained model\n" in done.out


def test_only_one_experiment_is_compared(goal: Command) -> None:
    for steps in ("3", "4"):
        options = (f"--steps={steps}", "--key=1", "--episodes=1", "--no-video", f"--out={steps}")
        assert goal("../toy", "--goals=zero.npy", *options).code == 0
    assert_one_sentence(goal("3/result.json", "4/result.json"), "has steps 4, 3/result.json 3")
    twice = goal("3/result.json", "3/result.json")
    assert_one_sentence(twice, "two of the files are of the same weights")
    Path("bad.json").write_text("[]")
    assert_one_sentence(goal("bad.json"), "bad.json is not a result of m3pc goal")
    assert_one_sentence(goal("none.json"), "none.json is not a result of m3pc goal")
    Path("new.json").write_text(json.dumps(result("3") | {"format": 2}))
    assert_one_sentence(goal("new.json"), "new.json is not a result of m3pc goal: format: Input")
    Path("cut.json").write_text(json.dumps(result("3") | {"cases": [{"name": "a"}]}))
    assert_one_sentence(goal("cut.json"), "cases.0.every: Field required")
    changed = result("3")
    del changed["cases"][0]["planners"]["goal"]["summary"]["rms"]
    Path("less.json").write_text(json.dumps(changed))
    assert_one_sentence(goal("less.json"), "less.json has no rms of goal")


def changed(folder: str, change: Callable[[dict[str, Any]], object]) -> str:
    """The result of another model, changed."""
    content = result(folder)
    content["weights"] = "another"
    change(content)
    Path("changed.json").write_text(json.dumps(content))
    return "changed.json"


UNLIKE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "settings": (lambda r: r["settings"].append("goal.fill=released"), "has settings ['goal.fill"),
    "seed": (lambda r: r.update(seed=1), "has seed 1, out/result.json 0"),
    "episodes": (lambda r: r.update(episodes=9), "has episodes 9, out/result.json 3"),
    "engine": (lambda r: r.update(engine="mujoco 2"), "has engine mujoco 2, out/result.json "),
    "goals": (
        lambda r: r["cases"][0]["references"][0].__setitem__(2, [7]),
        "changed.json was to reach other states in own goals",
    ),
    "subgoals": (
        lambda r: r["cases"][0]["subgoals"][0].__setitem__(1, 7),
        "changed.json was to reach other states in own goals",
    ),
}


def test_models_of_different_requests_are_not_compared(goal: Command) -> None:
    assert goal("../toy", "--goals=way.npy", *OWN).code == 0
    assert goal("out/result.json", changed("out", lambda r: None)).code == 0
    for change, words in UNLIKE.values():
        assert_one_sentence(goal("out/result.json", changed("out", change)), words)


def _first(path: str) -> Callable[[dict[str, Any]], Any]:
    """A part of the first case: references.0 is its first trace."""

    def find(result: dict[str, Any]) -> Any:
        value = result["cases"][0]
        for part in path.split("."):
            value = value[int(part) if part.isdigit() else part]
        return value

    return find


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a short goal": (lambda r: _first("references.0")(r).pop(), "other than of [7, 1]"),
    "a short trace": (lambda r: _first("planners.goal.traces.1")(r).pop(), "other than of [7, 1]"),
    "a wide row": (lambda r: _first("references.0.3")(r).append(1), "other than of [7, 1]"),
    "no row": (lambda r: _first("planners.goal.traces.1.2")(r).clear(), "other than of [7, 1]"),
    "a wide subgoal": (lambda r: _first("subgoals.0")(r).append(1), "of other than 2 numbers"),
    "no trace": (lambda r: _first("planners.goal.traces")(r).clear(), "planners.goal.traces"),
    "no planner": (lambda r: _first("planners")(r).clear(), "cases.0.planners"),
    "another planner": (lambda r: _first("planners")(r).update(m={}), "cases.0.planners.m"),
    "no step": (lambda r: r["cases"][0].update(every=0), "cases.0.every"),
    "no steps": (lambda r: r.update(steps=0), "steps"),
    "NaN": (lambda r: _first("references.0.0")(r).__setitem__(0, math.nan), "finite number"),
    "no mean": (lambda r: _first("planners.goal.summary.rms")(r).pop("mean"), "rms.mean"),
    "no key": (lambda r: r.update(key=[], key_names=[]), "key: List should have at least 1"),
    "another key": (lambda r: r["key_names"].append("more"), "key has 1 dimensions, key_names 2"),
    "a case twice": (lambda r: r["cases"].append(r["cases"][0]), "expected each name once"),
}


def test_a_damaged_result_is_refused(goal: Command) -> None:
    assert goal("../toy", "--goals=way.npy", *OWN).code == 0
    for change, words in DAMAGE.values():
        assert_one_sentence(goal(changed("out", change), "--png=out.png"), words)
    assert not Path("out.png").exists()
