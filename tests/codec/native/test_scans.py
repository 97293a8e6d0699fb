"""The scans of text find the same in C and in Python, and both what a plain loop finds."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.build_info import NATIVE
from gateway.codec import native
from gateway.codec.native import plain
from tests.codec import strategies

FORMS = [plain, native] if NATIVE else [plain]
in_each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)

# ------------------------------------------------------------------------------------ numbers

TEXTS = st.lists(
    st.one_of(
        st.text("0123456789.-eE, ", max_size=70),
        st.text("[],", max_size=20),
        st.sampled_from(["Y", "y", "_", "\x7f", "null", '"', "{", "}", "\x80", "\0"]),
    ),
    max_size=12,
).map(lambda parts: "".join(parts).encode("latin-1"))


def scan_characters(text: bytes) -> tuple[int, ...]:
    stop = next((at for at, code in enumerate(text) if code in b'"{}'), len(text))
    close, cut = text.rfind(b"]", 0, stop) + 1, text.rfind(b",", 0, stop)
    counts = [(text.count(b"[", 0, end), text.count(b"]", 0, end)) for end in (close, max(cut, 0))]
    return stop, close, *counts[0], cut, *counts[1]


@in_each_form
@given(TEXTS, TEXTS, TEXTS)
def test_scan_of_numbers_finds_stop_close_and_cut(
    form: ModuleType, before: bytes, text: bytes, behind: bytes
) -> None:
    end = len(before) + len(text)
    assert form.scan_numbers(before + text + behind, len(before), end) == scan_characters(text)


@pytest.mark.skipif(not NATIVE, reason="the C module is not compiled")
@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 4), (4, 4)])
def test_c_scan_refuses_what_is_outside_of_the_buffer(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="outside of the buffer"):
        native.scan_numbers(b"123", start, end)


# ------------------------------------------------------------------------------------ strings


@in_each_form
@strategies.LAW
@given(st.lists(st.text(st.sampled_from('"\\[],a é\n')), min_size=1), st.integers(1, 9))
def test_brackets_and_commas_in_strings_are_ignored(
    form: ModuleType, strings: list[str], depth: int
) -> None:
    text = json.dumps(strings).encode()
    position, cut, _, max_depth, _, ended = form.scan_strings(text, depth - 1)
    assert (position, max_depth, ended) == (len(text), depth, depth == 1)
    if cut:
        assert json.loads(text[:cut] + b'"x"]')[:-1] == strings[:-1]
    assert form.collect_marks(text) == b"[" + b"," * (len(strings) - 1) + b"]"
