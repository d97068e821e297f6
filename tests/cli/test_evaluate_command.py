"""`m3pc evaluate`: the output and files of played episodes, and refusals."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3pc.envs import normalised_score
from m3pc.evaluation import jobs
from m3pc.evaluation.episodes import Evaluation, evaluate
from m3pc.model import checkpoint
from m3pc.model.checkpoint import METADATA, TRAINING, WEIGHTS
from m3pc.model.weights import Weights
from planner.policy import Policy
from tests.support.envs.countdown import COUNTDOWN
from tests.support.models.small_weights import tiny_config, tiny_weights
from tests.support.runs.commands import Command, assert_one_sentence, line_with, shows

PENDULUM = tiny_weights(tiny_config(), states=3, actions=1, env="Pendulum-v1")
TOY = tiny_weights(tiny_config(), states=2, actions=1, env=COUNTDOWN)  # 50 steps, renders anywhere
TIMES = ("seconds", "decisions_per_second")


@pytest.fixture
def run(tmp_path: Path, m3pc: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """m3pc evaluate, in an empty folder beside the checkpoints `pendulum`, `toy`, `nameless`,
    `wide` (two actions) and `young` (whose critic has not learned)."""
    for name, weights in (("pendulum", PENDULUM), ("toy", TOY)):
        checkpoint.write(tmp_path / name, weights, {}, {})
    nameless = tiny_weights(tiny_config(), states=2, actions=1)
    checkpoint.write(tmp_path / "nameless", nameless, {}, {})
    wide = tiny_weights(tiny_config(), states=3, actions=2)
    checkpoint.write(tmp_path / "wide", wide, {}, {})
    checkpoint.write(tmp_path / "young", TOY, {}, {"critic_updates": 0})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda *arguments: m3pc("evaluate", *arguments)


def by_hand(
    weights: Weights, *, episodes: int, seed: int, env: str, **changes: object
) -> Evaluation:
    """The same episodes without the command."""
    config = tiny_config(**changes)  # type: ignore[arg-type]
    return evaluate(
        env,
        Policy(weights, config),
        episodes=episodes,
        seed=seed,
        slots=episodes,
    )


def rows(path: Path) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(path.read_text())
    return content


def test_planners_are_played_side_by_side_and_every_number_is_stored(run: Command) -> None:
    modes = ("rcbc", "m")
    planners = [f"--planner={mode}" for mode in (*modes, "rcbc")]
    numbers = ["--episodes=2", "--seed=4", "--ratio=0.5", "--json=out/of/all.json"]
    done = run("../pendulum", *planners, *numbers)
    assert done.code == 0, done.errors
    assert "JSON: out/of/all.json" in done.out
    assert "Pendulum-v1, 2 episodes, seed 4, gymnasium" in done.out
    content = rows(Path("out/of/all.json"))
    assert [row["planner"] for row in content] == list(modes)  # each once, in order
    for row, mode in zip(content, modes, strict=True):
        changes = {"planner__mode": mode, "conditioning__evaluation_ratio": 0.5}
        played = by_hand(PENDULUM, episodes=2, seed=4, env="Pendulum-v1", **changes)
        about = {"planner": mode, "ratio": 0.5, "version": 7, "weights": PENDULUM.digest}
        about["settings"] = []
        expected = about | played.as_json()
        assert row.keys() == expected.keys()
        assert {k: v for k, v in row.items() if k not in TIMES} == {
            k: v for k, v in expected.items() if k not in TIMES
        }
        assert row["lengths"] == [200, 200]
        assert row["decisions"] == 400
        assert row["first_conditions"] == [1, 1]  # half of the envelope's 2
        line = line_with(done.out, f" {mode} ")
        for value in (played.mean, played.standard_error, 200, 1, 0.5):
            assert shows(line, value), (line, value)
        assert mode == "rcbc" or shows(line, played.effective_candidates.mean())
    assert content[0]["mean"] != content[1]["mean"]


def stored(pattern: str) -> list[dict[str, Any]]:
    """The content of the only file with such a name."""
    (path,) = Path().glob(pattern)
    return rows(path)


def test_without_options_the_datas_environment_is_played_as_configured(run: Command) -> None:
    done = run("../toy", "--episodes=3")
    assert done.code == 0, done.errors
    content = stored("../toy/evaluations/m-seed0-*.json")
    assert [(row["planner"], row["env"], row["seed"]) for row in content] == [("m", COUNTDOWN, 0)]
    assert (content[0]["episodes"], content[0]["lengths"]) == (3, [50, 50, 50])
    assert (content[0]["ratio"], content[0]["score"]) == (1, None)
    assert os.listdir() == []


def test_a_run_keeps_its_evaluations_beside_its_checkpoints(run: Command) -> None:
    Path("run/checkpoints").mkdir(parents=True)
    checkpoint.write_next(Path("run/checkpoints"), TOY, {}, {}, number=10, keep=1)
    planners = ["--planner=rcbc", "--planner=q"]
    assert run("run", "--episodes=1", "--seed=9", *planners).code == 0
    (first, second) = stored("run/evaluations/rcbc-q-seed9-*.json")
    assert (first["planner"], second["planner"]) == ("rcbc", "q")
    assert first["effective"] == first["spread"] == [None]
    assert second["effective"][0] > 1
    # Also those of one checkpoint, which goes when it is old.
    named = Path("run/checkpoints/000000010")
    assert run(str(named), "--episodes=1", "--planner=rcbc").code == 0
    assert len(stored("run/evaluations/rcbc-seed0-*.json")) == 1
    assert sorted(os.listdir(named)) == [METADATA, TRAINING, WEIGHTS]


def test_no_evaluation_overwrites_another(run: Command) -> None:
    options_of_runs = (
        ["--episodes=1"],
        ["--episodes=2"],
        ["--episodes=1", "--ratio=0.5"],
        ["--episodes=1", "--set=planner.candidates=4"],
    )
    for options in (*options_of_runs, options_of_runs[0]):  # the last one is the first again
        assert run("../toy", *options).code == 0
    content = [json.loads(path.read_text())[0] for path in Path("../toy/evaluations").iterdir()]
    assert len(content) == 4
    assert sorted(row["settings"] for row in content)[-1] == ["planner.candidates=4"]


def test_planners_may_be_asked_for_different_returns(run: Command) -> None:
    planners = ["--planner=rcbc@0.5", "--planner=rcbc", "--planner=m@2", "--ratio=0.25"]
    assert run("../toy", "--episodes=1", "--json=out", *planners).code == 0
    content = [(row["planner"], row["ratio"], row["first_conditions"]) for row in rows(Path("out"))]
    assert content == [("rcbc", 0.5, [1]), ("rcbc", 0.25, [0.5]), ("m", 2, [4])]


def test_a_planner_set_as_a_field_is_the_one_that_plays(run: Command) -> None:
    assert run("../toy", "--episodes=1", "--set=planner.mode=q0", "--json=out").code == 0
    assert rows(Path("out"))[0]["planner"] == "q0"


def test_all_planners_play_the_same_weights(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once: a run that is being trained has newer ones at any time."""
    real, reads = checkpoint.read, []

    def read(path: Path) -> checkpoint.Checkpoint:
        reads.append(path)
        return real(path)

    monkeypatch.setattr(checkpoint, "read", read)
    planners = ["--planner=rcbc", "--planner=m", "--planner=q0"]
    assert run("../toy", "--episodes=1", "--json=out", *planners).code == 0
    assert len(reads) == 1
    assert len({row["weights"] for row in rows(Path("out"))}) == 1


def test_one_episode_has_no_error(run: Command) -> None:
    done = run("../toy", "--episodes=1", "--json=out")
    (row,) = rows(Path("out"))
    assert row["standard_error"] is None
    assert "±" not in line_with(done.out, " m ")


def test_the_same_seed_gives_the_same_returns(run: Command) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        options = ("--planner=rcbc", "--episodes=2", f"--seed={seed}", f"--json={name}")
        assert run("../pendulum", *options).code == 0
    first, same, other = (rows(Path(name))[0]["returns"] for name in "abc")
    assert first == same
    assert not set(first) & set(other)


def test_settings_change_how_it_plans(run: Command) -> None:
    sets = ["--set", "planner.candidates=5", "--set", "planner.m.inverse_temperature=0"]
    assert run("../toy", "--episodes=1", "--json=out", *sets).code == 0
    assert rows(Path("out"))[0]["effective"] == pytest.approx([5])


def test_scores_are_on_d4rls_scale(run: Command) -> None:
    hopper = tiny_weights(tiny_config(), states=11, actions=3, env="d4rl/Hopper-v2")
    checkpoint.write(Path("hopper"), hopper, {}, {})
    done = run("hopper", "--planner=rcbc", "--episodes=2", "--json=out")
    (row,) = rows(Path("out"))
    assert row["score"] == normalised_score("d4rl/Hopper-v2", row["mean"])
    assert row["engine"].startswith("mujoco")
    line = line_with(done.out, " rcbc ")
    assert shows(line, row["score"])
    assert shows(line, row["score_error"])


# Backward plans


def test_goal_planners_receive_the_waypoints(run: Command) -> None:
    rng = np.random.default_rng(0)
    np.save("table.npy", rng.standard_normal((50, 2)))
    options = ("--episodes=1", "--waypoints=table.npy", "--set=conditioning.evaluation_ratio=1")
    windows: list[np.ndarray[Any, Any]] = []
    real = Policy.decide

    def decide(self: Policy, window: Any, *, explore: bool = False) -> Any:
        windows.append(window.states[0])
        return real(self, window, explore=explore)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "decide", decide)
        for mode in ("goal", "goal-mask"):
            assert run("../toy", f"--planner={mode}", "--json=out", *options).code == 0
            assert rows(Path("out"))[0]["first_conditions"] == [None]
        assert run("../toy", "--planner=goal", "--spacing=5", *options).code == 0
    table = np.load("table.npy").astype(np.float32)
    assert np.array_equal(windows[0][1:], table[1:8])
    assert np.array_equal(windows[50][1:], table[1:8])
    assert np.array_equal(windows[100][1:], table[[4, 4, 4, 4, 9, 9, 9]])


def bad_table(name: str) -> None:
    """Write a file `table.npy` that is not a table of states."""
    content: dict[str, Any] = {
        "one row": np.zeros(2),
        "three axes": np.zeros((4, 2, 1)),
        "wider": np.zeros((4, 3)),
        "NaN": np.full((50, 2), np.nan),
        "infinity after rounding": np.full((50, 2), 1e39),
        "words": np.array([["a", "b"]]),
        "complex": np.zeros((50, 2), complex),
        "dates": np.zeros((50, 2), "M8[s]"),
        "fields": np.zeros(50, [("x", "f4"), ("y", "f4")]),
        "no row": np.zeros((0, 2)),
        "too short": np.zeros((39, 2)),
        "objects": np.array([[None, 1]], object),
    }
    if name in content:
        np.save("table.npy", content[name], allow_pickle=True)
    elif name == "text":
        Path("table.npy").write_text("1 2\n3 4\n")
    elif name == "cut":
        np.save("table.npy", np.zeros((4, 2)))
        os.truncate("table.npy", 140)
    elif name == "folder":
        Path("table.npy").mkdir()
    elif name == "empty":
        Path("table.npy").touch()
    elif name == "archive":
        with Path("table.npy").open("wb") as file:
            np.savez(file, table=np.zeros((4, 2)))


TABLES = ("one row", "three axes", "wider", "NaN", "infinity after rounding", "words", "objects",
          "complex", "dates", "fields", "no row", "too short")  # fmt: skip
OTHERS = ("text", "cut", "folder", "missing", "empty", "archive")


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", [*TABLES, *OTHERS])
def test_waypoints_that_are_not_a_table_are_refused(name: str, run: Command) -> None:
    bad_table(name)
    before = sorted(os.listdir())
    done = run("../toy", "--planner=goal", "--waypoints=table.npy", "--json=out")
    assert_one_sentence(done, "table.npy")
    assert sorted(os.listdir()) == before


def test_a_pickle_in_a_table_is_not_run(run: Command) -> None:
    proof = Path("it was run").absolute()
    np.save("table.npy", np.array([[None, 1]], object), allow_pickle=True)
    header = Path("table.npy").read_bytes().partition(b"\n")[0] + b"\n"
    bomb = f"cos\nsystem\n(S'touch \"{proof}\"'\ntR."
    Path("table.npy").write_bytes(header + bomb.encode())
    done = run("../toy", "--planner=goal", "--waypoints=table.npy", "--episodes=1")
    assert_one_sentence(done, "table.npy is not a .npy of numbers")
    assert not proof.exists()


# Refusals

BAD: dict[str, tuple[list[str], str]] = {
    "unknown planner": (["../toy", "--planner=best"], "planner is 'best'; give one of rcbc, m, q"),
    "no ratio": (["../toy", "--planner=m@"], "conditioning.evaluation_ratio"),
    "a word for a ratio": (["../toy", "--planner=m@much"], "conditioning.evaluation_ratio"),
    "one of two": (["../toy", "--planner=m", "--planner=Q"], "planner is 'Q'"),
    "no environment": (["../nameless"], "does not say which environment it is for; give --env"),
    "unknown environment": (["../toy", "--env=Nowhere-v0"], "Nowhere"),
    "not a Box": (["../toy", "--env=CartPole-v1"], "Box"),
    "another state": (["../toy", "--env=Pendulum-v1"], "have shapes (3,) and (1,), those of"),
    "another action": (["../wide", "--env=Pendulum-v1"], "those of ../wide (3,) and (2,)"),
    "a critic that knows nothing": (["../young", "--planner=q"], "has not learned yet"),
    "waypoints for nothing": (["../toy", "--waypoints=x.npy"], "are for the planners goal and"),
    "spacing for nothing": (["../toy", "--spacing=2"], "are for the planners goal and goal-mask"),
    "a folder for JSON": (["../toy", "--json=.."], "--json is .., a folder; give a file"),
    "settled by training": (["../toy", "--set=critic.width=7"], "critic was settled by training"),
    "another seed": (["../toy", "--set=seed=7"], "seed was settled by training"),
    "no waypoints": (["../toy", "--planner=goal"], "goal needs states to reach; give --waypoints"),
    "no waypoints either": (["../toy", "--planner=goal-mask"], "goal-mask needs states to reach"),
    "another model": (["../toy", "--set=model.width=32"], "model was settled by training"),
    "other returns": (["../toy", "--set=returns.include_now=false"], "returns was settled by"),
    "unknown field": (["../toy", "--set=planner.candidate=1"], "planner.candidates"),
    "bad value": (["../toy", "--set=planner.lam=2"], "planner.lam is 2; give"),
    "no checkpoint": (["nowhere"], "nowhere is not a checkpoint"),
    "no checkpoint here": (["."], "is not a checkpoint"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(name: str, run: Command) -> None:
    arguments, words = BAD[name]
    before = sorted(map(str, Path("..").rglob("*")))
    assert_one_sentence(run(*arguments, "--episodes=1"), words)
    assert sorted(map(str, Path("..").rglob("*"))) == before


def test_a_checkpoint_does_not_choose_a_module_to_run(run: Command) -> None:
    """Gymnasium imports what stands before the colon of an id."""
    Path("payload.py").write_text("import pathlib; pathlib.Path('it was run').touch()\n")
    hostile = tiny_weights(tiny_config(), states=3, actions=1, env="payload:Pendulum-v1")
    checkpoint.write(Path("hostile"), hostile, {}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(".")
        done = run("hostile", "--planner=rcbc", "--episodes=1")
        assert_one_sentence(done, "names the environment 'payload:Pendulum-v1', whose module")
        assert not Path("it was run").exists()
        trusted = ("--env=payload:Pendulum-v1", "--json=out")
        assert run("hostile", "--planner=rcbc", "--episodes=1", *trusted).code == 0
        assert Path("it was run").exists()


def test_a_damaged_checkpoint_is_not_played(run: Command) -> None:
    os.truncate("../toy/weights.safetensors", 100)
    assert_one_sentence(run("../toy", "--episodes=1"), "weights.safetensors was changed")


def test_a_faulty_option_is_refused_before_anything_is_played(
    run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[object] = []

    def play(*arguments: Any, **options: Any) -> Evaluation:
        played.append(arguments)
        return evaluate(*arguments, **options)

    monkeypatch.setattr(jobs, "evaluate", play)
    done = run("../toy", "--episodes=1", "--planner=rcbc", "--planner=goal")
    assert_one_sentence(done, "needs states to reach")
    assert played == []


# Films


@pytest.fixture
def gl(monkeypatch: pytest.MonkeyPatch) -> None:
    """What filming sets in the environment is undone after the test."""
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", "egl"))


@pytest.mark.usefixtures("gl")
def test_each_planner_has_a_video(run: Command) -> None:
    planners = ["--planner=rcbc", "--planner=m"]
    done = run("../toy", "--episodes=1", "--seed=3", "--video", "--json=kept/out.json", *planners)
    assert done.code == 0, done.errors
    assert sorted(os.listdir("kept")) == ["m-seed3.mp4", "out.json", "rcbc-seed3.mp4"]
    for mode in ("rcbc", "m"):
        assert f"video: kept/{mode}-seed3.mp4" in done.out
        film = Path(f"kept/{mode}-seed3.mp4").read_bytes()
        assert film[4:8] == b"ftyp"
        assert len(film) > 1000


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--set=planner.candidates=5"],
        ["--set=conditioning.evaluation_ratio=0.5"],
        ["--ratio=0.5"],
    ],
)
def test_the_video_shows_an_evaluated_episode(
    options: list[str], run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded policy has the settings of the evaluated one, in the same episode."""
    played: list[tuple[Any, ...]] = []

    def play(env_id: str, planner: Policy, **arguments: Any) -> Evaluation:
        played.append((env_id, planner.config, arguments["seed"], arguments["waypoints"]))
        return evaluate(env_id, planner, **arguments)

    def film(env_id: str, planner: Policy, path: Path, **arguments: Any) -> None:
        played.append((env_id, planner.config, arguments["seed"], arguments["waypoints"]))

    monkeypatch.setattr(jobs, "evaluate", play)
    monkeypatch.setattr(jobs, "record_video", film)
    assert run("../toy", "--episodes=1", "--seed=3", "--video", *options).code == 0
    assert played[0] == played[1]
