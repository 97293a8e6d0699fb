from __future__ import annotations

from typing import Any

import hyperframe.frame as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http2.errors import ErrorCode
from gateway.http2.frame_writer import (
    SETTINGS_ACK,
    encode_data_header,
    encode_goaway,
    encode_headers,
    encode_ping,
    encode_rst_stream,
    encode_settings,
    encode_window_update,
)
from tests.http1.splits import LAW
from tests.http2.frame_bytes import read

_STREAMS = st.integers(1, 2**31 - 1)
_WORDS = st.integers(0, 2**32 - 1)


def _parse(text: bytes) -> list[Any]:
    """Parse frames with hyperframe, and see that it would write the same bytes."""
    frames: list[Any] = []
    while text:
        each, length = oracle.Frame.parse_frame_header(memoryview(text[:9]), strict=True)
        each.parse_body(memoryview(text[9 : 9 + length]))
        assert each.serialize() == text[: 9 + length]
        frames.append(each)
        text = text[9 + length :]
    return frames


@LAW
@given(_STREAMS, st.binary(max_size=200), st.booleans(), st.integers(1, 100))
def test_header_blocks_are_split_where_frames_are_too_small(
    stream: int, block: bytes, end_stream: bool, size: int
) -> None:
    frames = _parse(encode_headers(stream, block, end_stream, size))
    assert isinstance(frames[0], oracle.HeadersFrame)
    assert all(isinstance(each, oracle.ContinuationFrame) for each in frames[1:])
    assert all(each.stream_id == stream and len(each.data) <= size for each in frames)
    assert b"".join(each.data for each in frames) == block
    assert ["END_HEADERS" in each.flags for each in frames] == [
        *[False] * (len(frames) - 1),
        True,
    ]
    assert ["END_STREAM" in each.flags for each in frames] == [
        end_stream,
        *[False] * (len(frames) - 1),
    ]


def test_header_block_of_exactly_one_frame_has_no_continuation() -> None:
    for size in (0, 1, 2**14 - 1, 2**14):
        assert len(_parse(encode_headers(1, bytes(size), False))) == 1
    assert [len(each.data) for each in _parse(encode_headers(1, bytes(2**14 + 1), False))] == [
        2**14,
        1,
    ]


@LAW
@given(_STREAMS, _WORDS, st.booleans(), st.binary(min_size=8, max_size=8))
def test_hyperframe_reads_each_frame(stream: int, word: int, flag: bool, data: bytes) -> None:
    text = encode_data_header(stream, len(data), flag) + data
    assert _parse(text)[0].data == data
    assert read([text]) == [("DATA", stream, data, 8, flag)]

    (reset,) = _parse(encode_rst_stream(stream, word))
    assert (reset.stream_id, reset.error_code) == (stream, word)

    (ping,) = _parse(encode_ping(data, flag))
    assert (ping.opaque_data, "ACK" in ping.flags) == (data, flag)

    (goaway,) = _parse(encode_goaway(stream, word, data))
    assert (goaway.last_stream_id, goaway.error_code) == (stream, word)
    assert goaway.additional_data == data

    (update,) = _parse(encode_window_update(stream if flag else 0, word >> 1 or 1))
    assert (update.stream_id, update.window_increment) == (stream if flag else 0, word >> 1 or 1)


@LAW
@given(st.dictionaries(st.integers(7, 255), _WORDS, max_size=6))
def test_hyperframe_reads_settings(values: dict[int, int]) -> None:
    (settings,) = _parse(encode_settings(values.items()))
    assert settings.settings == values
    assert not settings.flags


def test_settings_are_acknowledged() -> None:
    assert read([SETTINGS_ACK]) == [("SettingsFrame", 0, True, [])]


@pytest.mark.parametrize("code", ErrorCode)
def test_error_codes_are_sent_as_numbers(code: ErrorCode) -> None:
    assert encode_rst_stream(1, code)[-4:] == bytes([0, 0, 0, code.value])
    assert encode_goaway(0, code)[-4:] == bytes([0, 0, 0, code.value])
