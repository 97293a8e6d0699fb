"""Breaks valid bytes by chance, and cuts them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

from tests.http1.splits import bytewise, cut
from tests.support.scale import fuzz_seconds

MIN_ROUNDS = 50
"""What is tried however short the time is."""


ROUND = "TENSORGATE_FUZZ_ROUND"
"""In the environment, the number of the one round to try: that which failed."""

last_round = -1
"""The number of the round that began last in this process."""


def rounds(full: float) -> Iterator[random.Random]:
    """Yield a source of chance for each round, for so many seconds of a full run.

    The number of a round is its seed; a failed test tells it (tests/fuzz/conftest.py).
    """
    global last_round  # for the report of a test that fails in the round
    if ROUND in os.environ:
        last_round = int(os.environ[ROUND])
        yield random.Random(last_round)
        return
    end = time.monotonic() + fuzz_seconds(full)
    number = 0
    while number < MIN_ROUNDS or time.monotonic() < end:
        last_round = number
        yield random.Random(number)
        number += 1


def broken(chance: random.Random, data: bytes, changes: int = 3) -> bytes:
    """Change bytes in a few places."""
    found = bytearray(data)
    for _ in range(chance.randint(1, changes)):
        at = chance.randrange(len(found) + 1)
        size = chance.randint(1, 12)
        change = chance.randrange(6)
        if change == 0:
            del found[at:]
        elif change == 1:
            del found[at : at + size]
        elif change == 2:
            found[at:at] = chance.randbytes(size)
        elif change == 3:
            found[at:at] = found[at : at + size]
        elif at < len(found):
            found[at] = found[at] ^ 1 << chance.randrange(8) if change == 4 else chance.choice(_ODD)
    return bytes(found)


_ODD = b"\x00\x01\x7f\x80\xfe\xff"


def pieces(chance: random.Random, data: bytes) -> list[bytes]:
    """Cut bytes anywhere, into few pieces or into single bytes."""
    if len(data) < 2000 and not chance.randrange(8):
        return bytewise(data)
    return cut(data, [chance.randrange(len(data) + 1) for _ in range(chance.randint(1, 8))])
