"""Checks that the C module writes all 2**32 FP32 values as orjson does; takes minutes.

Run it by hand: ``python -m tests.codec.native.all_floats [first] [last]``, where the bounds are bit
patterns, 0 and 2**32 unless told. Ends with 1 at the first difference.
"""

from __future__ import annotations

import sys

import numpy as np
import orjson

from gateway.build_info import NATIVE
from gateway.codec.native import DATATYPE_CODES, encode_numbers

_CHUNK = 1 << 20


def main(first: int = 0, last: int = 2**32) -> str | None:
    """Compare the text of all bit patterns; return a description of the first difference."""
    assert NATIVE, "the C module is not compiled"
    for start in range(first, last, _CHUNK):
        bits = np.arange(start, min(start + _CHUNK, last), dtype=np.uint64).astype("<u4")
        found = encode_numbers(bits.tobytes(), DATATYPE_CODES["FP32"], 1)
        expected = orjson.dumps(bits.view("<f4"), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        if found != expected:
            assert found is not None
            pairs = zip(found.split(b","), expected.split(b","), strict=True)
            offset, (wrong, right) = next(
                (index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1]
            )
            return f"{start + offset:#010x} is written as {wrong.decode()}, not {right.decode()}"
        if start % (_CHUNK << 6) == 0:
            print(f"{start:#010x}", flush=True)
    return None


if __name__ == "__main__":
    sys.exit(main(*(int(argument, 0) for argument in sys.argv[1:])))
