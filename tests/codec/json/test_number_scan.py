"""The scan in C finds what the pure one finds, and both what a loop over the characters finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec import native
from gateway.codec.json.number_scan import NumberScan, scan_numbers

TEXTS = st.lists(
    st.one_of(
        st.text("0123456789.-eE, ", max_size=70),
        st.text("[],", max_size=20),
        st.sampled_from(["Y", "y", "_", "\x7f", "null", '"', "{", "}", "\x80", "\0"]),
    ),
    max_size=12,
).map(lambda parts: "".join(parts).encode("latin-1"))


def scan_characters(text: bytes) -> NumberScan:
    stop = next((at for at, code in enumerate(text) if code in b'"{}'), len(text))
    close, cut = text.rfind(b"]", 0, stop) + 1, text.rfind(b",", 0, stop)
    counts = [(text.count(b"[", 0, end), text.count(b"]", 0, end)) for end in (close, max(cut, 0))]
    return stop, close, *counts[0], cut, *counts[1]


@pytest.fixture(params=["pure", "native"])
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pure":
        monkeypatch.setattr(native, "scan_numbers", None)
    elif native.scan_numbers is None:
        pytest.skip("the C module is not compiled")


@pytest.mark.usefixtures("_form")
@given(TEXTS, TEXTS, TEXTS)
def test_scan_finds_stop_close_and_cut(before: bytes, text: bytes, behind: bytes) -> None:
    end = len(before) + len(text)
    assert scan_numbers(before + text + behind, len(before), end) == scan_characters(text)


@pytest.mark.skipif(native.scan_numbers is None, reason="the C module is not compiled")
@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 4), (4, 4)])
def test_c_scan_refuses_what_is_outside_of_the_buffer(start: int, end: int) -> None:
    assert native.scan_numbers is not None
    with pytest.raises(ValueError, match="outside of the buffer"):
        native.scan_numbers(b"123", start, end)
