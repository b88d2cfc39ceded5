from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MessageType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MESSAGE_TYPE_UNSPECIFIED: _ClassVar[MessageType]
    MESSAGE_TYPE_HELLO: _ClassVar[MessageType]
    MESSAGE_TYPE_WELCOME: _ClassVar[MessageType]
    MESSAGE_TYPE_DATA: _ClassVar[MessageType]
    MESSAGE_TYPE_ACK: _ClassVar[MessageType]
    MESSAGE_TYPE_ERROR: _ClassVar[MessageType]
    MESSAGE_TYPE_RATE_LIMITED: _ClassVar[MessageType]
MESSAGE_TYPE_UNSPECIFIED: MessageType
MESSAGE_TYPE_HELLO: MessageType
MESSAGE_TYPE_WELCOME: MessageType
MESSAGE_TYPE_DATA: MessageType
MESSAGE_TYPE_ACK: MessageType
MESSAGE_TYPE_ERROR: MessageType
MESSAGE_TYPE_RATE_LIMITED: MessageType

class Envelope(_message.Message):
    __slots__ = ("id", "type", "to", "in_reply_to", "hello", "welcome", "data", "ack", "error", "rate_limited")
    ID_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    IN_REPLY_TO_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RATE_LIMITED_FIELD_NUMBER: _ClassVar[int]
    id: str
    type: MessageType
    to: str
    in_reply_to: str
    hello: Hello
    welcome: Welcome
    data: Data
    ack: Ack
    error: Error
    rate_limited: RateLimited
    def __init__(self, id: _Optional[str] = ..., type: _Optional[_Union[MessageType, str]] = ..., to: _Optional[str] = ..., in_reply_to: _Optional[str] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., data: _Optional[_Union[Data, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., rate_limited: _Optional[_Union[RateLimited, _Mapping]] = ..., **kwargs) -> None: ...

class Hello(_message.Message):
    __slots__ = ("address", "token")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    address: str
    token: str
    def __init__(self, address: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class Data(_message.Message):
    __slots__ = ("body", "content_type")
    BODY_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    content_type: str
    def __init__(self, body: _Optional[bytes] = ..., content_type: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "detail")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    code: str
    detail: str
    def __init__(self, code: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class RateLimited(_message.Message):
    __slots__ = ("retry_after_ms", "reason")
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    retry_after_ms: int
    reason: str
    def __init__(self, retry_after_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
