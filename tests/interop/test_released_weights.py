"""Released files become a checkpoint with the same numbers, or are refused in one sentence.

The small files here are made with torch's own layers, which the released networks consist of.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor, nn

import m3pc.cli
import m3pc.interop.released_files
from m3pc.cli import authors
from m3pc.datasets.sandbox import SandboxLimits
from m3pc.interop.released_files import ReleasedPaths
from m3pc.interop.released_weights import import_released
from m3pc.model import checkpoint
from m3pc.model.checkpoint import Checkpoint
from m3pc.model.masks import MODALITIES
from m3pc.types import InputError
from tests.support.episodes.foreign_files import nothing_left, write_npz
from tests.support.episodes.shared_data import golden_file
from tests.support.models.their_names import renamed, stacked
from tests.support.runs.refusals import sentence

SIZES = {"states": 3, "actions": 2, "rewards": 1, "returns": 1}
WIDTH, HEADS, ENCODER, DECODER, WINDOW, EXPANSION = 12, 3, 2, 1, 6, 2
CRITIC_WIDTH, CRITIC_LAYERS = 5, 3
STEP = 140_010
LIMITS = SandboxLimits()

Tree = dict[str, Any]
Statistics = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Of the three files."""

    model: Tree
    critic: Tree
    stats: Statistics


def small() -> Contents:
    torch.manual_seed(0)
    model = {"model": network(), "optimizer": {}, "step": STEP, "eval_max": {}}
    return Contents(model=model, critic=critic(), stats=statistics(np.random.default_rng(0)))


def network() -> dict[str, Tensor]:
    return random_numbers(
        {
            **layers("encoder", ENCODER),
            **layers("decoder", DECODER),
            **{f"encoder_embed_dict.{k}": nn.Linear(n, WIDTH) for k, n in SIZES.items()},
            **{f"decoder_embed_dict.{k}": nn.Linear(WIDTH, WIDTH) for k in SIZES},
            **{f"output_head_dict.{k}": head(n) for k, n in SIZES.items() if k != "actions"},
            "output_head_dict.actions.mu": nn.Linear(WIDTH, SIZES["actions"]),
            "output_head_dict.actions.log_std": nn.Linear(WIDTH, SIZES["actions"]),
        }
    ) | {
        **{f"mask_token_dict.{k}": torch.randn(1, 1, WIDTH) for k in SIZES},
        **{f"encoder_per_dim_encoding.{k}": torch.randn(1, 1, 1, WIDTH) for k in SIZES},
        **{f"decoder_per_dim_encoding.{k}": torch.randn(1, 1, 1, WIDTH) for k in SIZES},
        "pos_embed": positions(),
    }


def layers(name: str, count: int) -> dict[str, nn.Module]:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, EXPANSION * WIDTH, norm_first=True)
    norm = nn.LayerNorm(WIDTH)
    return {name: nn.TransformerEncoder(layer, count, norm, enable_nested_tensor=False)}


def head(size: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, size)
    )


def positions() -> Tensor:
    angles = torch.arange(WINDOW)[:, None] * 10_000 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))
    return 0.5 * torch.cat([angles.sin(), angles.cos()], dim=1)[None, :, None]


def random_numbers(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}": torch.randn_like(tensor)
        for prefix, module in modules.items()
        for name, tensor in module.state_dict().items()
    }


def mlp(inputs: int) -> nn.Sequential:
    sizes = [inputs, *[CRITIC_WIDTH] * CRITIC_LAYERS]
    hidden = [
        part for width, more in pairwise(sizes) for part in (nn.Linear(width, more), nn.ReLU())
    ]
    return nn.Sequential(*hidden, nn.Linear(CRITIC_WIDTH, 1))


def critic() -> Tree:
    pair = SIZES["states"] + SIZES["actions"]

    def twins() -> dict[str, Tensor]:
        return random_numbers({"q1.net": mlp(pair), "q2.net": mlp(pair)})

    value = random_numbers({"v.net": mlp(SIZES["states"])})
    return {"q": twins(), "q_target": twins(), "v": value}


def statistics(rng: np.random.Generator) -> Statistics:
    means = {f"mean_{k}": rng.standard_normal(n).astype(np.float32) for k, n in SIZES.items()}
    stds = {f"std_{k}": rng.uniform(0.5, 2, n).astype(np.float32) for k, n in SIZES.items()}
    sizes = (SIZES["states"], SIZES["actions"], WIDTH, HEADS, ENCODER, DECODER, WINDOW)
    return means | stds | {"config": np.asarray(sizes)}


def write(folder: Path, given: Contents) -> ReleasedPaths:
    files = ReleasedPaths(
        model=folder / "btm.pt", critic=folder / "critic.pt", stats=folder / "stats.npz"
    )
    torch.save(given.model, files.model)
    torch.save(given.critic, files.critic)
    write_npz(files.stats, given.stats)
    return files


def imported(folder: Path, given: Contents, heads: int | None = None) -> Checkpoint:
    out = folder / "out"
    files = write(folder, given)
    import_released(files, out, heads=heads, env="Toy-v0", max_episode_steps=50, limits=LIMITS)
    return checkpoint.read(out)


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse files in this process: a child takes seconds to load torch."""

    def here(module: str, job: dict[str, Any], *rest: object) -> None:
        m3pc.interop.released_files.main(job)

    monkeypatch.setattr(m3pc.interop.released_files, "run_limited", here)


def command(*arguments: str | Path) -> int:
    """Exit code of `m3pc import-authors ...` or `m3pc verify ...`, run in this process."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("import-authors")(authors.import_authors)
    app.command("verify")(authors.verify)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(m3pc.cli, "app", app)
        patch.setattr("sys.argv", ["m3pc", *map(str, arguments)])
        m3pc.cli.main()
    return int(end.value.code or 0)


def command_line(files: ReleasedPaths, out: Path, *more: str) -> list[str | Path]:
    options = ("--critic", files.critic, "--stats", files.stats)
    return ["import-authors", files.model, *options, out, *more]


# Imported numbers


@pytest.mark.usefixtures("no_child")
def test_network_keeps_its_numbers_under_our_names(tmp_path: Path) -> None:
    given = small()
    weights = imported(tmp_path, given).weights
    theirs = given.model["model"]
    expected = renamed(theirs) | stacked(theirs)
    expected = {
        name: tensor
        for name, tensor in expected.items()
        if not name.startswith(("mask_token_dict", "encoder_per", "decoder_per", "pos_embed"))
    }
    state = weights.model().state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_sizes_come_from_the_shapes(tmp_path: Path) -> None:
    weights = imported(tmp_path, small()).weights
    model, value = weights.config.model, weights.config.critic
    assert (weights.state_size, weights.action_size) == (SIZES["states"], SIZES["actions"])
    assert (model.width, model.heads, model.window) == (WIDTH, HEADS, WINDOW)
    assert (model.encoder_layers, model.decoder_layers) == (ENCODER, DECODER)
    assert (model.expansion, model.action_head) == (EXPANSION, "linear")
    assert (value.width, value.layers) == (CRITIC_WIDTH, CRITIC_LAYERS)
    assert (weights.version, weights.max_episode_steps, weights.env) == (STEP, 50, "Toy-v0")


@pytest.mark.usefixtures("no_child")
def test_the_critic_values_states_like_the_released_one(tmp_path: Path) -> None:
    given = small()
    ours = imported(tmp_path, given).weights.critic()
    states, actions = torch.randn(7, SIZES["states"]), torch.randn(7, SIZES["actions"])
    mean, std = (torch.from_numpy(given.stats[f"{part}_states"]) for part in ("mean", "std"))
    scaled = (states - mean) / std
    pairs = torch.cat([scaled, actions], dim=1)
    torch.testing.assert_close(ours.value(states), answer(given.critic["v"], "v", scaled))
    both = torch.stack([answer(given.critic["q"], name, pairs) for name in ("q1", "q2")])
    torch.testing.assert_close(ours.q_values(states, actions), both)


def answer(state: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    net = mlp(x.shape[1])
    net.load_state_dict({k.removeprefix(f"{name}.net."): v for k, v in state.items() if name in k})
    output: Tensor = net(x)[:, 0].detach()
    return output


@pytest.mark.usefixtures("no_child")
def test_targets_are_stored_where_the_learner_reads_them(tmp_path: Path) -> None:
    given = small()
    training = imported(tmp_path, given).training
    layers = CRITIC_LAYERS + 1
    parts = [f"critic.target.{kind}{i}" for kind in ("weight", "bias") for i in range(layers)]
    assert sorted(training) == sorted(parts)
    second = given.critic["q_target"]["q2.net.2.weight"]
    assert torch.equal(training["critic.target.weight1"][1], second)


@pytest.mark.usefixtures("no_child")
def test_a_trainer_file_without_targets_starts_them_as_a_copy(tmp_path: Path) -> None:
    given = small()
    rates = {"lr": np.float64(1e-4), "best": np.float32(1), "updates": np.int64(3)}
    given.model.update({"optimizer": rates, "eval_max": {"eval/return": np.float64(3)}})
    files = {"qf": given.critic["q"], "vf": given.critic["v"], "total_it": 3, "actor": {}}
    result = imported(tmp_path, Contents(model=given.model, critic=files, stats=given.stats))
    target = result.training["critic.target.weight0"]
    assert torch.equal(target, result.weights.tensors["critic.q.weight0"])
    assert torch.equal(target[0], given.critic["q"]["q1.net.0.weight"])


@pytest.mark.usefixtures("no_child")
def test_the_normaliser_has_the_statistics(tmp_path: Path) -> None:
    given = small()
    given.stats["mean_rewards"] = given.stats["mean_rewards"].astype(np.float64)
    given.stats["std_rewards"] = given.stats["std_rewards"].reshape(())
    tensors = imported(tmp_path, given).weights.tensors
    for name in ("states", "rewards", "returns"):
        for part in ("mean", "std"):
            expected = given.stats[f"{part}_{name}"].reshape(-1)
            assert tensors[f"normaliser.{name}.{part}"].tolist() == expected.tolist()


@pytest.mark.usefixtures("no_child")
@pytest.mark.parametrize("known", [True, False])
def test_the_range_of_returns_is_known_or_guessed(
    known: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = small()
    mean, std = (float(given.stats[f"{part}_returns"][0]) for part in ("mean", "std"))
    low, high = (-7.0, 9.0) if known else (mean - 2 * std, mean + 2 * std)
    if known:
        given.stats.update(min_returns=np.asarray(low), max_returns=np.asarray([high]))
    out = tmp_path / "out"
    assert command(*command_line(write(tmp_path, given), out, "--horizon", "20")) == 0
    weights = checkpoint.read(out).weights
    assert weights.return_range.tolist() == pytest.approx([low, high])
    assert weights.envelope.tolist() == pytest.approx([high] * 20)
    assert ("2 standard deviations are used" in capsys.readouterr().out) is not known


@pytest.mark.usefixtures("no_child")
@pytest.mark.parametrize(
    ("recorded", "requested", "heads"), [(False, None, 4), (False, 6, 6), (True, 3, 3)]
)
def test_heads_come_from_the_statistics_or_the_option(
    recorded: bool, requested: int | None, heads: int, tmp_path: Path
) -> None:
    given = small()
    if not recorded:
        del given.stats["config"]
    assert imported(tmp_path, given, requested).weights.config.model.heads == heads


@pytest.mark.usefixtures("no_child")
def test_a_short_window_leaves_room_to_plan(tmp_path: Path) -> None:
    given = small()
    del given.stats["config"]
    given.model["model"]["pos_embed"] = positions()[:, :3]
    config = imported(tmp_path, given).weights.config
    assert (config.model.window, config.planner.horizon) == (3, 2)


def test_the_recorded_network_is_imported(tmp_path: Path) -> None:
    files = ReleasedPaths(
        model=golden_file("hopper_d64_btm.pt"),
        critic=golden_file("hopper_d64_critic.pt"),
        stats=golden_file("hopper_d64.npz"),
    )
    report = import_released(
        files, tmp_path / "out", heads=None, env=None, max_episode_steps=1000, limits=LIMITS
    )
    assert report.guessed == ("min_returns", "max_returns")
    assert report.shared_scales
    assert (report.weights.version, report.weights.config.model.width) == (140_000, 64)
    assert report.weights.return_range.tolist() == pytest.approx([0.2, 2.6])


@pytest.mark.usefixtures("no_child")
def test_a_critic_may_have_its_own_statistics(tmp_path: Path) -> None:
    given = small()
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    weights = imported(tmp_path / "shared", given).weights
    tensors = weights.tensors
    assert tensors["critic.state_std"].tolist() == tensors["normaliser.states.std"].tolist()
    size = weights.state_size
    given.stats["critic_mean_states"] = np.arange(size) + 0.5
    given.stats["critic_std_states"] = np.arange(size) + 1.5
    tensors = imported(tmp_path / "own", given).weights.tensors
    assert tensors["critic.state_mean"].tolist() == (np.arange(size) + 0.5).tolist()
    assert tensors["critic.state_std"].tolist() == (np.arange(size) + 1.5).tolist()
    assert tensors["normaliser.states.std"].tolist() != tensors["critic.state_std"].tolist()


# Refusals


def refusal(folder: Path, files: ReleasedPaths, heads: int | None = None) -> str:
    with nothing_left(folder), pytest.raises(InputError) as refused:
        import_released(
            files, folder / "out", heads=heads, env=None, max_episode_steps=9, limits=LIMITS
        )
    return sentence(refused)


def spoilt(part: str, name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Contents], None]:
    def spoil(given: Contents) -> None:
        state = given.model["model"] if part == "model" else given.critic[part]
        state[name] = change(state[name])

    return spoil


def lost(part: str, name: str) -> Callable[[Contents], None]:
    def spoil(given: Contents) -> None:
        (given.model["model"] if part == "model" else given.critic[part]).pop(name)

    return spoil


def put(name: str, value: Any) -> Callable[[Contents], None]:
    return lambda given: given.stats.update({name: np.asarray(value)})


QKV, EMBED = "decoder.layers.0.self_attn.in_proj_weight", "encoder_embed_dict.states.weight"
BAD: dict[str, tuple[Callable[[Contents], object], str]] = {
    "no model": (lambda g: g.model.pop("model"), "no state dict 'model'"),
    "no targets": (lambda g: g.critic.pop("q_target"), "no state dict 'q_target'"),
    "a number for a tensor": (
        lambda g: g.model["model"].update(x=3),
        "'x' of 'model' is no tensor",
    ),
    "a lost tensor": (lost("model", "decoder.norm.bias"), "decoder.norm.bias: missing"),
    "a lost size": (lost("model", EMBED), f"{EMBED} is missing"),
    "a lost bias": (lost("v", "v.net.2.bias"), "v.net.2.bias: missing"),
    "an unknown tensor": (
        lambda g: g.model["model"].update(images=torch.zeros(1)),
        "images: unknown",
    ),
    "another shape": (spoilt("model", QKV, lambda x: x[1:]), f"{QKV} is torch.float32 [35, 12]"),
    "a flat size": (spoilt("model", EMBED, torch.flatten), "expected 2 sizes"),
    "a critic of other states": (
        spoilt("q", "q1.net.0.weight", lambda x: x[:, 1:]),
        "q1.net.0.weight is torch.float32 [5, 4], expected float32 [5, 5]",
    ),
    "double precision": (spoilt("model", QKV, Tensor.double), f"{QKV} is torch.float64"),
    "NaN": (spoilt("model", QKV, lambda x: x * torch.nan), f"{QKV} holds NaN"),
    "Inf in a target": (
        spoilt("q_target", "q1.net.2.bias", lambda x: x / 0),
        "q1.net.2.bias holds NaN or Inf",
    ),
    "other positions": (spoilt("model", "pos_embed", lambda x: 2 * x), "not sines and cosines"),
    "no statistic": (lambda g: g.stats.pop("std_returns"), "std_returns: missing"),
    "a standard deviation of 0": (
        put("std_rewards", [0.0]),
        "std_rewards has numbers that are not above 0",
    ),
    "NaN in a mean": (put("mean_states", [0, 0, np.nan]), "mean_states holds NaN or Inf"),
    "a wide mean": (put("mean_states", np.zeros(4)), "mean_states is torch.float32 [4]"),
    "words": (put("mean_states", ["a", "b", "c"]), "mean_states is <U1, expected numbers"),
    "pickled objects": (put("mean_states", np.zeros(3, object)), "Object arrays cannot be"),
    "other sizes": (put("config", [3, 2, 12, 3, 1, 1, 6]), "but the weights are of"),
    "heads that do not divide": (put("config", [3, 2, 12, 5, 2, 1, 6]), "model.heads = 5"),
    "a lowest return above the highest": (put("max_returns", -100.0), "the returns are from"),
}


@pytest.mark.usefixtures("no_child")
@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name: str, tmp_path: Path) -> None:
    spoil, word = BAD[name]
    given = small()
    spoil(given)
    assert word in refusal(tmp_path, write(tmp_path, given))


@pytest.mark.usefixtures("no_child")
@pytest.mark.parametrize("part", ["model", "critic", "stats"])
def test_damaged_files_are_refused(part: str, tmp_path: Path) -> None:
    files = write(tmp_path, small())
    path: Path = getattr(files, part)
    original = path.read_bytes()
    for content in (original[:-200], original[:200], b"text", b""):
        path.write_bytes(content)
        assert f"{path.name} is not a" in refusal(tmp_path, files)


@pytest.mark.parametrize("name", ["no model", "another shape", "NaN", "truncated", "text"])
def test_a_refusal_is_one_sentence_and_exit_code_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = small()
    spoil, word = BAD.get(name, (lambda given: None, "btm.pt is not a file of tensors"))
    spoil(given)
    files = write(tmp_path, given)
    if name == "truncated":
        files.model.write_bytes(files.model.read_bytes()[:-200])
    elif name == "text":
        files.model.write_text("a text")
    with nothing_left(tmp_path):
        assert command(*command_line(files, tmp_path / "out")) == 2
    assert_one_sentence(capsys, word)


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("part", ["model", "critic"])
def test_code_in_a_file_is_never_run(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, marker = small(), tmp_path / "marker"
    getattr(given, part)["extra"] = Harm(marker)
    files = write(tmp_path, given)
    with nothing_left(tmp_path):
        assert command(*command_line(files, tmp_path / "out")) == 2
    assert_one_sentence(capsys, "mkdir, which is not done")
    torch.load(getattr(files, part), weights_only=False)  # it would have done harm
    assert marker.exists()


def assert_one_sentence(capsys: pytest.CaptureFixture[str], words: str) -> None:
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert "Traceback" not in shown.err
    assert len(shown.err.strip().splitlines()) == 1


@pytest.mark.usefixtures("no_child")
def test_a_tensor_that_claims_a_huge_size_is_refused(tmp_path: Path) -> None:
    given = small()
    given.model["model"]["pos_embed"] = torch.zeros(1).expand(1 << 40)
    assert "at most" in refusal(tmp_path, write(tmp_path, given))


@pytest.mark.usefixtures("no_child")
def test_heads_that_contradict_the_statistics_are_refused(tmp_path: Path) -> None:
    assert "--heads is 2, but config" in refusal(tmp_path, write(tmp_path, small()), heads=2)


@pytest.mark.usefixtures("no_child")
def test_a_missing_file_and_a_taken_name_are_refused_before_reading(tmp_path: Path) -> None:
    files = write(tmp_path, small())
    files.critic.unlink()
    assert "there is no file" in refusal(tmp_path, files)
    (tmp_path / "out").mkdir()
    assert "exists already" in refusal(tmp_path, files)


def test_modalities_are_the_released_ones() -> None:
    assert tuple(SIZES) == MODALITIES
