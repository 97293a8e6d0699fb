"""The scanner finds what the official runtime finds, wherever a message is cut."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.protocol.grpc.model_scanner import (
    MAX_ALL_MARKED,
    MAX_FIELDS,
    MAX_MARKED,
    MAX_NAME,
    ModelScanner,
)
from gateway.protocol.grpc.wire import MAX_GROUP_DEPTH, MAX_GROUP_SIZE
from tests.protocol.grpc.scanned import Named, reader_error, scan
from tests.support.grpc.wire_bytes import cuts, encode, field, fields_of, messages, mutated
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300))

TEXTS = st.one_of(
    st.sampled_from(["a", "b", "c"]),
    st.text(max_size=6),
    st.integers(0, MAX_NAME // 2).map(lambda count: "é" * count),
)
# Forms of a length of 0: the runtime drops bits above the 64th.
SIZES = st.sampled_from([b"\x00", b"\x80\x00", b"\x80" * 9 + b"\x00", b"\x80" * 9 + b"\x02"])


@st.composite
def named_messages(draw: st.DrawFn) -> bytes:
    """Generate a message with names in any order and number, and unknown fields between them."""
    texts = st.builds(lambda number, text: field(number, text.encode()), st.integers(1, 2), TEXTS)
    parts = st.one_of(
        texts,
        texts,
        texts,
        # Numbers in the place of texts, and lengths in a longer form than needed.
        st.builds(field, st.integers(1, 2), st.integers(0, 2**64 - 1)),
        st.builds(lambda number, size: encode(number << 3 | 2) + size, st.integers(1, 2), SIZES),
        messages(),
    )
    return b"".join(draw(st.lists(parts, min_size=draw(st.sampled_from([0, 2, 4])), max_size=8)))


def scan_error(*pieces: bytes) -> str:
    return scan(ModelScanner((1,), 2), list(pieces))


# -------------------------------------------------------------------------------- the model


@LAW
@given(st.data(), st.lists(named_messages(), min_size=2, max_size=4))
def test_messages_after_the_first_are_scanned_as_if_each_was_the_only_one(
    data: st.DataObject, messages: list[bytes]
) -> None:
    scanner = ModelScanner((2, 1), 3, 6, b"a")
    for message in messages:
        pieces, alone = data.draw(cuts(message)), ModelScanner((2, 1), 3, 6, b"a")
        scanner.begin()
        error = scan(alone, pieces)
        assert scan(scanner, pieces) == error
        assert (scanner.model, scanner.names) == (alone.model, alone.names)
        assert (scanner.marked, scanner.fields) == (alone.marked, alone.fields)
        if error:
            return  # that ends the stream


@LAW
@given(st.data(), named_messages())
def test_name_and_version_are_those_of_the_runtime_wherever_they_stand(
    data: st.DataObject, message: bytes
) -> None:
    expected = Named.FromString(message)
    pieces = data.draw(cuts(message))
    scanner = ModelScanner((1,), 2)
    assert scan(scanner, pieces) == ""
    assert scanner.model == (expected.name, expected.version)
    assert scanner.names == ((expected.name,) if expected.name else ())
    scanner = ModelScanner((2, 1), None)  # the first of both that is not empty is the name
    assert scan(scanner, pieces) == ""
    assert scanner.model == (expected.version or expected.name, "")
    assert scanner.names == tuple(filter(None, (expected.version, expected.name)))


@pytest.mark.parametrize(
    ("message", "name_field"),
    [
        (field(2, b"model"), 2),
        (field(1, b"repository") + field(2, b"model"), 2),
        (field(2, b"") + field(1, b"model"), 1),
        (b"", 0),
    ],
)
def test_field_that_names_the_model_of_a_load_is_known(message: bytes, name_field: int) -> None:
    scanner = ModelScanner((2, 1), None)
    assert scan(scanner, [message]) == ""
    assert scanner.name_field == name_field


def test_name_is_known_before_the_message_has_ended() -> None:
    scanner = ModelScanner((1,), 2)
    scanner.feed(field(1, b"resnet")[:-1])
    assert scanner.model == ("", "")
    scanner.feed(b"t" + field(7, bytes(1000))[:-1])
    assert scanner.model == ("resnet", "")
    assert not scanner.ended


# ------------------------------------------------------------------------- after the routing


@LAW
@given(st.data(), named_messages())
def test_model_that_was_taken_stays_or_the_message_is_refused(
    data: st.DataObject, message: bytes
) -> None:
    at = data.draw(st.integers(0, len(message)))
    scanner = ModelScanner((1,), 2)
    scanner.feed(message[:at])
    model = scanner.take()
    known = dict(zip((1, 2), model, strict=True))
    position = 0
    is_changed = False
    for number, raw in fields_of(message):
        position += len(raw)
        if position > at and number in known and raw[0] & 7 == 2:
            text = getattr(Named.FromString(raw), {1: "name", 2: "version"}[number])
            is_changed |= text != known[number]
    error = scan(scanner, [message[at:]])
    assert bool(error) == is_changed
    if not error:
        assert scanner.model == model


def test_candidate_for_the_name_after_the_routing_is_refused() -> None:
    """A server that reads the other field would get another model than the route allows."""
    scanner = ModelScanner((2, 1), None)
    scanner.feed(field(2, b"allowed"))
    assert scanner.take() == ("allowed", "")
    assert "is 'denied', but was ''" in scan(scanner, [field(1, b"denied")])


# ------------------------------------------------------------------------------------ errors


@LAW
@given(st.data(), st.one_of(mutated(named_messages()), st.binary(max_size=40)))
def test_error_does_not_depend_on_cuts_and_is_that_of_the_reader(
    data: st.DataObject, message: bytes
) -> None:
    error = scan_error(message)
    assert scan_error(*data.draw(cuts(message))) == error
    assert scan_error(*(bytes([byte]) for byte in message)) == error
    expected = reader_error(message)
    assert bool(error) == bool(expected)
    # The reader of whole messages knows where they end, so it can say what is missing.
    if not any(text in error + expected for text in ("cut short", "never ends", "not UTF-8")):
        assert error == expected


def test_groups_are_skipped_up_to_the_limits_of_the_reader() -> None:
    deepest = b"\x1b" * MAX_GROUP_DEPTH + b"\x1c" * MAX_GROUP_DEPTH
    assert scan_error(deepest) == reader_error(deepest) == ""
    for start in (b"\x1b", b"\x9b\x00"):
        largest = start + b"\x22" + encode(MAX_GROUP_SIZE - 4) + bytes(MAX_GROUP_SIZE - 4) + b"\x1c"
        assert scan_error(largest) == reader_error(largest) == ""
        above = largest[:-1] + b"\x08\x01\x1c"
        assert "a group of more than 65536 bytes" in reader_error(above)
        assert scan_error(above) == reader_error(above)
        assert scan_error(*(bytes([byte]) for byte in above)) == reader_error(above)
        assert scan_error(largest + largest) == ""
    small = b"\x1b" + b"\x08\x01\x23\x24" * 500 + b"\x1c"
    for pieces in ([small], [bytes([byte]) for byte in small]):
        scanner = ModelScanner((1,), 2)
        assert scan(scanner, pieces) == ""
        assert scanner.fields == 1502


@pytest.mark.parametrize(("number", "what"), [(1, "name"), (2, "version")])
def test_name_above_the_limit_is_refused_before_it_arrives(number: int, what: str) -> None:
    scanner = ModelScanner((1,), 2)
    assert scan(scanner, [field(number, b"a" * MAX_NAME)]) == ""
    assert scanner.model[number - 1] == "a" * MAX_NAME
    expected = f"the model's {what} has 1025 bytes; at most 1024 are allowed"
    assert scan_error(field(number, b"a" * (MAX_NAME + 1))[:3]) == expected


@pytest.mark.parametrize(
    ("start", "size", "end"),
    [(b"", 64 * 1024, b""), (b"\x1b", 640, b"\x1c")],
    ids=["of the message", "of a group"],
)
def test_scanner_buffers_no_other_fields(start: bytes, size: int, end: bytes) -> None:
    piece = bytes(size)
    scanner = ModelScanner((1,), 2)
    scanner.feed(field(1, b"a") + start + encode(7 << 3 | 2) + encode(100 * size))
    tracemalloc.start()
    try:
        for _ in range(100):
            scanner.feed(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    scanner.feed(end)
    scanner.end()
    assert peak < 16 * 1024


def test_message_of_too_many_fields_is_refused() -> None:
    scanner = ModelScanner((1,), 2)
    scanner.feed(b"\x20\x01" * MAX_FIELDS)
    with pytest.raises(GatewayError, match=f"more than {MAX_FIELDS} fields"):
        scanner.feed(b"\x20\x01")


@given(st.data())
def test_marked_values_are_found_wherever_a_message_is_cut(data: st.DataObject) -> None:
    marked = [b"a mark b", b"mark", b"x" * 20 + b"mark"]
    message = field(1, b"m") + field(6, b"mar") + field(5, b"mark") + field(6, b"")
    message += b"".join(field(6, each) for each in marked) + field(7, b"mark")
    scanner = ModelScanner((1,), 2, 6, b"mark")
    assert scan(scanner, data.draw(cuts(message))) == ""
    assert (scanner.marked, scanner.model.name) == (marked, "m")


def test_searched_value_has_a_cap() -> None:
    scanner = ModelScanner((1,), 2, 6, b"mark")
    scanner.feed(field(6, bytes(MAX_MARKED)))
    assert scanner.marked_error is None
    scanner.feed(field(6, bytes(MAX_MARKED + 1)))
    assert "field 6 of the request has 65537 bytes" in str(scanner.marked_error)
    scanner.feed(field(6, b"mark"))
    scanner.end()
    assert scanner.marked == []


def test_all_values_with_the_mark_have_a_cap() -> None:
    scanner = ModelScanner((1,), 2, 6, b"mark")
    value = field(6, b"mark" + bytes(MAX_MARKED - 4))
    for _ in range(MAX_ALL_MARKED // MAX_MARKED):
        scanner.feed(value)
        scanner.feed(field(6, bytes(MAX_MARKED)))
    assert scanner.marked_error is None
    scanner.feed(value)
    assert "with 'mark' have more than 262144 bytes" in str(scanner.marked_error)
