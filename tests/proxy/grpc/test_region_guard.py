"""A message that names a region of the gateway's own is found wherever it is cut."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.protocol.grpc import fields
from gateway.proxy.grpc.region_guard import RegionGuard
from tests.support.grpc.wire_bytes import cuts, field, messages

OWN = "tensorgate-x"
NAMED = field(1, b"IN")
CONTENTS = field(5, field(8, b"tensorgate-text " + bytes(70_000)))


def _parameter(tag: int, key: bytes, *values: bytes) -> bytes:
    value = b"".join(field(3, each) for each in values)
    return field(tag, field(1, key) + field(2, value))


def _region(tag: int, name: str = OWN, key: bytes = b"shared_memory_region") -> bytes:
    return _parameter(tag, key, name.encode())


def _scan(pieces: Iterable[bytes]) -> str:
    """Return the error of a message; empty without one."""
    guard = RegionGuard((1,), 2, fields.REQUESTED_OUTPUTS >> 3, fields.CLASSIFICATION)
    try:
        for piece in pieces:
            guard.feed(piece)
        guard.end()
    except GatewayError as error:
        return error.message
    assert guard.model.name == "m"
    return ""


INPUT = f"input 'IN': shared memory region '{OWN}' is the gateway's own"
OUTPUT = INPUT.replace("input", "output")
FOUND = [
    (field(5, NAMED + _region(4)), INPUT),
    (field(5, _region(4) + CONTENTS + NAMED), INPUT),
    (field(5, CONTENTS + NAMED + _region(4)), INPUT),
    (field(5, NAMED) + field(5, NAMED + _region(4, "mine") + _region(4)), INPUT),
    (field(5, NAMED + _parameter(4, b"shared_memory_region", b"mine", OWN.encode())), INPUT),
    (field(6, NAMED + _region(2)), OUTPUT),
    (field(6, _region(2) + field(9, bytes(70_000)) + NAMED), OUTPUT),
]
NOT_FOUND = [
    field(5, NAMED + _region(4, "mine")),
    field(5, NAMED + _region(4, "my-tensorgate-x")),
    field(5, NAMED + _region(4, key=b"other")),
    field(5, NAMED + _region(2) + CONTENTS),
    field(4, NAMED + _region(4)),
    field(6, NAMED + _region(4)),
    field(7, _region(4) + bytes(70_000)),
]


@given(data=st.data())
@pytest.mark.parametrize(("tensor", "error"), [*FOUND, *((each, "") for each in NOT_FOUND)])
def test_region_of_the_gateway_is_found_wherever_a_message_is_cut(
    tensor: bytes, error: str, data: st.DataObject
) -> None:
    around = st.one_of(messages(), st.just(field(7, bytes(9))), st.just(field(5, CONTENTS)))
    message = data.draw(around) + field(1, b"m") + tensor + data.draw(around)
    assert _scan(data.draw(cuts(message))) == error


@pytest.mark.parametrize(
    ("tensor", "culprit"),
    [
        (field(5, b"\x0a\x05a"), "cut short"),
        (field(5, field(1, bytes(2000))), "the name of an input has 2000 bytes"),
        (field(5, NAMED + _region(4, OWN + "x" * 70_000)), "at most 65536 are allowed"),
        (field(5, b"\x20\x00" * 20_001), "more than 20000 fields"),
        (field(5, field(4, b"\x0a\x7ftensorgate-")), "cut short"),
    ],
)
def test_tensor_that_is_no_tensor_is_refused(tensor: bytes, culprit: str) -> None:
    assert culprit in _scan([field(1, b"m") + tensor])


def test_fields_of_a_tensor_are_work_that_is_counted() -> None:
    guard = RegionGuard((1,), 2)
    tensor = field(5, field(3, 1) * 100 + CONTENTS)
    start, rest = tensor[:150], tensor[150:]
    guard.feed(start)
    assert 50 <= guard.fields < 100
    assert guard.free_size == 0
    guard.feed(rest[:1000])
    assert guard.fields > 100
    assert guard.free_size == len(rest) - 1000
