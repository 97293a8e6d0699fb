from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.plain_strings import plain_strings
from tests.codec import bodies
from tests.codec.plain import pack_bytes

MANY = 256


def flat(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [item for below in value for item in flat(below)]


@bodies.LAW
@given(
    strings=st.lists(st.text(st.sampled_from("ab,[]{}: éß漢😀\x7f"), max_size=6), min_size=1),
    shape=st.sampled_from(["flat", "rows", "ragged"]),
    indent=st.sampled_from([None, 0, 1]),
    seed=bodies.SEEDS,
)
def test_strings_are_what_the_standard_library_reads(
    strings: list[str], shape: str, indent: int | None, seed: int
) -> None:
    rng = random.Random(seed)
    items: list[Any] = [rng.choice(strings) for _ in range(MANY + rng.randrange(99))]
    if shape == "rows":
        items = [items[i : i + 7] for i in range(0, len(items), 7)]
    if shape == "ragged":
        items = [[], [[items[:5], "x"]], *items, []]
    text = json.dumps(items, ensure_ascii=False, indent=indent).encode()
    expected = flat(items)
    found = plain_strings(text)
    if found is None:
        assert len(text) > 16 * len(expected)
        return
    assert found == (len(expected), pack_bytes([each.encode() for each in expected]))


PLAIN = ['"a"'] * MANY


@pytest.mark.parametrize(
    "text",
    [
        "[" + ",".join(PLAIN[1:]) + "]",
        "[" + ",".join([*PLAIN, '"' + "x" * 9999 + '"']) + "]",
        "[" + ",".join([*PLAIN, r'"\n"']) + "]",
        "[" + ",".join([*PLAIN, "1"]) + "]",
        "[" + ",".join([*PLAIN, "true"]) + "]",
        "[" + ",".join([*PLAIN, '{"a":"b"}']) + "]",
        "[" + ",".join([*PLAIN, ""]) + "]",
        "[" + " ".join(PLAIN) + "]",
        "[" + ",".join([*PLAIN, '"\n"']) + "]",
        "[" + ",".join([*PLAIN, '"']) + "]",
        "[" + ",".join(PLAIN),
    ],
)
def test_what_is_not_many_short_strings_is_left_to_others(text: str) -> None:
    assert plain_strings(text.encode()) is None


@pytest.mark.parametrize("broken", [b"\xff", b"\xed\xa0\x80", b"\xc3"])
def test_what_is_no_utf8_is_left_to_others(broken: bytes) -> None:
    assert plain_strings(b"[" + b",".join([*[b'"a"'] * MANY, b'"%b"' % broken]) + b"]") is None
