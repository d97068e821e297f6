"""What an environment changes in a preset, and that the command reports the change."""

from pathlib import Path

import numpy as np
import pytest

from m3pc.config.overrides import flatten
from m3pc.config.presets import ENVIRONMENTS, PRESETS, load, of_environment, resolve
from m3pc.types import Episode
from replay.format.manifest import Header
from replay.store.store import write_store
from tests.support.runs.commands import invoke
from tests.support.runs.small_run import set_options

LIFT = 'robosuite/Lift {"control_freq": 10}'


@pytest.mark.parametrize("preset", PRESETS)
def test_manipulation_takes_the_papers_expectile(preset: str) -> None:
    assert resolve(preset=preset, env=LIFT).critic.expectile == 0.9
    for other in ("d4rl/Hopper-v2", None):
        assert resolve(preset=preset, env=other) == PRESETS[preset]


def test_parity_counts_returns_as_the_history_did() -> None:
    assert of_environment(LIFT, "parity") == {
        "critic.expectile": 0.9,
        "returns.mode": "sum",
        "returns.discount": 0.99,
    }
    assert resolve(preset="small", env=LIFT).returns == PRESETS["small"].returns


def test_every_row_names_a_preset_and_a_field() -> None:
    for _, presets, path, _ in ENVIRONMENTS:
        assert set(presets) <= set(PRESETS)
        assert path in flatten(PRESETS["paper"])


def test_a_file_and_a_setting_win_over_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("preset: small\ncritic:\n  tau: 0.5\n")
    assert load(file, env=LIFT).critic.expectile == 0.9
    file.write_text("preset: small\ncritic:\n  expectile: 0.6\n")
    assert resolve(file=file, env=LIFT).critic.expectile == 0.6
    chosen = resolve(preset="small", env=LIFT, sets=["critic.expectile=0.8"])
    assert chosen.critic.expectile == 0.8


def lift_store(path: Path) -> Path:
    rng = np.random.default_rng(0)
    episodes = [
        Episode(
            states=rng.standard_normal((21, 3)).astype(np.float32),
            actions=rng.uniform(-1, 1, (20, 2)).astype(np.float32),
            rewards=np.eye(20, dtype=np.float32)[19],
            terminated=True,
            truncated=False,
        )
        for _ in range(6)
    ]
    header = Header(states=3, actions=2, max_episode_steps=40, env=LIFT, source={"kind": "test"})
    with write_store(path, header) as writer:
        for episode in episodes:
            writer.append(episode)
    return path


def test_the_preset_may_be_given_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = set_options(pretrain__updates=5, critic__regression_updates=1, critic__updates=1)
    lift_store(tmp_path / "lift")
    (tmp_path / "x.yaml").write_text("preset: parity\n")
    monkeypatch.chdir(tmp_path)
    done = invoke(capsys, monkeypatch, "pretrain", "--data", "lift", "--file", "x.yaml", *few)
    assert done.code == 0, done.errors
    for field in ("critic.expectile = 0.9", "returns.mode = sum", "returns.discount = 0.99"):
        assert f"{field}, as the data are of {LIFT}" in done.out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["lift-parity-seed0"]


@pytest.mark.parametrize(("expectile", "is_reported"), [("", True), ("0.8", False)])
def test_the_command_reports_the_change_and_the_run_keeps_it(
    expectile: str,
    is_reported: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = [f"--set=critic.expectile={expectile}"] if expectile else []
    few = set_options(pretrain__updates=5, critic__regression_updates=1, critic__updates=1)
    run = tmp_path / "run"
    arguments = ["--data", lift_store(tmp_path / "lift"), "--preset", "small", *few, *more]
    done = invoke(capsys, monkeypatch, "pretrain", *arguments, "--out", run)
    assert done.code == 0, done.errors
    assert (f"critic.expectile = 0.9, as the data are of {LIFT}" in done.out) == is_reported
    assert load(run / "config.yaml").critic.expectile == float(expectile or 0.9)
