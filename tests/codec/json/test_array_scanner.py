from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.codec.json import array_scanner
from gateway.codec.json.array_scanner import (
    STRING_WINDOW,
    WINDOW,
    ArrayScanner,
    ElementRun,
    StringPart,
)
from gateway.errors import ErrorKind, GatewayError
from tests.codec import strategies

BEHIND = b', "shape": [1]}]}' + b" " * 80


@dataclass
class Scanned:
    items: list[ElementRun | StringPart] = field(compare=False)
    ended: bool
    rest: bytes
    invalid_text: bytes | None
    described: list[object] = field(init=False)

    def __post_init__(self) -> None:
        self.described = [strategies.describe(item) for item in self.items]

    @property
    def texts(self) -> list[bytes]:
        return [item.text for item in self.items]


def scan(pieces: list[bytes], depth_cap: int = 64) -> Scanned:
    scanner = ArrayScanner("input 'x'", depth_cap)
    items: list[ElementRun | StringPart] = []
    buffer = b""
    for number, piece in enumerate(pieces):
        if scanner.ended:
            buffer += piece
            continue
        items += scanner.scan(buffer + piece, last=number == len(pieces) - 1)
        buffer = scanner.rest
    return Scanned(items, scanner.ended, buffer, scanner.invalid_text)


def refusal(text: bytes, depth_cap: int = 64) -> str:
    with pytest.raises(GatewayError) as caught:
        scan([text], depth_cap)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    return caught.value.message


@pytest.fixture
def window() -> Iterator[int]:
    with strategies.windows_of(32):
        yield 32


# ---------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("text", [b'[1]],"x":', b"[1] 5}", b"[1],,}", b"[1]x{", b"[1}", b'[1,"'])
def test_invalid_end_of_array_goes_to_the_decoder(text: bytes) -> None:
    scanned = scan([text])
    assert scanned.invalid_text is not None
    assert not scanned.ended
    (run,) = scanned.items
    assert run.text == text


def test_invalid_text_is_quoted_and_ends_the_scan() -> None:
    scanned = scan([b"[1,2,", b'{"a":', b"3}" + b"x" * 200, b"y" * 999])
    assert scanned.invalid_text == b'{"a":3}' + b"x" * 57
    assert scanned.texts == [b'[1,2,{"a":3}' + b"x" * 57]
    assert scanned.rest == b""


# ---------------------------------------------------------------------------------- runs


def test_runs_end_at_the_last_comma_of_a_window(window: int) -> None:
    numbers = ",".join(map(str, range(1000, 1020)))
    scanned = scan([f"[{numbers}]".encode() + BEHIND])
    assert scanned.texts == [
        b"[1000,1001,1002,1003,1004,1005",
        b"1006,1007,1008,1009,1010,1011",
        b"1012,1013,1014,1015,1016,1017",
        b"1018,1019]",
    ]
    first = [item.first for item in scanned.items if isinstance(item, ElementRun)]
    assert first == [True, False, False, False]
    assert scanned.rest == BEHIND


@pytest.mark.parametrize(
    ("run", "lacks"),
    [
        (ElementRun(b"[]", 0, 0, first=True), False),
        (ElementRun(b"3]", 1, 0, first=False), False),
        (ElementRun(b"]", 1, 0, first=False), True),
        (ElementRun(b"", 1, 1, first=False), True),
        (ElementRun(b"[", 0, 1, first=True), True),
        (ElementRun(b"1,[ ", 1, 2, first=False), True),
    ],
)
def test_run_detects_a_missing_element_beside_a_comma(run: ElementRun, lacks: bool) -> None:
    assert run.lacks_element is lacks


@pytest.mark.parametrize(
    "text",
    [
        b"[1]}" + b" " * 200,
        b'["a"]}' + b" " * 200,
        b"[1}" * 100,
        b"[" + b"1," * 100 + b"1]}" + b" " * 20,
        b"[" + b"1," * 100 + b"1]}",
    ],
)
def test_run_does_not_pin_a_large_window(text: bytes) -> None:
    (run,) = ArrayScanner("input 'x'", 64).scan(text, last=True)
    assert isinstance(run, ElementRun)
    assert run.text == text[: len(run)]
    assert len(run.buffer) <= len(run) * 16 / 15


# ---------------------------------------------------------------------------------- depth


@pytest.mark.parametrize("inside", [b"1", b'"a"', b""])
@pytest.mark.parametrize("cap", [1, 2, 64])
def test_nesting_up_to_the_cap_is_accepted(inside: bytes, cap: int) -> None:
    assert scan([b"[" * cap + inside + b"]" * cap + BEHIND], cap).ended
    message = refusal(b"[" * (cap + 1) + inside + b"]" * (cap + 1) + BEHIND, cap)
    assert message == f"input 'x': data is nested deeper than {cap}"


@pytest.mark.parametrize("inside", [b"", b"1,", b'"a",', b" "])
def test_nesting_beyond_a_window_is_refused_for_its_depth(inside: bytes) -> None:
    text = b"[" + inside + b"[" * WINDOW
    assert refusal(text) == "input 'x': data is nested deeper than 64"


def test_depth_is_counted_across_runs(window: int) -> None:
    text = b"".join(b"[%d," % i for i in range(100, 120))
    assert refusal(text, 12) == "input 'x': data is nested deeper than 12"


# ---------------------------------------------------------------------------------- no comma


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (b"[" + b"7" * WINDOW, WINDOW),
        (b"[1," + b"7" * WINDOW, WINDOW),
        (b"[" + b" " * WINDOW + b"1]}", WINDOW),
        (b'["a"' + b" " * STRING_WINDOW + b',"b"]}', STRING_WINDOW),
        (b'[""' + b" " * STRING_WINDOW + b"]}", STRING_WINDOW),
        (b"[" + b" " * (STRING_WINDOW - 2) + b'"a"]}', STRING_WINDOW),
        (b'["' + b"a" * (STRING_WINDOW - 5) + b'" "b" "c"]}', STRING_WINDOW),
    ],
)
def test_a_window_without_a_comma_is_refused(text: bytes, size: int) -> None:
    assert refusal(text) == f"input 'x': data holds {size} bytes without a comma"


# ---------------------------------------------------------------------------------- long strings


def test_long_string_comes_in_parts_with_an_empty_placeholder(window: int) -> None:
    scanned = scan([b'["a", ["' + b"b" * 50 + b'"], "c"]' + BEHIND])
    assert scanned.described == [
        (b'["a"', 0, 1, True),
        b"b" * 32,
        b"b" * 18,
        (b' [""], "c"]', 1, 0, False),
    ]
    assert scanned.rest == BEHIND


# ----------------------------------------------------------------------- independence of splits


def scanned_or_refused(pieces: list[bytes]) -> Scanned | str:
    try:
        return scan(pieces, 8)
    except GatewayError as error:
        return error.message


_CRUMBS = b'[ [ ] ] , " "a" "b", \\ 1 23, \\ud83d\\ude00 \xff { 555555555'.split()
_CRUMBS += [b", ", b" ", "😀".encode(), b'"' + b"c" * 40 + b'"']


@strategies.LAW
@given(st.lists(st.sampled_from(_CRUMBS), max_size=40), strategies.SEEDS)
@example([b"[" + b" " * 31, b'"a"]}'], 0)
@example([b'["a' + b"b" * 27, b'" "'], 1)
def test_runs_and_errors_do_not_depend_on_how_the_text_arrives(
    crumbs: list[bytes], seed: int
) -> None:
    text = b"[" + b"".join(crumbs) + b"]" + BEHIND
    with strategies.windows_of(32):
        found = scanned_or_refused([text, b""])
        assert scanned_or_refused([*strategies.cut(text, seed), b""]) == found
        assert scanned_or_refused([*strategies.bytewise(text), b""]) == found


def test_space_before_the_first_value_is_looked_at_once() -> None:
    """Else one byte after the other would cost as much as the square of their number."""
    scanner = ArrayScanner("input 'x'", 64)
    buffer = b"["
    with mock.patch.object(array_scanner, "BEFORE_FIRST_VALUE") as pattern:
        pattern.match.side_effect = re.compile(rb"[\[\], \t\n\r]*+").match
        for _ in range(100):
            assert list(scanner.scan(buffer, last=False)) == []
            buffer = scanner.rest + b" "
        starts = [call.args[1] for call in pattern.match.call_args_list]
    assert starts == list(range(100))
