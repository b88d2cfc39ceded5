"""The frames of `/ws`: those of agents and those of the hub. Their types are the schemas that validate them.

A frame of an agent may carry an `id`; every frame that answers it has the same one.
"""

from functools import reduce
from operator import or_
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from headgate.gate.policy import MAX_AGENT
from headgate.hub.errors import RequestError
from headgate.hub.json_bounds import TOO_DEEP, check_depth
from headgate.limits.numbers import LARGEST

MAX_NAMES: Final = 1000
"""Names of agents on one page."""

FrameId: TypeAlias = Annotated[str, Meta(max_length=128)] | Annotated[int, Meta(ge=-(2**53), le=2**53)]
MaybeId: TypeAlias = FrameId | UnsetType
AgentId: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=MAX_AGENT, description="1 to 128 printable characters")
]
Token: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
_DIGITS: Final = 22  # on each side of the point, as in a limit's text
AMOUNT_PATTERN: Final = rf"^[0-9]{{1,{_DIGITS}}}(\.[0-9]{{1,{_DIGITS}}})?$(?!\n)"
HOLD_ID_PATTERN: Final = r"^[A-Za-z0-9_~:-][A-Za-z0-9._~:-]*$(?!\n)"
_CHANNEL_PATTERN: Final = r"^(?!\.{1,2}$)[A-Za-z0-9._-]+$(?!\n)"
_WORDS: Final = {
    _CHANNEL_PATTERN: "up to 64 letters, digits, dots, dashes and underscores, other than . and ..",
    AMOUNT_PATTERN: "a number of 0 or more, such as '0.0312'",
    HOLD_ID_PATTERN: "letters, digits, and - _ ~ : . but no dot first",
}
ChannelName: TypeAlias = Annotated[
    str,
    Meta(
        pattern=_CHANNEL_PATTERN,
        max_length=64,
        description="letters, digits, dots, dashes, underscores",
    ),
]
TaskId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
SessionId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)] | Annotated[int, Meta(ge=0, le=2**53)]
Note: TypeAlias = Annotated[str, Meta(max_length=1000)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=100)]
NamePageSize: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_NAMES)]
AfterName: TypeAlias = Annotated[str, Meta(max_length=MAX_AGENT)]
Number: TypeAlias = Annotated[int, Meta(ge=1, le=2**53)]


# Frames of agents -----------------------------------------------------------------------------------------------------


class ClientFrame(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """A frame of an agent."""

    id: MaybeId = UNSET


class Identify(ClientFrame, tag="identify"):
    """The agent's id and token: the first frame of every connection."""

    agent_id: AgentId
    token: Token


class Ping(ClientFrame, tag="ping"):
    """Answered by a pong."""


class Status(ClientFrame, tag="status"):
    """Asks for the agent's status; with a `status`, first sets whether it takes tasks."""

    status: Literal["idle", "busy"] | UnsetType = UNSET


class ListAgents(ClientFrame, tag="list_agents"):
    """Asks for the connected agents: a page of them by name, the first or the next after a name."""

    limit: NamePageSize = MAX_NAMES
    after: AfterName = ""


class ListChannels(ClientFrame, tag="list_channels"):
    """Asks for the chat channels: a page of them by name, the first or the next after a name."""

    limit: Count = 100
    after: AfterName = ""


class ChannelHistory(ClientFrame, tag="channel_history"):
    """Asks for the newest messages of a chat channel, or the newest before a number."""

    channel: ChannelName
    limit: Count = 50
    before: Number | UnsetType = UNSET


class SendMessage(ClientFrame, tag="message"):
    """A message to another agent; if that is not connected, into its mailbox."""

    to: AgentId
    body: Raw


class ChannelPublish(ClientFrame, tag="channel_publish"):
    """A message to all subscribers of a chat channel."""

    channel: ChannelName
    body: Raw


class ChannelSubscribe(ClientFrame, tag="channel_subscribe"):
    """Subscribes to a chat channel."""

    channel: ChannelName


class ChannelUnsubscribe(ClientFrame, tag="channel_unsubscribe"):
    """Ends the subscription to a chat channel."""

    channel: ChannelName


class TaskAccepted(ClientFrame, tag="task_accepted"):
    """The agent accepts the task that it was assigned."""

    task_id: TaskId


class TaskProgress(ClientFrame, tag="task_progress"):
    """The progress of a task, 0 to 1."""

    task_id: TaskId
    progress: Annotated[float, Meta(ge=0, le=1)] = 0.0
    note: Note = ""


class TaskComplete(ClientFrame, tag="task_complete"):
    """A task is done."""

    task_id: TaskId
    result: Raw | UnsetType = UNSET


class TaskFailed(ClientFrame, tag="task_failed"):
    """A task can't be done by this agent (`retry`), or at all."""

    task_id: TaskId
    error: Note
    retry: bool = False


class TaskRecovering(ClientFrame, tag="task_recovering"):
    """The agent was interrupted, and resumes a task that it held."""

    task_id: TaskId


class SessionOpen(ClientFrame, tag="session_open"):
    """Opens a session. A rate (signals per second) and a burst ask for less than the operator allows."""

    session: SessionId
    rate: Annotated[float, Meta(gt=0)] | UnsetType = UNSET
    burst: Annotated[int, Meta(ge=1, le=LARGEST)] | UnsetType = UNSET


class SessionSignal(ClientFrame, tag="session_signal"):
    """A signal for the log of a session. The signal itself is validated after the limit."""

    session: SessionId
    signal: Raw


class SessionClose(ClientFrame, tag="session_close"):
    """Closes a session."""

    session: SessionId


CLIENT_FRAMES: Final = tuple(ClientFrame.__subclasses__())


class Signal(Struct, kw_only=True, forbid_unknown_fields=True):
    """An entry in the log of a session."""

    type: Annotated[str, Meta(min_length=1, max_length=128)]
    entity: Annotated[str, Meta(min_length=1, max_length=256)]
    weight: Annotated[float, Meta(ge=-1e15, le=1e15)]
    timestamp: Annotated[float, Meta(ge=0, le=1e12)]
    annotation: Annotated[str, Meta(max_length=4096)] | None = None


# Frames of the hub ----------------------------------------------------------------------------------------------------


class ServerFrame(Struct, kw_only=True, tag_field="type"):
    """A frame of the hub. With an `id`, it answers the frame that has it."""

    id: MaybeId = UNSET


class Identified(ServerFrame, tag="identified"):
    agent_id: str
    mail: int
    """The number of messages in the mailbox."""


class Pong(ServerFrame, tag="pong"):
    pass


class AgentStatus(ServerFrame, tag="status"):
    agent_id: str
    status: str
    task_id: str | None
    rate_limited: bool
    violations: int
    quiet_left_ms: int


class Agents(ServerFrame, tag="agents"):
    agents: list[str]
    more: bool
    """Whether there are more, after the last."""


class ChannelInfo(Struct):
    name: str
    creator: str
    about: str
    created_at: float
    subscribers: int


class Channels(ServerFrame, tag="channels"):
    channels: list[ChannelInfo]
    more: bool
    """Whether there are more, after the last."""


class Post(Struct):
    """A message of a chat channel."""

    number: int
    sender: str = msgspec.field(name="from")
    body: Raw
    at: float


class History(ServerFrame, tag="history"):
    channel: str
    messages: list[Post]


class MessageSent(ServerFrame, tag="message_sent"):
    to: str
    delivered: bool
    """False: it is in the mailbox."""


class Message(ServerFrame, tag="message"):
    """A message from another agent."""

    sender: str = msgspec.field(name="from")
    body: Raw
    at: float


class Published(ServerFrame, tag="published"):
    channel: str
    number: int


class ChannelMessage(ServerFrame, tag="channel_message"):
    channel: str
    number: int
    sender: str = msgspec.field(name="from")
    body: Raw
    at: float


class Lagged(ServerFrame, tag="lagged"):
    """Messages of a chat channel were skipped, since the queue was full; `channel_history` has them."""

    channel: str
    missed: int


class Subscribed(ServerFrame, tag="subscribed"):
    channel: str


class Unsubscribed(ServerFrame, tag="unsubscribed"):
    channel: str


class TaskAssigned(ServerFrame, tag="task_assigned"):
    task_id: str
    attempt: int
    payload: Raw


class TaskUpdated(ServerFrame, tag="task_updated"):
    task_id: str
    state: str


class SessionOpened(ServerFrame, tag="session_opened"):
    session: SessionId
    limit: str
    """The limit in effect."""


class SignalLogged(ServerFrame, tag="signal_logged"):
    session: SessionId
    number: int


class SessionClosedFrame(ServerFrame, tag="session_closed"):
    session: SessionId


class Problem(ServerFrame, tag="error"):
    """A frame was refused or failed. `error` is a word for programs, `detail` a sentence for people."""

    error: str
    detail: str
    agent_id: str | UnsetType = UNSET
    limit: float | UnsetType = UNSET
    """Signals per second."""
    retry_after_ms: int | UnsetType = UNSET


class RateLimitedFrame(ServerFrame, tag="rate_limited"):
    """The frame was not handled; it can be sent again after the wait."""

    tier: str
    retry_after_ms: int
    blocked: Literal[True] | UnsetType = UNSET
    """An operator has blocked the agent: nothing passes until that ends."""


class RateLimitWarning(ServerFrame, tag="rate_limit_warning"):
    """The frame is handled, but little is left."""

    tier: str
    remaining: int
    capacity: int


class GoingAway(ServerFrame, tag="going_away"):
    """The hub stops, and closes the connection next."""

    retry_after_ms: int


SERVER_FRAMES: Final = tuple(ServerFrame.__subclasses__())


# Decoding and encoding ------------------------------------------------------------------------------------------------


def tag_of(frame: type[Struct]) -> str:
    """The `type` of a class of frames."""
    tag = frame.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


TYPES: Final = tuple(tag_of(kind) for kind in CLIENT_FRAMES)
"""The types of all frames that agents may send."""


class _WithId(Struct):
    id: MaybeId = UNSET


_frames: Final = msgspec.json.Decoder(reduce(or_, CLIENT_FRAMES))  # any of them
_ids: Final = msgspec.json.Decoder(_WithId)
_signals: Final = msgspec.json.Decoder(Signal)
_encoder: Final = msgspec.json.Encoder()

MALFORMED: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""The errors of decoding."""


def decode(text: str) -> ClientFrame:
    """A frame of an agent."""
    try:
        frame = _frames.decode(text)
    except MALFORMED as error:
        detail = explain(error)
        if detail.endswith("at `$.type`"):
            detail += f"; the types are {', '.join(TYPES)}"
        raise RequestError(400, "invalid", detail) from error
    check_depth(text)
    return frame


def decode_signal(signal: Raw) -> Signal:
    """The signal inside a frame."""
    try:
        return _signals.decode(signal)
    except MALFORMED as error:
        raise RequestError(400, "invalid", f"signal: {explain(error)}") from error


def id_in(text: str) -> MaybeId:
    """The id of an invalid frame, if it has one."""
    try:
        return _ids.decode(text).id
    except MALFORMED:
        return UNSET


def encode(frame: Struct) -> str:
    """A frame of the hub, as text."""
    return _encoder.encode(frame).decode()


def explain(error: Exception) -> str:
    """The reason why something could not be decoded, for its sender."""
    if isinstance(error, RecursionError):
        return TOO_DEEP
    told = str(error)
    for pattern, words in _WORDS.items():
        told = told.replace(f"`str` matching regex {pattern!r}", words)
    return told


def schemas() -> dict[str, Any]:
    """JSON Schemas of all frames, by which they are validated."""
    kinds = (*CLIENT_FRAMES, *SERVER_FRAMES, Signal)
    found, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    own = {tag_of(kind): schema for kind, schema in zip(CLIENT_FRAMES, found, strict=False)}
    sent = {tag_of(kind): schema for kind, schema in zip(SERVER_FRAMES, found[len(CLIENT_FRAMES) :], strict=False)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "from_agents": own,
        "from_the_hub": sent,
        "signal": found[-1],
        "$defs": parts,
    }
