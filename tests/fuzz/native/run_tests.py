"""A program that runs tests of a C module with one that is built with sanitizers.

Its arguments: the module, and those of pytest. Data are passed in memory that ends where they end,
so that each byte read beyond them is found. They begin anywhere in it, and so may be unaligned.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import pytest

PACKAGES = {"_native": "gateway.codec.native", "_heads": "gateway.http1.native"}
"""The package of each C module."""

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_calls = count()


def load(path: str, name: str) -> ModuleType:
    """Load the module from a file."""
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def within_bounds(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function called with a copy of its data."""

    def call(data: bytes | memoryview, *arguments: object) -> Any:
        offset = next(_calls) % 8
        address = _libc.malloc(offset + len(data))
        try:
            memory = (ctypes.c_char * (offset + len(data))).from_address(address)
            ctypes.memmove(address + offset, bytes(data), len(data))
            view = memoryview(memory).cast("B")[offset:]
            result = function(view, *arguments)
            if isinstance(result, tuple):
                result = tuple(map(_copy_view, result))
            view.release()
        finally:
            _libc.free(address)
        return result

    return call


def _copy_view(part: Any) -> Any:
    """Copy a view of the data, which are freed."""
    return memoryview(bytes(part)) if isinstance(part, memoryview) else part


def main(path: str, *arguments: str) -> int:
    name = Path(path).name.partition(".")[0]
    native, checked = load(path, name), ModuleType(name)
    for key, each in vars(native).items():
        has_data = isinstance(each, BuiltinFunctionType) and key != "scan_numbers"
        setattr(checked, key, within_bounds(each) if has_data else each)
    sys.modules[f"{PACKAGES[name]}.{name}"] = checked
    return pytest.main([*arguments, "-qxs", "-p", "no:cacheprovider"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
