"""Reads and writes packed varints by numpy, without a Python object per element."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gateway.protocol.grpc.wire import Buffer, WireError
from gateway.sizes import CONVERT_CHUNK

Values = npt.NDArray[np.uint64]

_BLOCK: Final = CONVERT_CHUNK
"""Bytes decoded, or elements encoded, at once: it bounds the memory of intermediate arrays."""

_MAX_BYTES: Final = 10


def decode_varints(data: Buffer, offset: int = 0) -> Iterator[Values]:
    """Yield packed varints in order, in blocks; ``offset`` is where the data stand, for errors.

    Bits above the 64th are dropped, as the official runtime does. Raises WireError for a varint of
    more than 10 bytes, or one that is cut short.
    """
    codes = np.frombuffer(data, np.uint8)
    start = 0
    while start < codes.size:
        block = codes[start : start + _BLOCK]
        lasts = np.flatnonzero(block < 128)
        if not lasts.size:
            if block.size < _MAX_BYTES:
                raise WireError("a varint that is cut short", offset + start)
            raise WireError(f"a varint of more than {_MAX_BYTES} bytes", offset + start)
        size = int(lasts[-1]) + 1
        yield _decode_block(block[:size], lasts, offset + start)
        start += size


def _decode_block(block: npt.NDArray[np.uint8], lasts: npt.NDArray[np.intp], offset: int) -> Values:
    """Decode complete varints; ``lasts`` are the indices of their last bytes."""
    if lasts.size == block.size:
        return block.astype(np.uint64)
    starts = np.empty_like(lasts)
    starts[0] = 0
    starts[1:] = lasts[:-1] + 1
    extra = lasts - starts
    longest = int(extra.max())
    if longest >= _MAX_BYTES:
        first = int(starts[np.argmax(extra >= _MAX_BYTES)])
        raise WireError(f"a varint of more than {_MAX_BYTES} bytes", offset + first)
    bits = block & 127
    values: Values = bits[starts].astype(np.uint64)
    # Numbers of one array are mostly of a few lengths, so there are few rounds.
    if int(extra.min()) == longest:
        for index in range(1, longest + 1):
            values |= bits[starts + index].astype(np.uint64) << np.uint64(7 * index)
        return values
    for index in range(1, longest + 1):
        longer = np.flatnonzero(extra >= index)
        part = bits[starts[longer] + index].astype(np.uint64)
        values[longer] |= part << np.uint64(7 * index)
    return values


def encode_varints(values: npt.NDArray[Any]) -> Iterator[bytes]:
    """Yield integers as packed varints, in blocks; negative ones take 10 bytes."""
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        if block.dtype.kind == "i":
            yield _encode_block(block.astype(np.int64).view(np.uint64))
        else:
            yield _encode_block(block.astype(np.uint64))


def _encode_block(values: Values) -> bytes:
    most = int(values.max())
    if most < 128:
        return values.astype(np.uint8).tobytes()
    longest = -(-most.bit_length() // 7)
    sizes = np.ones(values.size, np.intp)
    for index in range(1, longest):
        sizes += values >= np.uint64(1 << 7 * index)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    codes = np.empty(int(ends[-1]), np.uint8)
    codes[starts] = (values & np.uint64(127)) | np.uint64(128)
    for index in range(1, longest):
        longer = np.flatnonzero(sizes > index)
        part = (values[longer] >> np.uint64(7 * index)) & np.uint64(127)
        codes[starts[longer] + index] = part | np.uint64(128)
    codes[ends - 1] &= 127
    return codes.tobytes()
