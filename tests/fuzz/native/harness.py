"""What the programs share that feed generated input to the C module built with sanitizers.

Their arguments: the module, seconds, seed, and a file that holds the last input for whoever looks
into a crash. They print counts, and end with 1 and the input in question where anything is wrong.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


class WrongError(Exception):
    """The module converted something that it should not have, or converted it wrongly."""


class LastInput:
    """The file with the input that was fed last."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        self._file.seek(0)
        self._file.write(data)
        self._file.truncate()


def load(path: str) -> Any:
    """Load the module from a file."""
    spec = spec_from_file_location("_native", path, loader=ExtensionFileLoader("_native", path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(function: Callable[..., Any], data: bytes, *arguments: object, offset: int = 0) -> Any:
    """Call with data that end where their memory ends: each byte read beyond it is found.

    They begin ``offset`` bytes behind its start, and so may be unaligned.
    """
    size = offset + len(data)
    address = _libc.malloc(size)
    try:
        buffer = (ctypes.c_char * size).from_address(address)
        ctypes.memmove(address + offset, data, len(data))
        view = memoryview(buffer).cast("B")[offset:]
        result = function(view, *arguments)
        view.release()
    finally:
        _libc.free(address)
    return result


def run(main: Callable[[str, float, str, Path], None]) -> None:
    """Run a program's ``main`` with its arguments."""
    module, seconds, seed, last = sys.argv[1:]
    try:
        main(module, float(seconds), seed, Path(last))
    except WrongError as wrong:
        sys.exit(f"{wrong}:\n{Path(last).read_bytes()!r}")
