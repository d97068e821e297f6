"""What sections of the settings are made of: frozen pydantic models, and types of numbers."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
SmallCount = Annotated[int, Field(ge=1, le=64)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0, le=1e6)]
Ratio = Annotated[float, Field(ge=0, le=10)]
CpuCount = Annotated[float, Field(ge=0, le=16)]
ShortSeconds = Annotated[float, Field(ge=0, le=10)]
Seconds = Annotated[float, Field(ge=0.1, le=3600)]


def field(default: object, description: str) -> Any:
    """A setting's default and what `m3pc config fields` says about it."""
    return Field(default, description=description)


class Section(BaseModel):
    """Frozen fields; an unknown name or a value of another type is refused, never converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ReducedSection(Section):
    """A section of which earlier versions had more fields, which nothing read.

    Configurations that still have them (of users, in checkpoints, in weights) stay valid.
    """

    removed: ClassVar[tuple[str, ...]]

    @model_validator(mode="before")
    @classmethod
    def _ignore_removed(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        return {name: value for name, value in fields.items() if name not in cls.removed}
