"""How numpy decodes many short strings, where the C module is not compiled.

tests/codec/native/test_strings.py holds the C module to the same results.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec import native
from gateway.codec.elements.fast_strings import fast_decode_elements, fast_decode_strings
from gateway.codec.json.array_scanner import ElementRun
from tests.codec import strategies
from tests.codec.reference import pack_bytes

MANY = 256


@pytest.fixture(scope="module", autouse=True)
def without_c() -> Iterator[None]:
    """Decode as a gateway does that is not compiled."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(native, "decode_strings", None)
        patched.setattr(native, "decode_elements", None)
        yield


def decode(text: bytes) -> tuple[int, bytes] | None:
    """Decode the text of a whole array."""
    return fast_decode_strings(ElementRun(text, 0, 0, first=True))


def flat(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [item for below in value for item in flat(below)]


@strategies.LAW
@given(
    strings=st.lists(st.text(st.sampled_from("ab,[]{}: éß漢😀\x7f"), max_size=6), min_size=1),
    shape=st.sampled_from(["flat", "rows", "ragged"]),
    indent=st.sampled_from([None, 0, 1]),
    seed=strategies.SEEDS,
)
def test_strings_equal_what_the_standard_library_parses(
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
    found = decode(text)
    if found is None:
        assert len(text) > 16 * len(expected)
        return
    assert found == (len(expected), pack_bytes([each.encode() for each in expected]))


PLAIN = ['"a"'] * MANY


@pytest.mark.parametrize(
    "text",
    [
        "[" + ",".join(PLAIN[2:]) + "]",
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
def test_text_without_many_short_strings_is_left_to_the_slow_path(text: str) -> None:
    assert decode(text.encode()) is None


@pytest.mark.parametrize("strings", [[], ["a"], ["a", "b" * 99]])
def test_many_empty_arrays_among_few_strings_are_decoded(strings: list[str]) -> None:
    text = json.dumps([[[[[]]]] * MANY, strings]).encode()
    assert decode(text) == (
        len(strings),
        pack_bytes([each.encode() for each in strings]),
    )


@pytest.mark.parametrize("broken", [b"\xff", b"\xed\xa0\x80", b"\xc3"])
def test_invalid_utf8_is_left_to_the_slow_path(broken: bytes) -> None:
    assert decode(b"[" + b",".join([*[b'"a"'] * MANY, b'"%b"' % broken]) + b"]") is None


ELEMENTS = ('"a"', '"{"', '"}"', '":"', '"[,]"', '""', '"é"', '"b64"')


@strategies.LAW
@given(
    data=st.lists(st.binary(max_size=7), min_size=1, max_size=20),
    texts=st.lists(st.sampled_from(ELEMENTS), max_size=4),
    padded=st.booleans(),
    rows=st.booleans(),
    seed=strategies.SEEDS,
)
def test_base64_objects_equal_what_the_standard_library_decodes(
    data: list[bytes], texts: list[str], padded: bool, rows: bool, seed: int
) -> None:
    rng = random.Random(seed)
    texts_of = {each: base64.b64encode(each).decode() for each in data}
    encoded = {
        f'{{"b64":"{text if padded else text.rstrip("=")}"}}': each
        for each, text in texts_of.items()
    }
    known = encoded | {text: json.loads(text).encode() for text in texts}
    chosen = [rng.choice(list(known)) for _ in range(MANY + rng.randrange(99))]
    items = ["[" + ",".join(chosen[i : i + 3]) + "]" for i in range(0, len(chosen), 3)]
    text = ",".join(items if rows else chosen).encode()
    found = fast_decode_elements(text)
    assert found is not None
    assert found.data == pack_bytes([known[each] for each in chosen])
    assert found.count == len(chosen)
    assert found.has_base64 == any(each in encoded for each in chosen)
    marks = ["[" + "," * (len(chosen[i : i + 3]) - 1) + "]" for i in range(0, len(chosen), 3)]
    assert found.marks.decode() == (",".join(marks) if rows else "," * (len(chosen) - 1))


@pytest.mark.parametrize(
    "element",
    [
        *('{"b64":"Q"}', '{"b64":"QQ="}', '{"b64":"Q==="}', '{"b64":"===="}', '{"b64":"QQ==QQ=="}'),
        *('{"b64":"Q!=="}', '{"b64":"QQ=Q"}', '{"b64":"QQ\n=="}', '{"b64":"é"}', '{"b64":1}'),
        *('{"b64":["QQ=="]}', '{"b65":"QQ=="}', '{"b64":"QQ==","b64":"QQ=="}', "{}", '{"b64":{}}'),
        *('{"b64":null}', '{"b64" :"QQ=="}', '{"b64": "QQ=="}', "1", '{"b64":{"b64":"QQ=="}}'),
        *(r'{"b64":"\/\/\/\/"}', '{"xb64":"QQ=="}', '{"":"b64"}'),
    ],
)
def test_unusual_base64_is_left_to_the_slow_path(element: str) -> None:
    others = ['"a"', '{"b64":"QQ=="}'] * MANY
    for items in ([*others, element], [element, *others]):
        assert fast_decode_elements(",".join(items).encode()) is None
