"""The relay's schema: stable numbers, and generated code that is up to date."""

import subprocess
import sys
from pathlib import Path

import pytest

from headgate.proto import envelope_pb2 as wire

ROOT = Path(__file__).parents[2]


def test_the_generated_code_matches_the_schema(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "proto/generate.py", tmp_path], check=True)
    made = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(made) == ["envelope_pb2.py", "envelope_pb2.pyi"]
    place = ROOT / "src/headgate/proto"
    for name, content in made.items():
        assert (place / name).read_bytes() == content, f"{name} is out of date: run `python proto/generate.py`"


def test_d3_the_numbers_of_a_denial() -> None:
    assert wire.MessageType.Value("MESSAGE_TYPE_RATE_LIMITED") == 15
    field = wire.Envelope.DESCRIPTOR.fields_by_name["rate_limited"]
    assert field.number == 24
    assert field in wire.Envelope.DESCRIPTOR.oneofs_by_name["payload"].fields
    assert field.message_type == wire.RateLimited.DESCRIPTOR
    assert wire.RateLimited.DESCRIPTOR.full_name == "headgate.v1.RateLimited"
    assert [(one.name, one.number, one.type) for one in wire.RateLimited.DESCRIPTOR.fields] == [
        ("retry_after_ms", 1, field.TYPE_INT64),
        ("reason", 2, field.TYPE_STRING),
    ]


def test_d3_a_denial_on_the_wire() -> None:
    """Bytes that were written down once: other languages and older nodes read them."""
    denial = wire.Envelope(
        type=wire.MESSAGE_TYPE_RATE_LIMITED,
        in_reply_to="a-1",
        rate_limited=wire.RateLimited(retry_after_ms=1000, reason="wait"),
    )
    assert denial.SerializeToString().hex(" ") == "10 0f 2a 03 61 2d 31 c2 01 09 08 e8 07 12 04 77 61 69 74"


@pytest.mark.parametrize(("kind", "number"), wire.MessageType.items()[1:])
def test_the_payload_of_a_type_is_nine_above_it(kind: str, number: int) -> None:
    field = wire.Envelope.DESCRIPTOR.fields_by_number[number + 9]
    assert f"MESSAGE_TYPE_{field.name.upper()}" == kind


def test_the_fields_of_an_envelope() -> None:
    numbers = {field.name: field.number for field in wire.Envelope.DESCRIPTOR.fields if not field.containing_oneof}
    assert numbers == {"id": 1, "type": 2, "from": 3, "to": 4, "in_reply_to": 5}
