"""Messages between robots and the server, with the same fields in JSON and in msgpack.

Numbers are finite and bounded, unknown fields are refused. Field names are part of the protocol.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_NUMBER: Final = 1e6  # limit for states and rewards, as in environments
MAX_TARGET: Final = 1e9
MAX_DEADLINE_MS: Final = 60_000.0


def _integer(value: Any) -> Any:
    """Accept 3.0 as an integer, because JSON has one kind of number only."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_integer)]
JsonNumber = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
# FailFast: only the first of many wrong numbers is reported; listing all would block the server.
StateVector = Annotated[list[JsonNumber], Field(min_length=1, max_length=65_536), FailFast()]
Action = Annotated[list[Annotated[float, Field(ge=-1, le=1)]], Field(min_length=1, max_length=4096)]
Milliseconds = Annotated[float, Field(ge=1, le=MAX_DEADLINE_MS)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# From a robot


class _SessionRequest(Message):
    name: Name | None = Field(
        None,
        description="The robot's. An open session of the same name is replaced; stored episodes "
        "are kept apart by it.",
    )
    key: Name | None = Field(
        None,
        description="Random. The same message sent again with the same key gets the same session, "
        "so a lost answer can be requested again.",
    )
    seed: Integer = Field(0, ge=0, lt=2**63, description="Of the planner's random candidates.")
    step_limit: Annotated[int, Field(ge=1), BeforeValidator(_integer)] | None = Field(
        None, description="Maximum steps of this episode; default: the model's."
    )
    deadline_ms: Milliseconds | None = Field(
        None, description="For each answer, unless a step sets its own; default: the server's."
    )


class ByReturn(_SessionRequest):
    """Act for a high return, or for a given one."""

    model_config = ConfigDict(json_schema_extra={"not": {"required": ["ratio", "target"]}})

    mode: Literal["rcbc", "m", "q", "q0"] | None = Field(
        None, description="rcbc acts without planning; default: the server's."
    )
    ratio: float | None = Field(
        None, ge=0, le=10, description="Target return as a multiple of the best return in the data."
    )
    target: float | None = Field(
        None,
        ge=-MAX_TARGET,
        le=MAX_TARGET,
        description="Target return of the episode, as a sum of rewards; every step must then send "
        "its reward. Not together with ratio.",
    )
    explore: bool = Field(False, description="Act as in data collection instead of evaluation.")

    @model_validator(mode="after")
    def _check_one_target(self) -> "ByReturn":
        if {"ratio", "target"} <= self.model_fields_set:
            raise PydanticCustomError("two_ways", "both ratio and target are given; give one")
        return self


class ToGoal(_SessionRequest):
    """Reach one state and stay there."""

    goal: StateVector
    mode: Literal["goal", "goal-mask"] = "goal"


class AlongWaypoints(_SessionRequest):
    """Follow a list of states, one per step; stay at the last."""

    waypoints: Annotated[list[StateVector], Field(min_length=1), FailFast()]
    mode: Literal["goal", "goal-mask"] = "goal"


OPENING_TAGS: Final = ("return", "goal", "waypoints")


def _opening_tag(fields: Any) -> str:
    names = fields if isinstance(fields, dict) else {}
    return next((tag for tag in ("waypoints", "goal") if tag in names), "return")


Opening = Annotated[
    Annotated[ByReturn, Tag("return")]
    | Annotated[ToGoal, Tag("goal")]
    | Annotated[AlongWaypoints, Tag("waypoints")],
    Discriminator(_opening_tag),
]
EXECUTED: Final = "The action executed at the previous step; default: the one that was answered."


class Step(Message):
    """Where the robot is now. The same step sent again gets the same answer. A step that was
    answered by a problem may be sent again with another observation."""

    step: Integer = Field(ge=0, le=10**9, description="Number of the step in the session, from 0.")
    observation: StateVector
    reward: JsonNumber | None = Field(
        None,
        description="Of the previous step. Required from step 1 on if episodes are stored.",
    )
    action: Action | None = Field(None, description=EXECUTED)
    deadline_ms: Milliseconds | None = Field(None, description="For this answer.")


class End(Message):
    """Where the episode ended, after `step` steps. May be sent again."""

    step: Integer = Field(ge=0, le=10**9)
    observation: StateVector
    reward: JsonNumber | None = Field(None, description="Of the last step.")
    action: Action | None = Field(None, description=EXECUTED)
    terminated: bool = Field(False, description="The task ended the episode: nothing could follow.")
    truncated: bool = Field(
        False, description="A time limit ended the episode: it could have continued."
    )


# From the server

Count = Annotated[int, Field(ge=0)]
BEST: Final = (
    "Return of the best episode in the data, as a sum of rewards: roughly the target of ratio 1."
)


class SessionCreated(Message):
    session: str = Field(description="Its id, for the paths of later requests.")
    name: str | None
    mode: str
    step_limit: Count
    deadline_ms: float
    idle_seconds: float = Field(
        description="Seconds without a request after which a session is ended."
    )
    state_size: Count
    action_size: Count
    candidates: Count = Field(description="Plans per decision if there is time.")
    env: str | None = Field(description="Environment that the model was trained for.")
    best_return: float | None = Field(description=BEST)
    version: str = Field(description="EPOCH-NUMBER of the weights that answer now.")
    recorded: bool = Field(description="Whether the episode will be stored.")


class ActionResponse(Message):
    step: Count
    action: list[float] = Field(description="In [-1, 1].")
    version: str = Field(description="EPOCH-NUMBER of the weights that answered.")
    candidates: Count = Field(description="Plans that were weighed; 0: not planned.")
    hurried: bool = Field(description="Whether the deadline reduced the number of candidates.")
    effective: float | None = Field(
        description="Effective number of candidates (of their weights)."
    )
    utility: float | None = Field(description="Utility that planning expects.")
    condition: float | None = Field(description="Target return that the policy was conditioned on.")
    milliseconds: float = Field(description="From request to answer, in the server.")
    deadline_ms: float
    late: bool


class EndResponse(Message):
    steps: Count
    total: float = Field(description="Sum of rewards.")
    stored: Literal["durable", "waiting", "rejected", "no store", "no step"] = Field(
        description="waiting: it will be stored as soon as the disk allows."
    )
    slot: int | None = Field(description="Producer slot of the robot in the store.")
    reason: str = ""


class SessionStatus(Message):
    session: str
    name: str | None
    mode: str
    steps: Count = Field(description="Answered so far: the number of the next step.")
    step_limit: Count
    total: float = Field(description="Reward so far.")
    recorded: bool
    ended: bool


class ModelInfo(Message):
    version: str = Field(description="EPOCH-NUMBER of the weights that answer.")
    sha256: str
    env: str | None
    best_return: float | None = Field(description=BEST)
    state_size: Count
    action_size: Count
    step_limit: Count
    mode: str
    modes: list[str] = Field(description="Modes that a session may request.")
    candidates: Count
    deadline_ms: float
    sessions: Count


class Problem(Message):
    """What went wrong, as a problem document (RFC 9457)."""

    title: str
    status: int
    detail: str = Field(description="What was found, what was expected, what to do.")
    where: str | None = Field(None, description="The field that is wrong.")
    expected_step: int | None = Field(None, description="The step that would be accepted.")
