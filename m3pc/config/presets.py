"""The three presets, what environments change in them, and how a run's settings are resolved.

`paper` is the default of every field; the table has what the others change.

parity  the behaviour of the authors' released code, with every quirk that changes a number
paper   the paper's text, and the code's value where the text is silent
small   small enough to train on two CPU cores in minutes
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from m3pc.config import strict_yaml
from m3pc.config.overrides import override, replace
from m3pc.config.schema import Config
from m3pc.config.strict_yaml import shown
from m3pc.types import InputError

FORMAT = 1  # version of the YAML that `dump` writes
DEFAULT_PRESET = "paper"
SAME: Final = object()  # as in `paper`

# fmt: off
TABLE: Mapping[str, tuple[object, object]] = {
    #                                   parity             small
    "model.width":                     (SAME,              64),
    "model.action_head":               ("linear",          "linear"),
    "model.dropout":                   (SAME,              0.0),  # random numbers are slow on CPUs
    "optimiser.clip":                  (SAME,              1.0),  # Adam forgets large ones slowly
    "pretrain.batch":                  (SAME,              128),
    "pretrain.updates":                (140_010,           8_000),
    "pretrain.warmup":                 (SAME,              200),
    "pretrain.lr":                     (SAME,              1e-3),
    "dataset.shuffle":                 (SAME,              True),  # replay data ends with its best
    "masks.groups":                    (SAME,              2),
    "masks.mixture.policy":            (SAME,              1.0),  # a third each, with random:
    "masks.mixture.dynamics":          (SAME,              1.0),  # planning uses these masks
    "loss.actions_over":               ("hidden",          "hidden"),
    "loss.visible_action_mse":         (True,              True),
    "entropy.per":                     ("dimension",       "dimension"),
    "entropy.target":                  (SAME,              -1.0),
    "loss.online":                     ("states+actions",  SAME),
    "entropy.alpha_online":            ("reset",           SAME),
    "normaliser.padded":               (True,              SAME),
    "normaliser.std_floor":            (0.1,               SAME),
    "normaliser.below_floor":          ("one",             SAME),
    "returns.include_now":             (False,             SAME),
    "planner.return_scale":            ("1000-steps",      SAME),
    "planner.discount_start":          (1,                 SAME),
    "planner.state_now":               ("reconstructed",   SAME),
    "planner.utility":                 (SAME,              "standardised"),
    "planner.m.inverse_temperature":   (0.01,              SAME),
    "planner.candidates":              (SAME,              64),
    "planner.q.spread":                (SAME,              0.5),  # at 1, plans leave narrow data
    "conditioning.exploration":        ("maximum",         SAME),
    "goal.fill":                       ("released",        SAME),
    "goal.first_visible":              ("waypoints",       SAME),
    "goal.waypoints":                  ("released",        SAME),
    "goal.spacing.walker2d":           (41,                SAME),
    "critic.regression_updates":       (SAME,              4_000),
    "critic.updates":                  (SAME,              10_000),
    "critic.tau":                      (1e-3,              SAME),
    # Finetuning: how fast and how long.
    "planner.mode":                    (SAME,              "m"),
    "online.updates_per_step":         (0.0,               0.1),
    "online.lr_end":                   (SAME,              0.05),  # a run ends in small steps
    "online.updates_per_episode":      (200,               SAME),
    "online.batch":                    (SAME,              128),
    "online.critic_updates":           (SAME,              4),
    "critic.online":                   (SAME,              "regression"),
    "online.steps":                    (SAME,              30_000),
    "evaluation.every":                (SAME,              5_000),
    "evaluation.episodes":             (SAME,              10),
}
# fmt: on


# What environments change: prefix of the environment's id, presets, field, value.
ALL: Final = ("parity", "paper", "small")
ENVIRONMENTS: Sequence[tuple[str, Sequence[str], str, object]] = (
    ("robosuite/", ALL, "critic.expectile", 0.9),  # rewards are rare
    ("robosuite/", ("parity",), "returns.mode", "sum"),
    ("robosuite/", ("parity",), "returns.discount", 0.99),
)


def _column(index: int) -> dict[str, object]:
    return {path: row[index] for path, row in TABLE.items() if row[index] is not SAME}


PAPER: Final = Config()
PRESETS: Mapping[str, Config] = MappingProxyType(
    {
        "parity": replace(PAPER, _column(0)),
        "paper": PAPER,
        "small": replace(PAPER, _column(1)),
    }
)


def resolve(
    *,
    preset: str | None = None,
    env: str | None = None,
    file: Path | str | None = None,
    sets: Sequence[str] = (),
) -> Config:
    """The settings of a run from a preset, what `env` changes in it, a file's fields, and
    `path=value` settings; later ones win."""
    if file is None:
        return override(_preset(preset or DEFAULT_PRESET, env), sets)
    return override(load(file, preset=preset, env=env), sets)


def of_environment(env: str | None, preset: str) -> dict[str, object]:
    """The fields that an environment changes in a preset."""
    return {
        path: value
        for prefix, presets, path, value in ENVIRONMENTS
        if env is not None and env.startswith(prefix) and preset in presets
    }


def load(path: Path | str, *, preset: str | None = None, env: str | None = None) -> Config:
    """The settings in a YAML file, which may name the `preset` that its fields change."""
    try:
        return _from_tree(strict_yaml.read(Path(path).read_text(encoding="utf-8")), preset, env)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"{path} cannot be read: {reason}; give a YAML file") from error


def dump(config: Config) -> str:
    """YAML with every field, in the order of the schema; `load` returns an equal Config."""
    tree = {"format": FORMAT, **config.model_dump()}
    return strict_yaml.write(tree)


def _preset(name: object, env: str | None = None) -> Config:
    if isinstance(name, str) and name in PRESETS:
        return replace(PRESETS[name], of_environment(env, name))
    raise InputError(f"preset is {shown(name)}; give one of {', '.join(PRESETS)}")


def _from_tree(tree: object, preset: str | None, env: str | None) -> Config:
    if not isinstance(tree, dict):
        raise InputError(f"found {shown(tree)}; give a mapping of sections to fields")
    written = tree.pop("format", FORMAT)
    if written != FORMAT:
        raise InputError(f"format is {shown(written)}; this version reads format {FORMAT}")
    name = tree.pop("preset", preset or DEFAULT_PRESET)
    base = _preset(name, env)
    if preset not in (None, name):
        raise InputError(
            f"preset is {shown(name)}, but {shown(preset)} is given with the command; change or"
            " remove one of them"
        )
    return replace(base, tree)
