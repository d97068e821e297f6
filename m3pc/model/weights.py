"""All that planning needs, as one object and as one file: what a learner publishes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from m3pc.config.schema import Config
from m3pc.config.strict_yaml import plain
from m3pc.core.returns import ReturnRule
from m3pc.model.btm import TrajectoryModel
from m3pc.model.critic import Critic
from m3pc.model.normalisation import Normaliser
from m3pc.types import Floats, InputError

M = TypeVar("M", bound=nn.Module)

SCALES = [f"{name}.{part}" for name in ("states", "rewards", "returns") for part in ("mean", "std")]

FORMAT = 1  # file format
SETTINGS = "m3pc"  # key of the settings in the file's header
MAX_FILE, MAX_HEADER = 8 << 30, 1 << 20  # bytes
KINDS = {  # types of the fields, by their names in files
    "version": int,
    "state_size": int,
    "action_size": int,
    "horizon": int,
    "env": str | None,
    "config": dict,
}
FIELDS = {name: name for name in KINDS if name != "config"} | {"horizon": "max_episode_steps"}


class TensorsError(InputError):
    """Tensors that are missing, unknown, or of another shape or type than the settings say."""


class NumbersError(InputError):
    """Tensors with impossible numbers: NaN, Inf, or a std that is not above 0."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Model, critic, normaliser, return envelope and step limit that belong together."""

    version: int  # Version.packed; in checkpoints the epoch is 0, so it is the number of updates
    config: Config
    state_size: int
    action_size: int
    max_episode_steps: int  # H, the environment's step limit
    env: str | None  # the environment of the data
    tensors: Mapping[str, Tensor]  # model.*, critic.*, normaliser.*, envelope [H], return_range [2]

    def __post_init__(self) -> None:
        """Refuse tensors that are missing, unknown, of another shape or hold impossible numbers."""
        expected = self._shapes()
        missing, unknown = (
            sorted(set(expected) - set(self.tensors)),
            sorted(set(self.tensors) - set(expected)),
        )
        if missing or unknown:
            raise TensorsError(f"weights lack {missing[:3]} and have unknown {unknown[:3]}")
        for name, tensor in self.tensors.items():
            if tensor.shape != expected[name] or tensor.dtype != torch.float32:
                raise TensorsError(
                    f"weights: {name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"expected float32 {list(expected[name])}"
                )
            if not tensor.isfinite().all():
                raise NumbersError(f"weights: {name} holds NaN or Inf")
            if name.endswith((".std", ".state_std")) and not (tensor > 0).all():
                raise NumbersError(f"weights: {name} holds numbers that are not above 0")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of every tensor's name and numbers, without the settings."""
        return tensors_digest(self.tensors)

    def model(self, device: str = "cpu") -> TrajectoryModel:
        """A trajectory model with these weights, in evaluation mode."""
        model = TrajectoryModel(self.config.model, self.state_size, self.action_size)
        return _load(model, with_prefix(self.tensors, "model."), device)

    def critic(self, device: str = "cpu") -> Critic:
        critic = Critic(self.config.critic, self.state_size, self.action_size)
        return _load(critic, with_prefix(self.tensors, "critic."), device)

    def normaliser(self, device: str = "cpu") -> Normaliser:
        arrays = {name: x.numpy() for name, x in with_prefix(self.tensors, "normaliser.").items()}
        return Normaliser.from_arrays(arrays, device)

    @property
    def envelope(self) -> Floats:
        """Best return-to-go of the data at each step, the source of target returns: [H]."""
        return np.asarray(self.tensors["envelope"])

    @property
    def return_range(self) -> Floats:
        return np.asarray(self.tensors["return_range"])

    @property
    def return_rule(self) -> ReturnRule:
        return ReturnRule.of(self.config.returns, self.max_episode_steps)

    @property
    def best_return(self) -> float | None:
        """Best sum of rewards of an episode in the data; None where returns do not determine it."""
        scale = float(self.return_rule.scale(np.zeros(1, np.int64))[0])
        return float(self.envelope[0]) / scale if scale else None

    def _shapes(self) -> dict[str, torch.Size]:
        with torch.device("meta"):
            parts: dict[str, nn.Module] = {
                "model": TrajectoryModel(self.config.model, self.state_size, self.action_size),
                "critic": Critic(self.config.critic, self.state_size, self.action_size),
            }
        shapes = {
            f"{owner}.{name}": tensor.shape
            for owner, module in parts.items()
            for name, tensor in module.state_dict().items()
        }
        sizes = {"states": self.state_size}
        scales = {f"normaliser.{n}": torch.Size([sizes.get(n.split(".")[0], 1)]) for n in SCALES}
        rest = {"envelope": torch.Size([self.max_episode_steps]), "return_range": torch.Size([2])}
        return shapes | scales | rest


def description(weights: Weights) -> dict[str, Any]:
    """Everything but the tensors, for JSON."""
    return {
        **{name: getattr(weights, field) for name, field in FIELDS.items()},
        "digest": weights.digest,
        "config": weights.config.model_dump(mode="json"),
    }


def check_description(fields: Mapping[str, Any]) -> None:
    """Refuse types and sizes that `description` never gives."""
    for name, kind in KINDS.items():
        value = fields.get(name, ...)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f"{name} is {fields.get(name)!r}, expected {kind}")
    if not (0 < fields["state_size"] <= 1 << 20 and 0 < fields["action_size"] <= 1 << 20):
        raise InputError("sizes of states and actions are not sensible")
    if not (0 < fields["horizon"] <= 1 << 31 and 0 <= fields["version"] < 1 << 63):
        raise InputError("step limit or version is not sensible")


def weights_from_description(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> Weights:
    """The weights of a checked description; `where` names its source in error messages."""
    try:
        config = Config.model_validate_json(json.dumps(description["config"]))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(plain(str(part)) for part in first["loc"])
        raise InputError(f"the settings in {where}: {field}: {first['msg']}") from None
    return Weights(
        config=config,
        tensors=tensors,
        **{field: description[name] for name, field in FIELDS.items()},
    )


def checksum(fields: Mapping[str, Any]) -> str:
    """SHA-256 of all fields except `check`, which holds it; independent of their formatting."""
    others = {name: value for name, value in fields.items() if name != "check"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def to_bytes(weights: Weights) -> bytes:
    """One safetensors file with the settings in its metadata; equal weights give equal bytes."""
    settings = {"format": FORMAT, **description(weights)}
    settings["check"] = checksum(settings)
    tensors = {name: tensor.contiguous() for name, tensor in weights.tensors.items()}
    return save(tensors, {SETTINGS: json.dumps(settings, sort_keys=True)})


def from_bytes(content: bytes) -> Weights:
    """Read what `to_bytes` wrote; an InputError if any byte was changed."""
    settings = _settings(content)
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"weights are not readable as safetensors: {error}") from None
    weights = weights_from_description(settings, tensors, "their header")
    if weights.digest != settings.get("digest"):
        raise InputError("weights were changed: their own hash differs; publish them again")
    return weights


def _settings(content: bytes) -> dict[str, Any]:
    """The settings in a safetensors header, which is its length in 8 bytes and then JSON."""
    length = int.from_bytes(content[:8], "little")
    if not 8 + length <= len(content) <= MAX_FILE or length > MAX_HEADER:
        raise InputError(
            f"weights have {len(content)} bytes with a header of {length}; expected at most "
            f"{MAX_FILE} and {MAX_HEADER}"
        )
    try:
        settings: Any = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][SETTINGS])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError("weights have no settings of m3pc in their header") from None
    if not isinstance(settings, dict) or settings.get("format") != FORMAT:
        raise InputError(f"weights have another format; this version reads format {FORMAT}")
    if settings.get("check") != checksum(settings):
        raise InputError("weights were changed: the settings differ from their own checksum")
    check_description(settings)
    checked: dict[str, Any] = settings
    return checked


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, under names without it."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def gather_tensors(
    model: TrajectoryModel,
    critic: Critic,
    *,
    arrays: Mapping[str, Floats],
    envelope: Floats,
    return_range: Floats,
) -> dict[str, Tensor]:
    """The tensors of Weights, copied from modules that are being trained."""
    named = {
        **{f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        **{f"critic.{name}": tensor for name, tensor in critic.state_dict().items()},
        **{f"normaliser.{name}": torch.from_numpy(array) for name, array in arrays.items()},
        "envelope": torch.from_numpy(envelope),
        "return_range": torch.from_numpy(return_range),
    }
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named.items()}


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _load(module: M, state: Mapping[str, Tensor], device: str) -> M:
    module.load_state_dict(dict(state))
    return module.to(device).eval()
