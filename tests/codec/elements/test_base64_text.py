from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.elements.base64_text import Base64Decoder, decoded
from tests.codec import strategies


def in_pieces(pieces: list[bytes]) -> bytes:
    decoder = Base64Decoder()
    last = len(pieces) - 1
    return b"".join(decoder.feed(piece, last=i == last) for i, piece in enumerate(pieces))


@given(st.binary(max_size=30), st.booleans(), st.booleans(), strategies.SEEDS)
@strategies.LAW
def test_what_was_encoded_comes_back(data: bytes, padded: bool, escaped: bool, seed: int) -> None:
    text = base64.b64encode(data)
    if not padded:
        text = text.rstrip(b"=")
    if escaped:
        text = text.replace(b"/", b"\\/")
    for pieces in ([text], strategies.bytewise(text) or [b""], strategies.cut(text, seed)):
        assert in_pieces(pieces) == data


@pytest.mark.parametrize(
    "text",
    [b"A", b"A===", b"YQ==YQ==", b"YQ=", b"=", b"Y Q=", b"YQ\\n==", b"Y\\", b"\\u0059Q==", b"_-8="],
)
def test_what_is_no_base64(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decoded(text)
    with pytest.raises(ValueError, match=r"."):
        in_pieces(strategies.bytewise(text))
