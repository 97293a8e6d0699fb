"""A parser that has seen a head before reads the next ones like a new parser."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http1 import native
from gateway.http1.head import HeadParser, MalformedError, MessageHead
from gateway.http1.native import plain

needs_c = pytest.mark.skipif(
    native.split_head is plain.split_head, reason="the C module is not compiled"
)

NOTED = ("content-length", "x-note", "x-both")
KEYED = ("x-key", "x-both")

VALUES = st.one_of(
    st.sampled_from([b"1", b" 1", b" 17", b"  1", b" 1 ", b"\t1", b"", b" ", b" a b", b" a\rb"]),
    st.sampled_from([b" %d" % number for number in (2**64 - 1, 2**64, 10**20, -1)]),
    st.binary(max_size=6).map(lambda value: b" " + value),
)
NAMES = st.one_of(
    st.sampled_from(
        [b"Content-Length", b"content-length", b"X-Note", b"x-nOTE", b"X-Both", b"X-Key"]
    ),
    st.sampled_from([b"X", b"x-n\x0fte", b"x\rnote", b"X-Note ", b" X-Note"]),
    st.sampled_from([b"Connection", b"Transfer-Encoding", b"Host"]),
)
FIXED = st.sampled_from(
    b"Connection: close|Keep-Alive: timeout=5|Transfer-Encoding: chunked|Host: b c|Accept: */*"
    b"| folded|X-Key: 1|no colon|".split(b"|")
)
FIRST = st.sampled_from(
    [b"GET / HTTP/1.1", b"POST /a HTTP/1.0", b"GET http://c/ HTTP/1.1", b"NO", b"HTTP/1.1 200 OK"]
)


@st.composite
def _similar_heads(draw: st.DrawFn) -> list[bytes]:
    """Draw heads that mostly differ in values alone."""
    names = draw(st.lists(st.one_of(NAMES, FIXED), max_size=4))
    heads = []
    for _ in range(draw(st.integers(2, 4))):
        lines = [draw(FIRST), *([b"Host: a"] if draw(st.integers(0, 9)) else [])]
        lines += [name if b":" in name else name + b":" + draw(VALUES) for name in names]
        ending = draw(st.sampled_from([b"\r\n"] * 9 + [b"\n"]))
        heads.append(ending.join((*lines, b"", b"")))
    return heads


def _read(parser: HeadParser, head: bytes, is_request: bool) -> dict[str, Any] | str:
    """Return all that a parser reads of a head, or its error."""
    parsed: MessageHead
    try:
        parsed = parser.parse_request(head) if is_request else parser.parse_response(head, "GET")
    except MalformedError as error:
        return f"{type(error).__name__}: {error}"
    told = ("key", "passed", "http_1_0", "length", "chunked", "keep_alive", "keep_alive_timeout")
    lines = [(each.name, each.lower, each.value, each.line) for each in parsed.fields]
    read = {name: getattr(parsed, name) for name in told} | {"lines": lines}
    read["noted"] = [(each.name, each.value, each.line) for each in parsed.noted]
    read["headers"] = list(parsed.headers.items())
    read["keyed_headers"] = parsed.keyed_headers
    return read


@given(_similar_heads(), st.booleans())
def test_repeated_head_is_read_as_by_a_new_parser(heads: list[bytes], is_request: bool) -> None:
    parser = HeadParser(KEYED, NOTED)
    for head in heads * 2:
        assert _read(parser, head, is_request) == _read(HeadParser(KEYED, NOTED), head, is_request)


@needs_c
@given(_similar_heads())
def test_what_is_split_off_a_head_belongs_to_it(heads: list[bytes]) -> None:
    for head in heads:
        split = native.split_head(head, (b"content-length", b"x-note"))
        if split is None:
            continue
        first, text, parts = split
        pairs = iter(zip(parts[::2], parts[1::2], strict=True))
        whole = [first]
        for line in text.split(b"\n"):
            name, colon, space = line.partition(b":")
            if colon and name.lower() in (b"content-length", b"x-note"):
                value, noted = next(pairs)
                assert isinstance(value, str)
                assert noted == name + colon + space.replace(b"\r", value.encode() + b"\r\n")
                whole.append(noted.removesuffix(b"\n"))
            else:
                whole.append(line)
        assert b"\n".join(whole) == head
        assert not list(pairs)


@needs_c
@pytest.mark.parametrize(
    ("name", "noted", "is_noted"),
    [
        (b"A_B-1", b"a_b-1", True),
        (b"a^b", b"a~b", False),
        (b"a@b", b"a`b", False),
        (b"a\rb", b"a-b", False),
        (b"a\x11b", b"a1b", False),
        (b"a\xc1b", b"a\xe1b", False),
    ],
)
def test_only_the_case_of_letters_may_differ_in_a_noted_name(
    name: bytes, noted: bytes, is_noted: bool
) -> None:
    line = name + b": 1\r\n"
    text, values = (name + b": \r\n", ["1", line]) if is_noted else (line, [])
    assert native.split_head(b"GET\r\n" + line, (noted,)) == (b"GET\r", text, values)


@given(st.binary(max_size=40) | st.text("\r\na", max_size=12).map(str.encode), st.integers(0, 45))
def test_head_is_cut_off_at_its_end(data: bytes, most: int) -> None:
    for form in (data, memoryview(data)):
        cut = native.cut_head(form, most)
        assert cut == plain.cut_head(form, most)
        if cut is not None:
            assert b"".join(cut) == data
            assert isinstance(cut[1], bytes) == (len(data) <= most)


@needs_c
@pytest.mark.parametrize("arguments", [(), (b"",), (b"", "x"), ("", 1), (b"", 1, 2), (1, ())])
def test_c_functions_refuse_other_arguments(arguments: tuple[Any, ...]) -> None:
    for function in (native.cut_head, native.split_head):
        with pytest.raises(TypeError):
            function(*arguments)
