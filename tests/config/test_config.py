"""The configuration: presets, files, settings by path, and what a mistake is answered with."""

import json
import math
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from m3pc.cli.config import app
from m3pc.config.overrides import flatten, override, replace, settings
from m3pc.config.presets import PRESETS, TABLE, dump, load, resolve
from m3pc.config.schema import REMOVED, Config
from m3pc.types import InputError

UNTIMED = hypothesis.settings(deadline=None)
FEW = hypothesis.settings(deadline=None, max_examples=25)  # a dump takes tens of milliseconds

# fmt: off
SWITCHES = {  # every choice between the released code, the paper and small machines
    #                                  parity            paper         small
    "model.width":                    (512,              512,          64),
    "model.heads":                    (4,                4,            4),
    "model.encoder_layers":           (2,                2,            2),
    "model.decoder_layers":           (1,                1,            1),
    "model.action_head":              ("linear",         "two-layer",  "linear"),
    "model.state_tokens":             ("state",          "state",      "state"),
    "model.state_head":               ("absolute",       "absolute",   "absolute"),
    "pretrain.batch":                 (2048,             2048,         128),
    "pretrain.updates":               (140_010,          140_000,      8_000),
    "pretrain.warmup":                (40_000,           40_000,       200),
    "pretrain.lr":                    (1e-4,             1e-4,         1e-3),
    "masks.mixture.random":           (1.0,              1.0,          1.0),
    "masks.mixture.policy":           (0.0,              0.0,          1.0),
    "masks.mixture.dynamics":         (0.0,              0.0,          1.0),
    "masks.groups":                   (1,                1,            2),
    "model.dropout":                  (0.1,              0.1,          0.0),
    "optimiser.clip":                 (0.0,              0.0,          1.0),
    "dataset.shuffle":                (False,            False,        True),
    "loss.actions_over":              ("hidden",         "all",        "hidden"),
    "loss.visible_action_mse":        (True,             False,        True),
    "entropy.per":                    ("dimension",      "joint",      "dimension"),
    "entropy.target":                 (-3.0,             -3.0,         -1.0),
    "loss.online":                    ("states+actions", "all",        "all"),
    "entropy.alpha":                  (0.1,              0.1,          0.1),
    "entropy.alpha_online":           ("reset",          "keep",       "keep"),
    "normaliser.padded":              (True,             False,        False),
    "normaliser.std_floor":           (0.1,              1e-3,         1e-3),
    "normaliser.below_floor":         ("one",            "floor",      "floor"),
    "returns.mode":                   ("average",        "average",    "average"),
    "returns.include_now":            (False,            True,         True),
    "planner.return_scale":           ("1000-steps",     "remaining",  "remaining"),
    "planner.discount_start":         (1,                0,            0),
    "planner.state_now":              ("reconstructed",  "observed",   "observed"),
    "planner.utility":                ("raw",            "raw",        "standardised"),
    "planner.q.inverse_temperature":  (1.0,              1.0,          1.0),
    "planner.m.inverse_temperature":  (0.01,             1.0,          1.0),
    "planner.candidates":             (625,              625,          64),
    "online.updates_per_step":        (0.0,              0.2,          0.1),
    "online.lr_end":                  (1.0,              1.0,          0.05),
    "planner.lam":                    (0.6,              0.6,          0.6),
    "planner.discount":               (0.99,             0.99,         0.99),
    "planner.m.spread":               (1.0,              1.0,          1.0),
    "planner.q.spread":               (1.0,              1.0,          0.5),
    "conditioning.evaluation":        ("envelope",       "envelope",   "envelope"),
    "conditioning.evaluation_ratio":  (1.0,              1.0,          1.0),
    "conditioning.exploration":       ("maximum",        "envelope",   "envelope"),
    "goal.fill":                      ("released",       "between",    "between"),
    "goal.first_visible":             ("waypoints",      "goal",       "goal"),
    "goal.waypoints":                 ("released",       "paper",      "paper"),
    "goal.spacing.walker2d":          (41,               30,           30),
    "critic.regression_updates":      (0,                0,            4_000),
    "critic.updates":                 (1_000_000,        1_000_000,    10_000),
    "critic.terminals":               (True,             True,         True),
    "critic.tau":                     (0.001,            0.005,        0.005),
    "critic.online":                  ("iql",            "iql",        "regression"),
    "online.critic_updates":          (10,               10,           4),
}
# fmt: on


@pytest.mark.parametrize("path", SWITCHES)
def test_each_switch_has_its_value_in_each_preset(path: str) -> None:
    assert (
        tuple(flatten(PRESETS[name])[path] for name in ("parity", "paper", "small"))
        == (SWITCHES[path])
    )


def test_the_table_of_presets_holds_only_what_differs_from_paper() -> None:
    flat = {name: flatten(config) for name, config in PRESETS.items()}
    differing = {
        path
        for path in settings()
        if not flat["parity"][path] == flat["paper"][path] == flat["small"][path]
    }
    assert set(TABLE) == differing


def test_the_context_is_what_the_horizon_leaves_of_the_window() -> None:
    assert resolve(sets=["planner.horizon=3"]).context == 5


def test_every_field_has_a_description_and_allowed_values() -> None:
    for setting in settings().values():
        assert setting.allowed and setting.meaning.endswith("."), setting.path
    assert set(settings()) == set(_paths(Config().model_dump()))


def test_a_config_is_immutable() -> None:
    with pytest.raises(ValidationError):
        Config().planner.lam = 0.5


@pytest.mark.parametrize("name", PRESETS)
def test_a_dumped_preset_reads_back_as_it_was(name: str, tmp_path: Path) -> None:
    assert load(_file(tmp_path, dump(PRESETS[name]))) == PRESETS[name]


@FEW
@given(
    st.floats(1e-300, 1, exclude_min=True), st.lists(st.floats(0.125, 1), min_size=1, max_size=9)
)
def test_every_float_survives_writing_and_reading(rate: float, ratios: list[float]) -> None:
    config = replace(Config(), {"pretrain.lr": rate, "masks.keep_ratios": tuple(ratios)})
    text = dump(config)
    tree = yaml.safe_load(text)  # other tools see the same numbers
    assert tree["pretrain"]["lr"] == rate
    assert tree["masks"]["keep_ratios"] == ratios
    again = override(Config(), [f"pretrain.lr={rate}", f"masks.keep_ratios={ratios}"])
    assert dump(again) == text


def test_a_file_names_its_preset_and_only_what_differs(tmp_path: Path) -> None:
    file = _file(tmp_path, "preset: small\nplanner:\n  q: {spread: 0.25}\nseed: 3\n")
    expected = replace(PRESETS["small"], {"planner.q.spread": 0.25, "seed": 3})
    assert load(file) == expected


def test_settings_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    file = _file(tmp_path, "planner: {lam: 0.1, horizon: 2}")
    config = resolve(preset="small", file=file, sets=["planner.lam=0.2", "planner.lam=0.3"])
    assert (config.planner.lam, config.planner.horizon, config.planner.candidates) == (0.3, 2, 64)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("planner.candidates=256", "planner.candidates", 256),
        ("pretrain.updates=1_000_000", "pretrain.updates", 1_000_000),
        ("loss.visible_action_mse=true", "loss.visible_action_mse", True),
        ("pretrain.lr=1e-3", "pretrain.lr", 0.001),
        ("planner.lam=1", "planner.lam", 1.0),
        ("entropy.target=-.5", "entropy.target", -0.5),
        ("masks.keep_ratios=[0.5, 1.0]", "masks.keep_ratios", (0.5, 1.0)),
        ("planner.mode='q0'", "planner.mode", "q0"),
        (" planner.mode = m ", "planner.mode", "m"),
        ("planner.q={spread: 0.25}", "planner.q.spread", 0.25),
    ],
)
def test_a_setting_is_read_as_yaml(text: str, path: str, value: object) -> None:
    changed = flatten(override(Config(), [text]))[path]
    assert (changed, type(changed)) == (value, type(value))


def test_settings_are_checked_together_not_one_by_one() -> None:
    assert override(Config(), ["model.width=66", "model.heads=3"]).model.width == 66


WRONG = [
    ("model.width=abc", "model.width is 'abc'; give an integer from 2 to 16384"),
    ("model.width=true", "model.width is true; give an integer from 2 to 16384"),
    ("model.width='64'", "model.width is '64'; give an integer from 2 to 16384"),
    ("model.width=64.0", "model.width is 64.0; give an integer from 2 to 16384"),
    ("planner.lam=1.4", "planner.lam is 1.4; give a number from 0 to 1"),
    ("planner.lam=.nan", "planner.lam is nan; give a number from 0 to 1"),
    ("planner.lam=", "planner.lam is null; give a number from 0 to 1"),
    ("planner.lam={a: 1}", "planner.lam is a mapping; give a number from 0 to 1"),
    ("pretrain.lr=0", "pretrain.lr is 0; give a number above 0 and at most 1"),
    ("critic.terminals=yes", "critic.terminals is 'yes'; give true or false"),
    ("goal.fill=all", "goal.fill is 'all'; give one of between, released"),
    ("masks.keep_ratios=[0.5, 2]", "masks.keep_ratios is [0.5, 2]; give a list of 1 to 64, each"),
    ("masks.keep_ratios=[]", "masks.keep_ratios is []; give a list of 1 to 64, each"),
    ("masks.keep_ratios=0.5", "masks.keep_ratios is 0.5; give a list of 1 to 64, each"),
    ("planner=3", "planner is 3; give a mapping of mode, horizon, candidates"),
    ("planner.candidate=3", "planner.candidate is not a field; the closest are planner.candidates"),
    ("planer.lam=3", "planer.lam is not a field; the closest are planner.lam"),
    ("planner.q.spred=3", "planner.q.spred is not a field; the closest are planner.q.spread"),
    ("lr=3", "lr is not a field; the closest are pretrain.lr, critic.lr, online.lr"),
    ("zzz=3", "zzz is not a field; none comes close"),
    ("planner.lam.x=3", "planner.lam.x is not a field"),
    ("planner.lam=[", "planner.lam is '[': not YAML that can be read"),
    ("planner.lam={a: 1, a: 2}", "a is given twice"),
    ("planner.lam=!!python/name:os.system", "aliases and tags are not read"),
    ("planner.lam=" + "[" * 500 + "]" * 500, "nested too deeply"),
    ("planner.lam=" + "9" * 5000, "planner.lam is inf; give a number from 0 to 1"),
    ("planner.lam", "'planner.lam' is not a setting; give a field and a value, a.b=c"),
    ("=1", "'=1' is not a setting; give a field and a value, a.b=c"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text[:40] for text, _ in WRONG])
def test_a_wrong_setting_is_answered_with_the_field_the_value_and_the_range(
    text: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        override(Config(), [text])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


CONFLICTS = [
    ("model.heads=3", "model.width is 512, not a multiple of model.heads = 3"),
    ("model={width: 33, heads: 3}", "model.width is 33; give an even number"),
    ("model.log_sigma_min=2", "model.log_sigma_min is 2.0; give less than model.log_sigma_max"),
    ("planner.horizon=8", "planner.horizon is 8; give less than model.window = 8"),
    ("masks.keep_ratios=[0.1, 1]", "masks.keep_ratios has 0.1, which keeps none of model.window"),
    ("masks.mixture.random=0", "masks.mixture has no weight above 0"),
    (
        "masks.pivot={states: 0, returns: 0, actions: 0, rewards: 0}",
        "masks.pivot has no weight above 0",
    ),
    (
        "loss.weights={states: 0, returns: 0, actions: 0, rewards: 0}",
        "loss.weights has no weight above 0",
    ),
    ("pretrain.warmup=140001", "pretrain.warmup is 140001; give at most pretrain.updates"),
    (
        "masks.groups=600",
        "masks.groups is 600; give at most pretrain.batch = 2048 and online.batch",
    ),
    ("model.window=16", "dataset.min_length is 8; give at least model.window = 16"),
    ("returns.discount=0.9", "returns.discount is 0.9; give 1, or set returns.mode to sum"),
    (
        "online.updates_per_step=0",
        "online.updates_per_step is 0; give more, or set online.updates_",
    ),
    (
        "online={lr_end: 0.5, updates_per_episode: 200}",
        "online.lr_end is 0.5; give 1, or set online.updates_per_episode to 0",
    ),
    ("replay.online_transitions=10", "replay.online_after is 5000; give at most replay.online_tr"),
    (
        "fleet={queue: 2, envs_per_actor: 5}",
        "fleet.queue is 2; give at least 3: one request plans for half of",
    ),
]


@pytest.mark.parametrize(("text", "message"), CONFLICTS, ids=[text for text, _ in CONFLICTS])
def test_fields_that_contradict_each_other_are_named(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        override(Config(), [text])
    assert message in str(caught.value)


def test_a_queue_may_be_as_short_as_the_larger_half_of_an_actors_environments() -> None:
    assert override(Config(), ["fleet={queue: 3, envs_per_actor: 5}"]).fleet.queue == 3
    assert override(Config(), ["fleet={queue: 1, envs_per_actor: 2}"]).fleet.queue == 1


@UNTIMED
@given(st.sampled_from(sorted(settings())), st.text(max_size=20))
def test_any_text_for_a_field_gives_a_config_or_an_error_that_names_it(
    path: str, text: str
) -> None:
    _accepted_or_named(path, text)


@pytest.mark.parametrize("path", sorted(settings()))
def test_common_values_for_a_field_do_the_same(path: str) -> None:
    for text in ("0", "1", "2", "-1", "1000000000", "0.0", "0.5", "1e-9", "true", "[]", "null"):
        _accepted_or_named(path, text)


@UNTIMED
@given(
    st.sampled_from(sorted(settings())),
    st.one_of(
        st.integers().map(str),
        st.floats().map(str),
        st.booleans().map(str),
        st.lists(st.floats(0, 2)).map(str),
        st.text("0123456789.eE+-_[]{}, :~'\"#&*!|>%@`", max_size=12),
    ),
)
def test_numbers_and_signs_for_a_field_do_the_same(path: str, text: str) -> None:
    _accepted_or_named(path, text)


def _accepted_or_named(path: str, text: str) -> None:
    try:
        config = override(Config(), [f"{path}={text}"])
    except InputError as error:
        assert path in str(error)
    else:
        value = flatten(config)[path]
        assert not isinstance(value, float) or math.isfinite(value)


@UNTIMED
@given(st.text(max_size=40))
def test_any_text_for_a_whole_setting_gives_a_config_or_an_input_error(text: str) -> None:
    try:
        assert isinstance(override(Config(), [text]), Config)
    except InputError as error:
        assert "\n" not in str(error)


FILES = [
    ("", "found null; give a mapping of sections to fields"),
    ("- 1", "found [1]; give a mapping of sections to fields"),
    ("planner: {lam: 0.1}\nplanner: {lam: 0.2}", "planner is given twice, again in line 2"),
    ("planner:\n  lam: 0.1\n  lam: 0.2", "planner.lam is given twice, again in line 3"),
    ("planner.lam: 0.1", "planner.lam in line 1 is not one name; put a field under its section"),
    ("planner: {lamb: 0.1}", "planner.lamb is not a field; the closest are planner.lam"),
    ("planer: {lam: 0.1}", "planer is not a field; the closest are planner"),
    ("planner: {lam: 2}", "planner.lam is 2; give a number from 0 to 1"),
    ("planner:", "planner is null; give a mapping of mode"),
    ("preset: smal", "preset is 'smal'; give one of parity, paper, small"),
    ("preset: [small]", "preset is ['small']; give one of parity, paper, small"),
    ("format: 2", "format is 2; this version reads format 1"),
    ("model: &m {width: 64}\ncritic: *m", "aliases and tags are not read"),
    ("model: [", "not YAML that can be read"),
    ("{[1]: 2}", "is not one name"),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_wrong_file_is_answered_with_its_name_and_the_fault(
    text: str, message: str, tmp_path: Path
) -> None:
    file = _file(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load(file)
    assert f"{file}: " in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="it is not UTF-8 text"):
        load(tmp_path / "binary.yaml")


def test_an_unknown_preset_is_answered_with_those_that_exist() -> None:
    with pytest.raises(InputError, match="preset is 'tiny'; give one of parity, paper, small"):
        resolve(preset="tiny")


OLD = "evaluation: {every: 7, seeds: 5}\nconditioning: {rcbc_ratios: [0.9, 1.0]}\n"


def test_settings_of_earlier_versions_are_read_with_one_warning_each(tmp_path: Path) -> None:
    file, sets = _file(tmp_path, OLD), ["--set", "evaluation.seeds=3"]
    show = [sys.executable, "-m", "m3pc", "config", "show", "--file", str(file), *sets]
    result = subprocess.run(show, capture_output=True, text=True, check=True)
    expected = replace(Config(), {"evaluation.every": 7})
    assert load(_file(tmp_path, result.stdout)) == expected
    for path in REMOVED:
        warning = f'event=removed-setting setting={path} detail="it has no effect; remove it"'
        assert result.stderr.splitlines().count(warning) == 1
    assert len(result.stderr.splitlines()) == len(REMOVED)


def test_settings_of_earlier_versions_in_weights_are_ignored() -> None:
    tree = json.loads(Config().model_dump_json())
    tree["evaluation"]["seeds"], tree["conditioning"]["rcbc_ratios"] = 5, [0.9]
    assert Config.model_validate_json(json.dumps(tree)) == Config()


@pytest.mark.parametrize("path", ["evaluation.seed", "conditioning.rcbc_ratio", "goal.seeds"])
def test_other_unknown_settings_stay_refused(path: str) -> None:
    section, _, name = path.partition(".")
    with pytest.raises(InputError, match=f"{path} is not a field"):
        override(Config(), [f"{path}=1"])
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Config.model_validate({section: {name: 1}})


def test_a_file_made_for_another_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="preset is 'parity', but 'small' is given with the"):
        resolve(preset="small", file=_file(tmp_path, "preset: parity"))


def test_the_output_of_show_can_be_loaded_again(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["show", "--preset", "small", "--set", "planner.lam=0.5"])
    assert result.exit_code == 0
    assert load(_file(tmp_path, result.stdout)) == replace(PRESETS["small"], {"planner.lam": 0.5})


def test_show_takes_a_file(tmp_path: Path) -> None:
    file = _file(tmp_path, "preset: parity\nseed: 7\n")
    result = CliRunner().invoke(app, ["show", "--file", str(file)])
    assert yaml.safe_load(result.stdout)["seed"] == 7


def test_diff_lists_only_the_fields_that_differ() -> None:
    result = CliRunner().invoke(app, ["diff", "parity", "paper"])
    assert result.exit_code == 0
    assert "critic.tau" in result.stdout
    assert "planner.lam" not in result.stdout


def test_a_mistake_on_the_command_line_is_an_input_error() -> None:
    result = CliRunner().invoke(app, ["diff", "parity", "papr"])
    assert isinstance(result.exception, InputError)


def test_fields_lists_every_field() -> None:
    result = CliRunner().invoke(app, ["fields"])
    assert result.exit_code == 0
    assert [path for path in settings() if path not in result.stdout] == []


def _file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _paths(tree: dict[str, object], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        paths += _paths(value, f"{path}.") if isinstance(value, dict) else [path]
    return paths
