"""All settings of a run: typed, frozen, and checked before any process starts.

The defaults are the preset `paper`; `presets.py` has a table of how the others differ, and
`overrides.py` reads and changes fields by dotted path.
"""

from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from m3pc.config.algorithm import (
    BACKWARD,
    MODES,
    ConditioningConfig,
    CriticConfig,
    DatasetConfig,
    EntropyConfig,
    GoalConfig,
    GuideConfig,
    LossConfig,
    LossWeightsConfig,
    MasksConfig,
    MixtureConfig,
    Mode,
    ModelConfig,
    NormaliserConfig,
    OptimiserConfig,
    PivotConfig,
    PlannerConfig,
    PretrainConfig,
    ReturnsConfig,
    SpacingConfig,
)
from m3pc.config.runtime import (
    ComputeConfig,
    EvaluationConfig,
    FleetConfig,
    OnlineConfig,
    ReplayConfig,
)
from m3pc.config.section import Section, field
from m3pc.config.validation import conflicts

__all__ = [
    "BACKWARD",
    "MODES",
    "REMOVED",
    "ComputeConfig",
    "ConditioningConfig",
    "Config",
    "CriticConfig",
    "DatasetConfig",
    "EntropyConfig",
    "EvaluationConfig",
    "FleetConfig",
    "GoalConfig",
    "GuideConfig",
    "LossConfig",
    "LossWeightsConfig",
    "MasksConfig",
    "MixtureConfig",
    "Mode",
    "ModelConfig",
    "NormaliserConfig",
    "OnlineConfig",
    "OptimiserConfig",
    "PivotConfig",
    "PlannerConfig",
    "PretrainConfig",
    "ReplayConfig",
    "ReturnsConfig",
    "Section",
    "SpacingConfig",
]


class Config(Section):
    """All settings of a run."""

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = field(
        0, "Seed of everything that is drawn at random."
    )
    model: ModelConfig = ModelConfig()
    masks: MasksConfig = MasksConfig()
    loss: LossConfig = LossConfig()
    entropy: EntropyConfig = EntropyConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    pretrain: PretrainConfig = PretrainConfig()
    dataset: DatasetConfig = DatasetConfig()
    returns: ReturnsConfig = ReturnsConfig()
    normaliser: NormaliserConfig = NormaliserConfig()
    planner: PlannerConfig = PlannerConfig()
    conditioning: ConditioningConfig = ConditioningConfig()
    goal: GoalConfig = GoalConfig()
    critic: CriticConfig = CriticConfig()
    replay: ReplayConfig = ReplayConfig()
    online: OnlineConfig = OnlineConfig()
    fleet: FleetConfig = FleetConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    compute: ComputeConfig = ComputeConfig()

    @property
    def context(self) -> int:
        """Past steps in a window, once an episode is long enough to have them."""
        return self.model.window - self.planner.horizon

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        for conflict in conflicts(self):
            raise ValueError(conflict)
        return self


# Paths of settings that earlier versions had and nothing read.
REMOVED: Final = tuple(
    f"{section}.{name}"
    for section, model in (("conditioning", ConditioningConfig), ("evaluation", EvaluationConfig))
    for name in model.removed
)
