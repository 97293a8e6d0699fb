"""A program that feeds generated texts to the C module, and checks what it reads.

Each text is read as an array of the datatype that it was made for, and of another one.

Arguments: the module built with sanitizers, seconds, seed, and a file that holds the last text for
whoever looks into a crash. Prints how many texts were read and left; ends with 1 and the text in
question where something was read wrongly.
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
import sys
import time
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from gateway.protocol.datatypes import DATATYPES, Datatype, Family
from tests.codec.exact_rounding import nearest
from tests.fuzz.native.number_texts import any_numbers, broken, cut, pieces, well_formed

_WORDS = ("NaN", "Infinity", "-Infinity")
_INTEGER = re.compile("-?[0-9]+")
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


def _read(native: Any, text: bytes, datatype: Datatype, before: int, after: int) -> bytes | None:
    """Have a text read that fills its memory: each byte read around it is found."""
    address = _libc.malloc(len(text))
    try:
        buffer = (ctypes.c_char * len(text)).from_address(address)
        ctypes.memmove(address, text, len(text))
        view = memoryview(buffer).cast("B")
        code = native.DATATYPES.index(datatype.name)
        result: bytes | None = native.decode_numbers(view, code, before, after)
        view.release()
    finally:
        _libc.free(address)
    return result


def _elements(text: bytes, before: int, after: int) -> list[str]:
    """Return the elements of an array as they are written; raises WrongError where it is none."""
    try:
        array = json.loads(
            (b"[" * before + text + b"]" * after).decode("ascii"),
            parse_int=_Token,
            parse_float=_Token,
            parse_constant=_Token,
        )
    except ValueError as error:
        raise WrongError(f"this is no JSON ({error}), but was read") from None
    if (before and text.strip()[:1] in b"]") or (after and text.strip()[-1:] in b"["):
        raise WrongError("an element is missing beside a comma, but this was read")
    elements: list[str] = []
    waiting = [(array, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, list):
            if depth == _DEEPEST:
                raise WrongError(f"nested deeper than {_DEEPEST}, but was read")
            waiting += [(item, depth + 1) for item in reversed(value)]
        elif isinstance(value, (_Token, bool)) and depth:
            elements.append(str(value).lower() if isinstance(value, bool) else value)
        else:
            raise WrongError(f"{value!r} is no element of an array, but was read")
    return elements


def _exact(element: str, datatype: Datatype) -> bytes:
    """Return the binary form of an element; raises WrongError if it has none."""
    expected: bytes | None = None
    if element in ("true", "false") or datatype.family is Family.BOOLEAN:
        words = {"true": b"\1", "false": b"\0"} if datatype.family is Family.BOOLEAN else {}
        expected = words.get(element)
    elif datatype.integers is not None:
        limits = datatype.integers
        if _INTEGER.fullmatch(element) and limits.least <= int(element) <= limits.most:
            expected = struct.pack(f"<{datatype.struct_code}", int(element))
    elif element in _WORDS:
        expected = np.array([float(element)], datatype.dtype).tobytes()
    else:
        expected = nearest(element, datatype.name)
    if expected is None:
        raise WrongError(f"{element} does not fit {datatype.name}, but was read")
    return expected


def _check(elements: list[str], datatype: Datatype, found: bytes) -> None:
    size = datatype.size
    assert size is not None
    if len(found) != len(elements) * size:
        raise WrongError(f"{len(found) // size} elements were read of {len(elements)}")
    for index, element in enumerate(elements):
        expected, read = _exact(element, datatype), found[index * size : (index + 1) * size]
        if read != expected:
            raise WrongError(
                f"{element} was read as {datatype.name} {read.hex()}, not {expected.hex()}"
            )


def main(module: str, seconds: float, seed: str, last: Path) -> None:
    """Feed texts for so many seconds."""
    native, rng = _load(module), Random(seed)
    datatypes = [DATATYPES[name] for name in native.DATATYPES]
    counts = {"read": 0, "left": 0}
    end = time.monotonic() + seconds
    with last.open("wb", buffering=0) as file:
        while time.monotonic() < end:
            make = rng.choice((well_formed, any_numbers, broken, pieces))
            made_for = rng.choice(datatypes)
            text, before, after = make(rng, made_for), 0, 0
            if rng.random() < 0.3:
                text, before, after = cut(rng, text)
            is_whole = make is well_formed and not before and not after
            file.seek(0)
            file.write(text)
            file.truncate()
            for datatype in (made_for, rng.choice(datatypes)):
                found = _read(native, text, datatype, before, after)
                counts["left" if found is None else "read"] += 1
                if found is not None:
                    _check(_elements(text, before, after), datatype, found)
                elif is_whole and datatype is made_for and text.count(b"[") < _DEEPEST / 2:
                    raise WrongError(f"this is well-formed {datatype.name}, but was left")
    print(json.dumps(counts))


if __name__ == "__main__":
    try:
        main(sys.argv[1], float(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    except WrongError as wrong:
        sys.exit(f"{wrong}:\n{Path(sys.argv[4]).read_bytes()!r}")
