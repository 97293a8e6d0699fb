from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.protocol.grpc import fields, wire
from gateway.protocol.grpc.wire import WireError, WireReader
from tests.support.grpc import wire_bytes
from tests.support.grpc.proto_file import InferParameter, ModelInferRequest
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300))
UINT64 = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 63).map(lambda bit: 1 << bit),
    st.integers(1, 64).map(lambda bit: (1 << bit) - 1),
)


def read_all(data: bytes) -> list[bytes]:
    """Read each field of a message as raw bytes."""
    reader = WireReader(data)
    found = []
    while tag := reader.next_tag():
        found.append(bytes(reader.skip_raw(tag)))
    return found


def refusal(data: bytes) -> str:
    """Return why a message is refused; empty if it is not."""
    reason, offset = "", 0
    try:
        read_all(data)
    except WireError as error:
        reason, offset = error.reason, error.offset
    assert 0 <= offset <= len(data)
    return reason


def runtime_refuses(data: bytes) -> bool:
    try:
        ModelInferRequest.FromString(data)
    except DecodeError:
        return True
    return False


@LAW
@given(UINT64)
def test_varint_is_the_one_of_the_runtime(value: int) -> None:
    assert (
        wire.varint_field(fields.UINT64_PARAM, value)
        == InferParameter(uint64_param=value).SerializeToString()
    )
    reader = WireReader(wire.varint(value))
    assert (reader.read_varint(), reader.position) == (value, reader.end)
    signed = WireReader(wire.varint(value)).read_int64()
    assert wire.varint(signed) == wire.varint(value)
    assert (
        wire.varint_field(fields.INT64_PARAM, signed)
        == InferParameter(int64_param=signed).SerializeToString()
    )


@LAW
@given(wire_bytes.varints())
def test_varint_of_any_form_has_the_value_that_the_runtime_reads(code: bytes) -> None:
    message = InferParameter.FromString(b"\x28" + code)
    assert WireReader(code).read_varint() == message.uint64_param


@LAW
@given(wire_bytes.messages())
def test_every_valid_message_is_read_and_its_fields_kept(data: bytes) -> None:
    assert not runtime_refuses(data)
    assert b"".join(read_all(data)) == data
    shifted = WireReader(b"\xff" * 3 + data + b"\xff", 3, 3 + len(data))
    kept = b""
    while tag := shifted.next_tag():
        kept += shifted.skip_raw(tag)
    assert kept == data
    assert b"".join(read_all(memoryview(data))) == data  # type: ignore[arg-type]


@LAW
@given(wire_bytes.mutated(wire_bytes.messages()))
def test_broken_bytes_are_refused_exactly_if_the_runtime_refuses_them(data: bytes) -> None:
    # Of known fields the runtime looks at the contents, too.
    assume(not wire_bytes.has_numbers(data, range(1, 8)))
    reason = refusal(data)
    assume("nested deeper" not in reason)  # our own cap is below the runtime's
    assert bool(reason) == runtime_refuses(data)


@pytest.mark.parametrize(
    ("data", "reason", "offset"),
    [
        (b"\x00", "field number 0", 0),
        (b"\x08", "a varint that is cut short", 1),
        (b"\x08" + b"\x80" * 10 + b"\x01", "a varint of more than 10 bytes", 1),
        (b"\x88\x80\x80\x80\x80\x00\x01", "a varint of more than 5 bytes", 0),
        (b"\xf8\xff\xff\xff\x1f\x01", "a field number above 536870911", 0),
        (b"\x0e", "field 1 has the unknown wire type 6", 0),
        (b"\x0a\x05ab", "a value of 5 bytes is cut short: 2 are left", 1),
        (b"\x0a\xff\xff\xff\xff\x0f", "a length of 4294967295 bytes exceeds protobuf's limit", 1),
        (b"\x0d\x01\x02\x03", "a number of 4 bytes is cut short", 1),
        (b"\x0c", "group 1 ends but never began", 0),
        (b"\x0b\x10\x01", "group 1 never ends", 3),
        (b"\x0b\x13\x0c\x14", "group 1 ends within another", 2),
        (b"\x0b" * 33, "groups nested deeper than 32", 32),
    ],
)
def test_error_has_reason_and_offset(data: bytes, reason: str, offset: int) -> None:
    with pytest.raises(WireError) as caught:
        read_all(data)
    assert (caught.value.reason, caught.value.offset) == (reason, offset)
    assert str(caught.value) == f"{reason} at byte {offset}"


def test_size_ahead_counts_a_field_without_reading_it() -> None:
    reader = WireReader(b"\x0a\x03abc\x08\x01")
    assert reader.size_ahead(reader.next_tag()) == 5
    assert reader.read_text() == "abc"
    assert reader.size_ahead(reader.next_tag()) == 0
