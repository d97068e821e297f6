"""What a robot and the server say to each other; the same in JSON and in msgpack.

S state, A action. Numbers are finite and bounded, unknown fields are refused.
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
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticCustomError

LARGEST: Final = 1e6  # of a state or reward, as of environments
LARGEST_TARGET: Final = 1e9
LONGEST_DEADLINE: Final = 60_000.0  # milliseconds


def _whole(found: Any) -> Any:
    """JSON has one kind of number: 3.0 is a whole one."""
    return int(found) if isinstance(found, float) and found.is_integer() else found


Whole = Annotated[int, BeforeValidator(_whole)]
JsonNumber = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
# Of many wrong numbers the first is told; to list them all would hold everybody up.
StateVector = Annotated[list[JsonNumber], Field(min_length=1, max_length=65_536), FailFast()]
Action = Annotated[list[Annotated[float, Field(ge=-1, le=1)]], Field(min_length=1, max_length=4096)]
Milliseconds = Annotated[float, Field(ge=1, le=LONGEST_DEADLINE)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# What a robot says


class _Opening(Message):
    name: Name | None = Field(
        None,
        description="Of the robot. A session that is open under it is replaced. Episodes that are "
        "stored are told apart by it.",
    )
    key: Name | None = Field(
        None,
        description="Random. Sent again with the same message it opens nothing: the answer is "
        "the same, for whoever lost it.",
    )
    seed: Whole = Field(0, ge=0, lt=2**63, description="Of the planner's candidates.")
    step_limit: Annotated[int, Field(ge=1), BeforeValidator(_whole)] | None = Field(
        None, description="Steps of this episode at most; default: those of the model."
    )
    deadline_ms: Milliseconds | None = Field(
        None, description="For each answer, unless a step has its own; default: the server's."
    )


class ByReturn(_Opening):
    """Act for a high return, or for a certain one."""

    model_config = ConfigDict(json_schema_extra={"not": {"required": ["ratio", "target"]}})

    mode: Literal["rcbc", "m", "q", "q0"] | None = Field(
        None, description="rcbc does not plan; default: the server's."
    )
    ratio: float | None = Field(
        None, ge=0, le=10, description="Ask for this times the best return of the data."
    )
    target: float | None = Field(
        None,
        ge=-LARGEST_TARGET,
        le=LARGEST_TARGET,
        description="Ask for this return of the whole episode, a sum of rewards; then every step "
        "has to tell its reward. Not together with ratio.",
    )
    explore: bool = Field(False, description="Act as in collecting, not as in evaluation.")

    @model_validator(mode="after")
    def _one_way(self) -> "ByReturn":
        if {"ratio", "target"} <= self.model_fields_set:
            raise PydanticCustomError("two_ways", "both ratio and target are given; give one")
        return self


class ToGoal(_Opening):
    """Go to one state and stay there."""

    goal: StateVector
    mode: Literal["goal", "goal-mask"] = "goal"


class AlongWaypoints(_Opening):
    """Follow a table of states, a row a step; the last row is stayed at."""

    waypoints: Annotated[list[StateVector], Field(min_length=1), FailFast()]
    mode: Literal["goal", "goal-mask"] = "goal"


def _kind(found: Any) -> str:
    names = found if isinstance(found, dict) else {}
    return next((tag for tag in ("waypoints", "goal") if tag in names), "return")


Opening = Annotated[
    Annotated[ByReturn, Tag("return")]
    | Annotated[ToGoal, Tag("goal")]
    | Annotated[AlongWaypoints, Tag("waypoints")],
    Discriminator(_kind),
]
TAGS: Final = ("return", "goal", "waypoints")


REALLY: Final = "What was really done at the step before; default: what was answered."


class Step(Message):
    """Where the robot is now. To repeat a step send the same again: so is the answer. Where there
    was none, but a problem, another observation may be sent for it."""

    step: Whole = Field(ge=0, le=10**9, description="0, 1, 2, ... of the session.")
    observation: StateVector
    reward: JsonNumber | None = Field(
        None,
        description="Of the step before. Where episodes are stored it is needed from step 1 on.",
    )
    action: Action | None = Field(None, description=REALLY)
    deadline_ms: Milliseconds | None = Field(None, description="For this answer.")


class End(Message):
    """Where the episode ended, after `step` steps. May be repeated."""

    step: Whole = Field(ge=0, le=10**9)
    observation: StateVector
    reward: JsonNumber | None = Field(None, description="Of the last step.")
    action: Action | None = Field(None, description=REALLY)
    terminated: bool = Field(False, description="The task ended it: nothing could follow.")
    truncated: bool = Field(False, description="The clock ended it: it could have gone on.")


OPENING: TypeAdapter[ByReturn | ToGoal | AlongWaypoints] = TypeAdapter(Opening)
STEP, END = TypeAdapter(Step), TypeAdapter(End)

# What the server says

SmallInt = Annotated[int, Field(ge=0)]
BEST: Final = "The best episode of the data, as a sum of rewards: about what a ratio of 1 asks for."


class SessionCreated(Message):
    session: str = Field(description="Its id, for the paths of what follows.")
    name: str | None
    mode: str
    step_limit: SmallInt
    deadline_ms: float
    idle_seconds: float = Field(description="Without a request, after which a session is ended.")
    state_size: SmallInt
    action_size: SmallInt
    candidates: SmallInt = Field(description="Plans per decision where there is time.")
    env: str | None = Field(description="What the model was trained for.")
    best_return: float | None = Field(description=BEST)
    version: str = Field(description="EPOCH-NUMBER of the weights that answer now.")
    recorded: bool = Field(description="Whether the episode will be stored.")


class ActionResponse(Message):
    step: SmallInt
    action: list[float] = Field(description="In [-1, 1].")
    version: str = Field(description="EPOCH-NUMBER of the weights that answered.")
    candidates: SmallInt = Field(description="Plans that were weighed; 0: none.")
    hurried: bool = Field(description="Whether there would have been more, given more time.")
    effective: float | None = Field(description="Candidates that had a say.")
    utility: float | None = Field(description="What planning expects.")
    condition: float | None = Field(description="The return that the policy was asked for.")
    milliseconds: float = Field(description="From request to answer, in the server.")
    deadline_ms: float
    late: bool


class EndResponse(Message):
    steps: SmallInt
    total: float = Field(description="Reward.")
    stored: Literal["durable", "waiting", "rejected", "no store", "no step"] = Field(
        description="waiting: it will be, as soon as the disk allows."
    )
    slot: int | None = Field(description="Of the robot, in the store.")
    reason: str = ""


class SessionStatus(Message):
    session: str
    name: str | None
    mode: str
    steps: SmallInt = Field(description="Answered: the number of the next.")
    step_limit: SmallInt
    total: float = Field(description="Reward so far.")
    recorded: bool
    ended: bool


class ModelInfo(Message):
    version: str = Field(description="EPOCH-NUMBER of the weights that answer.")
    sha256: str
    env: str | None
    best_return: float | None = Field(description=BEST)
    state_size: SmallInt
    action_size: SmallInt
    step_limit: SmallInt
    mode: str
    modes: list[str] = Field(description="That a session may ask for.")
    candidates: SmallInt
    deadline_ms: float
    sessions: SmallInt


class Problem(Message):
    """What went wrong, as RFC 9457 has it."""

    title: str
    status: int
    detail: str = Field(description="What was found, what was expected, what to do.")
    where: str | None = Field(None, description="The field that it is about.")
    expected_step: int | None = Field(None, description="The step that would be taken.")
