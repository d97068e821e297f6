"""The same planner before and after finetuning: what is compared, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.evaluation import jobs
from m3pc.evaluation.episodes import Evaluation, evaluate
from m3pc.evaluation.statistics import bootstrap_interval
from m3pc.model import checkpoint
from m3pc.online.local import run_local
from planner.policy import Policy
from tests.support.envs.point import POINT
from tests.support.models.small_weights import tiny_config, tiny_weights
from tests.support.runs.commands import Done, assert_one_sentence, invoke, line_with, shows
from tests.support.runs.small_online import new_run, pretrained
from tests.support.runs.small_run import ignore

Run = Callable[..., Done]
# The checkpoint is evaluated with the run's own settings of the planner.
SAME = ("--set=planner.candidates=4", "--planner=rcbc", "--planner=q")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short online run that planned by q."""
    path = tmp_path_factory.mktemp("finished") / "run"
    new_run(path, online__steps=60, evaluation__every=1000)
    run_local(path, ignore)
    return path


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command on a copy of the pretrained checkpoint, in its folder."""
    shutil.copytree(pretrained()[0].path, tmp_path / "point")
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: invoke(
        capsys, monkeypatch, "evaluate", "point", f"--env={POINT}", "--episodes=3", *arguments
    )


def rows(path: Path) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = json.loads(path.read_text())
    return table


def test_the_finetuned_row_is_the_runs_planner_with_its_newest_weights(
    run: Run, finished: Path
) -> None:
    done = run(*SAME, "--seed=5", f"--finetuned={finished}", "--json=out.json")
    assert done.code == 0, done.errors
    cloned, before, after = rows(Path("out.json"))
    assert [row["planner"] for row in (cloned, before, after)] == ["rcbc", "q", "q"]
    newest = checkpoint.read(finished)
    by_hand = evaluate(
        POINT,
        Policy(newest.weights),
        episodes=3,
        seed=5,
        slots=3,
    )
    assert after["returns"] == by_hand.returns.tolist()
    assert after["weights"] == newest.weights.digest != before["weights"]
    assert after["version"] == newest.progress["updates"] > 0
    assert (before["ratio"], after["ratio"], before["seed"], after["seed"]) == (1, 1, 5, 5)
    line = line_with(done.out, " finetuned  ")
    assert shows(line, by_hand.mean)


def test_the_difference_is_paired_by_episode_and_has_an_interval(run: Run, finished: Path) -> None:
    done = run(*SAME, f"--finetuned={finished}", "--json=out.json")
    _, before, after = rows(Path("out.json"))
    gains = np.subtract(after["returns"], before["returns"])
    comparison = after["finetuned"]
    assert "finetuned" not in before
    assert comparison["run"] == str(finished)
    assert comparison["minus"] == {"planner": "q", "ratio": 1.0}
    assert comparison["differences"] == gains.tolist()
    assert comparison["difference"] == pytest.approx(gains.mean())
    assert comparison["interval"] == list(bootstrap_interval(gains[None]))
    low, high = comparison["interval"]
    assert low <= comparison["difference"] <= high
    sentence = line_with(done.out, "finetuned minus q@1 before: ")
    expected = f"{gains.mean():+.0f} in return (95 % interval {low:+.0f} to {high:+.0f})"
    assert expected in sentence
    assert "3 episodes" in sentence


def test_one_episode_has_no_interval(run: Run, finished: Path) -> None:
    done = run(*SAME, "--episodes=1", f"--finetuned={finished}", "--json=out.json")
    assert done.code == 0, done.errors
    assert rows(Path("out.json"))[-1]["finetuned"]["interval"] is None
    assert "interval" not in line_with(done.out, "finetuned minus q@1")


def test_what_was_played_is_not_played_again(
    run: Run, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []

    def play(env_id: str, planner: Policy, **arguments: Any) -> Evaluation:
        played.append(f"{planner.config.planner.mode} {planner.weights.version}")
        return evaluate(env_id, planner, **arguments)

    monkeypatch.setattr(jobs, "evaluate", play)
    version = checkpoint.read(finished).weights.version
    start = checkpoint.read("point").weights.version
    assert run(*SAME, "--reuse").code == 0
    assert played == [f"rcbc {start}", f"q {start}"]
    first = run(*SAME, "--reuse", f"--finetuned={finished}")
    assert played[2:] == [f"q {version}"]
    again = run(*SAME, "--reuse", f"--finetuned={finished}")
    assert len(played) == 3
    assert again.out == first.out
    for change in ("--seed=1", "--ratio=0.5", "--episodes=2", "--set=planner.lam=0.1"):
        before = len(played)
        assert run(*SAME, change, "--reuse").code == 0
        assert len(played) == before + 2
    before = len(played)
    assert run(*SAME).code == 0  # nobody said that it may
    assert len(played) == before + 2


def test_a_file_that_holds_no_evaluation_is_passed_over(run: Run) -> None:
    folder = Path("point/evaluations")
    folder.mkdir()
    for number, text in enumerate(("", "[", "{}", "3", "[3, null]", '[{"planner": "rcbc"}]')):
        (folder / f"{number}.json").write_text(text)
    assert run("--planner=rcbc", "--reuse").code == 0


# Refusals


def test_a_planner_that_the_run_was_not_evaluated_with_is_refused(run: Run, finished: Path) -> None:
    for planners in (["--planner=rcbc"], ["--planner=q@0.5"], ["--planner=q", "--ratio=0.5"]):
        done = run("--set=planner.candidates=4", *planners, f"--finetuned={finished}")
        assert_one_sentence(done, "with planner q@1, which is not among those to evaluate")


def test_a_planner_with_other_settings_is_refused(run: Run, finished: Path) -> None:
    done = run("--planner=q", f"--finetuned={finished}")
    assert_one_sentence(
        done, "give --set planner.candidates=4 to evaluate both with the same planner"
    )


CHANGES = [
    ({"states": 3}, "has states, actions, step limit and environment (3, 1, 30,"),
    ({"actions": 2}, "has states, actions, step limit and environment (2, 2, 30,"),
    ({"horizon": 31}, "(2, 1, 31,"),
    ({"env": "Pendulum-v1"}, "Pendulum-v1"),
    ({"source": "0" * 64}, "started from weights 0000000000000000,"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=lambda value: str(value)[:20])
def test_a_run_of_another_environment_or_checkpoint_is_refused(
    change: dict[str, object], words: str, run: Run, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "other")
    facts = json.loads((finished / "run.json").read_text())
    (tmp_path / "other" / "run.json").write_text(json.dumps(facts | change))
    assert_one_sentence(run(*SAME, "--finetuned=other"), words)
    assert not Path("point/evaluations").exists()


def test_a_folder_that_is_no_online_run_is_refused(run: Run, tmp_path: Path) -> None:
    weights = tiny_weights(tiny_config(), states=2, actions=1)
    checkpoint.write(tmp_path / "plain", weights, {}, {})
    assert_one_sentence(run(*SAME, "--finetuned=plain"), "plain is not an online run")


# Intervals


def test_equal_differences_have_an_interval_of_no_width() -> None:
    assert bootstrap_interval(np.full((2, 5), 3.0)) == (3, 3)


def test_training_seeds_that_disagree_widen_the_interval_whatever_the_episodes() -> None:
    """With two runs, one of four resamples has the worse run twice, one the better."""
    low, high = bootstrap_interval(np.array([[-10.0] * 50, [10.0] * 50]))
    assert (low, high) == (-10, 10)


def test_runs_are_resampled_with_replacement() -> None:
    """The one good run of five is in at least three of five draws with a chance of 5.8 %, in four
    with one of 0.7 %."""
    assert bootstrap_interval(np.array([[0.0] * 4] * 4 + [[10.0] * 4])) == (0, 6)


def test_more_episodes_narrow_the_interval_which_is_always_the_same() -> None:
    rng = np.random.default_rng(1)
    few, many = rng.normal(1, 1, (1, 10)), rng.normal(1, 1, (1, 1000))
    (low, high), (lowest, highest) = bootstrap_interval(many), bootstrap_interval(few)
    assert 0.1 < high - low < 0.15  # 2 * 1.96 / sqrt(1000)
    assert highest - lowest > 4 * (high - low)
    assert bootstrap_interval(few) == (lowest, highest)
