"""A program that feeds generated texts to the C module, and checks what it reads.

Arguments: the module built with sanitizers, seconds, seed, and a file that holds the last text for
whoever looks into a crash. Prints how many texts were read and left; ends with 1 and the text in
question where something was read wrongly.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import time
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from typing import Any

from tests.codec.exact_rounding import nearest
from tests.fuzz.number_texts import any_numbers, broken, pieces, well_formed

_DATATYPES = {4: "FP32", 8: "FP64"}
_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_DEEPEST = 64

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


class WrongError(Exception):
    """The module read something that it should not have, or read it wrongly."""


class _Token(str):
    """A number as it stands in the text."""

    __slots__ = ()


def _load(path: str) -> Any:
    spec = spec_from_file_location("_native", path, loader=ExtensionFileLoader("_native", path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(native: Any, text: bytes, size: int) -> bytes | None:
    """Have a text read that ends where its memory ends: each byte read beyond it is found."""
    address = _libc.malloc(len(text))
    try:
        buffer = (ctypes.c_char * len(text)).from_address(address)
        ctypes.memmove(address, text, len(text))
        view = memoryview(buffer).cast("B")
        code = native.DATATYPES.index(_DATATYPES[size])
        result: bytes | None = native.decode_numbers(view, code)
        view.release()
    finally:
        _libc.free(address)
    return result


def _numbers(text: bytes) -> list[str]:
    """Return the numbers of an array as they are written; raises WrongError where it is none."""
    try:
        array = json.loads(
            text.decode("ascii"), parse_int=_Token, parse_float=_Token, parse_constant=_Token
        )
    except ValueError as error:
        raise WrongError(f"this is no JSON ({error}), but was read") from None
    numbers: list[str] = []
    waiting = [(array, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, list):
            if depth == _DEEPEST:
                raise WrongError(f"nested deeper than {_DEEPEST}, but was read")
            waiting += [(item, depth + 1) for item in reversed(value)]
        elif isinstance(value, _Token) and depth:
            numbers.append(value)
        else:
            raise WrongError(f"{value!r} is no number of an array, but was read")
    return numbers


def _exact(number: str, size: int) -> bytes:
    if number in _WORDS:
        return struct.pack("<f" if size == 4 else "<d", _WORDS[number])
    expected = nearest(number, _DATATYPES[size])
    if expected is None:
        raise WrongError(f"{number} does not fit, but was read")
    return expected


def _check(text: bytes, size: int, found: bytes) -> None:
    numbers = _numbers(text)
    if len(found) != len(numbers) * size:
        raise WrongError(f"{len(found) // size} numbers were read of {len(numbers)}")
    for index, number in enumerate(numbers):
        expected, read = _exact(number, size), found[index * size : (index + 1) * size]
        if read != expected:
            raise WrongError(
                f"{number} was read as {_DATATYPES[size]} {read.hex()}, not {expected.hex()}"
            )


def main(module: str, seconds: float, seed: str, last: Path) -> None:
    """Feed texts for so many seconds."""
    native, rng = _load(module), Random(seed)
    counts = {"read": 0, "left": 0}
    end = time.monotonic() + seconds
    with last.open("wb", buffering=0) as file:
        while time.monotonic() < end:
            make = rng.choice((well_formed, any_numbers, broken, pieces))
            text = make(rng)
            file.seek(0)
            file.write(text)
            file.truncate()
            for size in _DATATYPES:
                found = _read(native, text, size)
                counts["left" if found is None else "read"] += 1
                if found is not None:
                    _check(text, size, found)
                elif make is well_formed and text.count(b"[") < _DEEPEST / 2:
                    raise WrongError("this is well-formed, but was left")
    print(json.dumps(counts))


if __name__ == "__main__":
    try:
        main(sys.argv[1], float(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    except WrongError as wrong:
        sys.exit(f"{wrong}:\n{Path(sys.argv[4]).read_bytes()!r}")
