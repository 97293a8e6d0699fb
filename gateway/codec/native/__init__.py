"""What is written in C, and runs without the interpreter's lock; None where it is not compiled.

It gives up on what it is not sure of: callers then go the pure way, which words all errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gateway.codec.native import _native


class _DecodeNumbers(Protocol):
    def __call__(
        self,
        text: bytes | memoryview,
        datatype: int,
        open_before: int = 0,
        open_after: int = 0,
        /,
    ) -> bytes | None: ...


class _EncodeNumbers(Protocol):
    def __call__(
        self, data: bytes | memoryview, datatype: int, nonfinite: int = 0, /
    ) -> bytes | None: ...


class _ScanNumbers(Protocol):
    def __call__(
        self, buffer: bytes, start: int, end: int, /
    ) -> tuple[int, int, int, int, int, int, int]: ...


decode_numbers: _DecodeNumbers | None
encode_numbers: _EncodeNumbers | None
scan_numbers: _ScanNumbers | None
ThreadPool: type[_native.ThreadPool] | None
try:
    from gateway.codec.native._native import (
        DATATYPES,
        ThreadPool,
        decode_numbers,
        encode_numbers,
        scan_numbers,
    )
except ImportError:
    DATATYPES = ()
    decode_numbers = encode_numbers = scan_numbers = ThreadPool = None

DATATYPE_CODES = {name: code for code, name in enumerate(DATATYPES)}
"""The code of each datatype that the module knows, by name."""
