"""Bodies in gzip and deflate are decompressed the same however they are split."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec import decompress
from gateway.codec.decompress import (
    FREE_MEMBERS,
    FREE_OUTPUT_BYTES,
    MAX_MEMBERS_PER_STEP,
    MIN_MEMBER_BYTES,
    Decompressor,
)
from gateway.errors import ErrorKind, GatewayError
from gateway.sizes import CONVERT_CHUNK
from tests.http1.splits import bytewise, cut

MOST = 100
TEXT = b'{"inputs": [{"data": [1, 2.5, -3]}]}'
NOISE = random.Random(7).randbytes(100_000)
WINDOW = decompress._WINDOW
STATE = decompress._STATE
EMPTY = gzip.compress(b"", mtime=0)


def bare(data: bytes) -> bytes:
    """Compress to raw deflate."""
    pack = zlib.compressobj(wbits=-15)
    return pack.compress(data) + pack.flush()


def pieces(coding: str, *chunks: bytes, max_ratio: int = MOST) -> Iterator[bytes]:
    """Decompress a body that comes in chunks."""
    inflater = Decompressor(coding, max_ratio)
    for number, chunk in enumerate((*chunks, b"")):
        inflater.feed(chunk, last=number == len(chunks))
        while (piece := inflater.step()) is not None:
            assert len(piece) <= CONVERT_CHUNK
            yield piece
    assert not inflater.buffered_bytes
    assert inflater.consumed == sum(map(len, chunks))


def outcome(coding: str, *chunks: bytes, max_ratio: int = MOST) -> bytes | tuple[ErrorKind, str]:
    """Return a decompressed body, or its error."""
    try:
        return b"".join(pieces(coding, *chunks, max_ratio=max_ratio))
    except GatewayError as error:
        return error.kind, error.message


# ----------------------------------------------------------------------- valid bodies


def test_output_that_zlib_holds_after_all_input_is_not_lost() -> None:
    """Raw deflate has nothing behind its last match, whose end does not fit the first piece."""
    for size in range(CONVERT_CHUNK + 1, CONVERT_CHUNK + 260):
        assert b"".join(pieces("deflate", bare(bytes(size)))) == bytes(size)


@given(st.data())
def test_any_body_is_decompressed_however_split(data: st.DataObject) -> None:
    runs = st.tuples(st.binary(max_size=40), st.integers(1, 3000))
    parts = [run * times for run, times in data.draw(st.lists(runs, max_size=4))]
    plain = b"".join(parts)
    coding, body = data.draw(
        st.sampled_from(
            (
                ("gzip", gzip.compress(plain)),
                ("gzip", b"".join(map(gzip.compress, parts)) or gzip.compress(b"")),
                ("deflate", zlib.compress(plain)),
                ("deflate", bare(plain)),
            )
        )
    )
    places = data.draw(st.lists(st.integers(0, len(body)), max_size=6))
    assert outcome(coding, *cut(body, places), max_ratio=2000) == plain


# ----------------------------------------------------------------------- invalid bodies

WHOLE = {"gzip": gzip.compress(TEXT), "deflate": zlib.compress(TEXT), "bare": bare(TEXT)}
GZIP, DEFLATE = WHOLE["gzip"], WHOLE["deflate"]
WRONG_SUM = GZIP[:-8] + bytes(4) + GZIP[-4:]
BAD = {
    "nothing": ("gzip", b"", "ends before its gzip data does"),
    "cut short": ("gzip", GZIP[:-1], "ends before its gzip data does"),
    "half a second member": ("gzip", GZIP + GZIP[:12], "ends before its gzip data does"),
    "deflate cut short": ("deflate", DEFLATE[:-1], "ends before its deflate data does"),
    "plain": ("gzip", TEXT, "is not valid gzip: incorrect header check"),
    "a wrong checksum": ("gzip", WRONG_SUM, "is not valid gzip: incorrect data check"),
    "more": ("gzip", GZIP + b"more", "has data after its gzip data"),
    "a byte more": ("gzip", GZIP + b"\x1f", "has data after its gzip data"),
    "more than deflate": ("deflate", DEFLATE * 2, "has data after its deflate data"),
}


@pytest.mark.parametrize(("coding", "body", "message"), BAD.values(), ids=BAD)
def test_invalid_bodies_are_refused(coding: str, body: bytes, message: str) -> None:
    found = outcome(coding, body)
    assert found == (ErrorKind.BAD_REQUEST, f"the request's body {message}")
    assert outcome(coding, *bytewise(body)) == found
    for at in range(len(body)):
        assert outcome(coding, body[:at], body[at:]) == found


@given(st.sampled_from(sorted(WHOLE)), st.randoms(use_true_random=False), st.integers(0, 3))
def test_broken_bodies_are_treated_like_zlib_does(
    name: str, chance: random.Random, members: int
) -> None:
    """The result does not depend on how a body is split, and is zlib's if it is valid."""
    coding = "gzip" if name == "gzip" else "deflate"
    body = bytearray(WHOLE[name] + WHOLE["gzip"] * members)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(body))
        end = min(len(body), at + chance.choice((1, 1, 2, 10)))
        odd = chance.randbytes(chance.choice((1, 2)))
        body[at:end] = chance.choice((odd, b"", body[at:end] * 2, odd + body[at:end]))
        body = body or bytearray(b"\0")
    found = outcome(coding, bytes(body))
    assert outcome(coding, *cut(bytes(body), [chance.randrange(len(body))])) == found
    assert outcome(coding, *bytewise(bytes(body))) == found
    if isinstance(found, bytes):
        assert found == _oracle(coding, bytes(body))


def _oracle(coding: str, body: bytes) -> bytes:
    if coding == "gzip":
        return gzip.decompress(body)
    return zlib.decompress(body, 15 if body[0] & 15 == 8 else -15)


# ----------------------------------------------------------------------- the ratio


def test_ratio_beyond_the_cap_is_refused() -> None:
    body = gzip.compress(bytes(FREE_OUTPUT_BYTES + 1))
    found = outcome("gzip", body)
    assert found == (
        ErrorKind.TOO_LARGE,
        "the request's body is gzip, and grows to more than 100 times its size "
        "(limits.max_decompression_ratio)",
    )
    assert outcome("gzip", *bytewise(body)) == found
    assert outcome("gzip", body, max_ratio=1032) == bytes(FREE_OUTPUT_BYTES + 1)


@pytest.mark.parametrize("zeros", [0, 2 * FREE_OUTPUT_BYTES])
def test_ratio_is_measured_against_the_bytes_received_so_far(zeros: int) -> None:
    body = zlib.compress(bytes(zeros) + NOISE * 20)
    # The ratio of the whole body would be within the cap.
    assert 2 * FREE_OUTPUT_BYTES + 20 * len(NOISE) < MOST * len(body)
    found = outcome("deflate", body)
    assert isinstance(found, tuple) is bool(zeros)
    assert outcome("deflate", *(body[at : at + 999] for at in range(0, len(body), 999))) == found


BOMB = gzip.compress(bytes(64 * FREE_OUTPUT_BYTES))


def test_bomb_is_refused_early() -> None:
    assert len(BOMB) * 1000 < 64 * FREE_OUTPUT_BYTES
    inflater = Decompressor("gzip", MOST)
    inflater.feed(BOMB, last=True)
    with pytest.raises(GatewayError) as caught:
        sum(map(len, iter(inflater.step, None)))
    assert caught.value.kind is ErrorKind.TOO_LARGE
    assert FREE_OUTPUT_BYTES < inflater.produced <= FREE_OUTPUT_BYTES + CONVERT_CHUNK


def test_bomb_never_buffers_more_than_a_piece() -> None:
    inflater = Decompressor("gzip", 10_000)
    inflater.feed(BOMB, last=True)
    while (piece := inflater.step()) is not None:
        assert len(piece) <= CONVERT_CHUNK
        assert inflater.buffered_bytes - (len(BOMB) - inflater.consumed) in (0, STATE)
    assert inflater.produced == 64 * FREE_OUTPUT_BYTES


def test_buffered_bytes_count_pending_input_and_zlib_state() -> None:
    body = gzip.compress(NOISE)
    inflater = Decompressor("gzip", MOST)
    assert inflater.buffered_bytes == 0
    inflater.feed(body[:WINDOW])
    assert inflater.buffered_bytes == WINDOW
    while inflater.step() is not None:
        pass
    assert inflater.buffered_bytes == STATE
    inflater.feed(body[WINDOW:], last=True)
    assert inflater.buffered_bytes == STATE + len(body) - WINDOW
    while inflater.step() is not None:
        pass
    assert inflater.buffered_bytes == 0


# ------------------------------------------------------------------------------- tiny members


def _calls(coding: str, body: bytes) -> int:
    """Count the steps for a whole body; raises GatewayError."""
    inflater = Decompressor(coding, 2000)
    inflater.feed(body, last=True)
    return sum(1 for _ in iter(inflater.step, None))


@pytest.mark.parametrize(
    ("body", "most"),
    [
        (gzip.compress(NOISE * 3), WINDOW + 2),
        # A window may contain a thousand empty members.
        (EMPTY * FREE_MEMBERS, MAX_MEMBERS_PER_STEP * len(EMPTY)),
    ],
    ids=["a large member", "tiny members"],
)
def test_one_window_is_decompressed_at_a_time_or_a_few_members(body: bytes, most: int) -> None:
    inflater = Decompressor("gzip", MOST)
    inflater.feed(body, last=True)
    seen = 0
    while inflater.step() is not None:
        assert inflater.consumed - seen <= most
        seen = inflater.consumed
    assert seen == len(body)


def test_tiny_members_cost_no_more_steps_than_a_large_one() -> None:
    """Each step of the decompressor costs a time slice of the event loop."""
    starts = range(0, len(NOISE), MIN_MEMBER_BYTES)
    parts = [NOISE[at : at + MIN_MEMBER_BYTES] for at in starts] * 20
    apart = b"".join(map(gzip.compress, parts))
    together = gzip.compress(b"".join(parts))
    assert _calls("gzip", apart) <= 2 * _calls("gzip", together)


@pytest.mark.parametrize("text", [b"", b"1", b"[1.5, 2]"])
def test_too_many_tiny_members_are_refused(text: bytes) -> None:
    body = gzip.compress(text, mtime=0) * 2 * FREE_MEMBERS
    found = outcome("gzip", body)
    assert isinstance(found, tuple)
    assert found[0] is ErrorKind.BAD_REQUEST
    assert "too many tiny members: " in found[1]
    assert f"at most {FREE_MEMBERS} are taken, and one more for each 1024 bytes" in found[1]
    assert outcome("gzip", *bytewise(body)) == found
    assert outcome("gzip", body[:5000], body[5000:]) == found


MEMBERS = {
    "as many empty ones as may be": [b""] * FREE_MEMBERS,
    "blocks of bgzip with nothing but zeros in them": [bytes(65280)] * 1000,
    "small ones and as many empty ones": [NOISE[: 2 * MIN_MEMBER_BYTES], b""] * 3000,
}


@pytest.mark.parametrize("parts", MEMBERS.values(), ids=MEMBERS)
def test_many_members_of_reasonable_size_are_accepted(parts: list[bytes]) -> None:
    made = {part: gzip.compress(part, mtime=0) for part in set(parts)}
    body = b"".join(made[part] for part in parts)
    assert outcome("gzip", body, max_ratio=2000) == b"".join(parts)


# Large input that decompresses to nothing.
NAMED = EMPTY[:3] + b"\x08" + EMPTY[4:10] + b"x" * 2_000_000 + b"\0" + EMPTY[10:]
EXTRA = EMPTY[:3] + b"\x04" + EMPTY[4:10] + b"\xff\xff" + b"x" * 65535 + EMPTY[10:]
IDLE = {
    "sync flushes": ("deflate", b"\x00\x00\x00\xff\xff" * 400_000 + b"\x03\x00"),
    "a name of 2 MB": ("gzip", NAMED),
    "extra fields of 64 KiB": ("gzip", EXTRA * 30),
}


@pytest.mark.parametrize(("coding", "body"), IDLE.values(), ids=IDLE)
def test_input_without_output_costs_one_step_per_window(coding: str, body: bytes) -> None:
    assert outcome(coding, body) == b""
    assert outcome(coding, body[:777], body[777:]) == b""
    assert _calls(coding, body) <= len(body) / WINDOW + 30


@pytest.mark.parametrize("kind", ["name", "comment"])
def test_endless_gzip_header_is_not_buffered(kind: str) -> None:
    flag = b"\x08" if kind == "name" else b"\x10"
    inflater = Decompressor("gzip", MOST)
    inflater.feed(EMPTY[:3] + flag + EMPTY[4:10])
    for _ in range(100):
        inflater.feed(b"x" * WINDOW)
        while inflater.step() is not None:
            pass
        assert inflater.buffered_bytes <= STATE + WINDOW
