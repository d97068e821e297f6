"""All that a plan needs, as one object: what a learner publishes, and as one file."""

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

FORMAT = 1  # of the one file
SETTINGS = "m3pc"  # where its settings stand
LARGEST_FILE, LARGEST_HEADER = 8 << 30, 1 << 20  # bytes
KINDS = {  # by the name of the field in files
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
    """Tensors with numbers that cannot be."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Model, critic, normaliser, return envelope and step limit that belong together."""

    version: int  # updates behind the model and the critic
    config: Config
    state_size: int
    action_size: int
    max_episode_steps: int  # H, the environment's step limit
    env: str | None  # what the data came from
    tensors: Mapping[str, Tensor]  # model.*, critic.*, normaliser.*, envelope [H], return_range [2]

    def __post_init__(self) -> None:
        """Refuse tensors that are missing, unknown, of another shape, not finite or no scale."""
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
        """SHA-256 of every tensor's name and numbers; the settings are not in it."""
        return tensors_digest(self.tensors)

    def model(self, device: str = "cpu") -> TrajectoryModel:
        """The trajectory model, ready to predict."""
        model = TrajectoryModel(self.config.model, self.state_size, self.action_size)
        return _filled(model, part(self.tensors, "model."), device)

    def critic(self, device: str = "cpu") -> Critic:
        critic = Critic(self.config.critic, self.state_size, self.action_size)
        return _filled(critic, part(self.tensors, "critic."), device)

    def normaliser(self, device: str = "cpu") -> Normaliser:
        arrays = {name: x.numpy() for name, x in part(self.tensors, "normaliser.").items()}
        return Normaliser.from_arrays(arrays, device)

    @property
    def envelope(self) -> Floats:
        """Best return at each step: what a policy is asked for. [H]"""
        return np.asarray(self.tensors["envelope"])

    @property
    def return_range(self) -> Floats:
        return np.asarray(self.tensors["return_range"])

    @property
    def return_rule(self) -> ReturnRule:
        return ReturnRule.of(self.config.returns, self.max_episode_steps)

    @property
    def best_return(self) -> float | None:
        """Of an episode in the data, as a sum of rewards; None where returns do not tell."""
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


def described(weights: Weights) -> dict[str, Any]:
    """All but the tensors, for JSON."""
    return {
        **{name: getattr(weights, field) for name, field in FIELDS.items()},
        "digest": weights.digest,
        "config": weights.config.model_dump(mode="json"),
    }


def check_description(found: Mapping[str, Any]) -> None:
    """Refuse fields of another kind or size than any that `described` gives."""
    for name, kind in KINDS.items():
        given = found.get(name, ...)
        if not isinstance(given, kind) or isinstance(given, bool):
            raise InputError(f"{name} is {found.get(name)!r}, expected {kind}")
    if not (0 < found["state_size"] <= 1 << 20 and 0 < found["action_size"] <= 1 << 20):
        raise InputError("sizes of states and actions are not sensible")
    if not (0 < found["horizon"] <= 1 << 31 and 0 <= found["version"] < 1 << 63):
        raise InputError("step limit or version is not sensible")


def restored(description: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Weights:
    """The weights of a description that was checked; `where` it was found."""
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


def check_sum(fields: Mapping[str, Any]) -> str:
    """SHA-256 of all fields but the one that holds it, however they are written."""
    others = {name: value for name, value in fields.items() if name != "check"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def to_bytes(weights: Weights) -> bytes:
    """One safetensors file with the settings in its metadata; the same weights, the same bytes."""
    settings = {"format": FORMAT, **described(weights)}
    settings["check"] = check_sum(settings)
    tensors = {name: tensor.contiguous() for name, tensor in weights.tensors.items()}
    return save(tensors, {SETTINGS: json.dumps(settings, sort_keys=True)})


def from_bytes(content: bytes) -> Weights:
    """What `to_bytes` wrote, or an InputError: every number in it is checked."""
    settings = _settings(content)
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"weights are not readable as safetensors: {error}") from None
    weights = restored(settings, tensors, "their header")
    if weights.digest != settings.get("digest"):
        raise InputError("weights were changed: their own hash differs; publish them again")
    return weights


def _settings(content: bytes) -> dict[str, Any]:
    """From a safetensors header: its length in 8 bytes, then JSON."""
    length = int.from_bytes(content[:8], "little")
    if not 8 + length <= len(content) <= LARGEST_FILE or length > LARGEST_HEADER:
        raise InputError(
            f"weights have {len(content)} bytes with a header of {length}; expected at most "
            f"{LARGEST_FILE} and {LARGEST_HEADER}"
        )
    try:
        found: Any = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][SETTINGS])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError("weights have no settings of m3pc in their header") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(f"weights have another format; this version reads format {FORMAT}")
    if found.get("check") != check_sum(found):
        raise InputError("weights were changed: the settings differ from their own checksum")
    check_description(found)
    checked: dict[str, Any] = found
    return checked


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def gather(
    model: TrajectoryModel,
    critic: Critic,
    *,
    arrays: Mapping[str, Floats],
    envelope: Floats,
    return_range: Floats,
) -> dict[str, Tensor]:
    """The tensors of Weights, copied out of what is being trained."""
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


def _filled(module: M, state: Mapping[str, Tensor], device: str) -> M:
    module.load_state_dict(dict(state))
    return module.to(device).eval()
