"""What is written in C, and runs without the interpreter's lock; None where it is not compiled.

It gives up on what it is not sure of: callers then go the pure way, which words all errors.
"""

from __future__ import annotations

from typing import Protocol


class _DecodeNumbers(Protocol):
    def __call__(
        self,
        text: bytes | memoryview,
        datatype: int,
        open_before: int = 0,
        open_after: int = 0,
        /,
    ) -> bytes | None: ...


decode_numbers: _DecodeNumbers | None
try:
    from gateway.codec.native._native import DATATYPES, decode_numbers
except ImportError:
    DATATYPES = ()
    decode_numbers = None

DATATYPE_CODES = {name: code for code, name in enumerate(DATATYPES)}
"""The code of each datatype that the module knows, by name."""
