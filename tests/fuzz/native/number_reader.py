"""A program that feeds generated texts to the C module, and checks what it reads.

Each text is read as an array of the datatype that it was made for, and of another one.

harness.py tells its arguments.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from gateway.protocol.datatypes import DATATYPES, Datatype, Family
from tests.codec.exact_rounding import nearest
from tests.codec.reference import DTYPES
from tests.fuzz.native.harness import LastInput, WrongError, call, load, run
from tests.fuzz.native.number_texts import any_numbers, broken, cut, pieces, well_formed

_WORDS = ("NaN", "Infinity", "-Infinity")
_INTEGER = re.compile("-?[0-9]+")
_DEEPEST = 64


class _Token(str):
    """A number as it stands in the text."""

    __slots__ = ()


def _read(
    native: Any, text: bytes, datatype: Datatype, before: int, after: int, null_is_nan: bool
) -> bytes | None:
    code = native.DATATYPES.index(datatype.name)
    result: bytes | None = call(native.decode_numbers, text, code, before, after, null_is_nan)
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
        elif isinstance(value, _Token) and depth:
            elements.append(value)
        elif (value is None or isinstance(value, bool)) and depth:
            elements.append(json.dumps(value))
        else:
            raise WrongError(f"{value!r} is no element of an array, but was read")
    return elements


def _exact(element: str, datatype: Datatype, null_is_nan: bool) -> bytes:
    """Return the binary form of an element; raises WrongError if it has none."""
    expected: bytes | None = None
    if element in ("true", "false") or datatype.family is Family.BOOLEAN:
        words = {"true": b"\1", "false": b"\0"} if datatype.family is Family.BOOLEAN else {}
        expected = words.get(element)
    elif datatype.integers is not None:
        limits = datatype.integers
        if _INTEGER.fullmatch(element) and limits.least <= int(element) <= limits.most:
            expected = np.array([int(element)], datatype.dtype).tobytes()
    elif element == "null":
        expected = np.array([np.nan], DTYPES[datatype.name]).tobytes() if null_is_nan else None
    elif element in _WORDS:
        expected = np.array([float(element)], DTYPES[datatype.name]).tobytes()
    else:
        expected = nearest(element, datatype.name)
    if expected is None:
        raise WrongError(f"{element} does not fit {datatype.name}, but was read")
    return expected


def _check(elements: list[str], datatype: Datatype, null_is_nan: bool, found: bytes) -> None:
    size = datatype.size
    assert size is not None
    if len(found) != len(elements) * size:
        raise WrongError(f"{len(found) // size} elements were read of {len(elements)}")
    for index, element in enumerate(elements):
        expected = _exact(element, datatype, null_is_nan)
        read = found[index * size : (index + 1) * size]
        if read != expected:
            raise WrongError(
                f"{element} was read as {datatype.name} {read.hex()}, not {expected.hex()}"
            )


def _is_valid(text: bytes, before: int, after: int, datatype: Datatype, null_is_nan: bool) -> bool:
    try:
        for element in _elements(text, before, after):
            _exact(element, datatype, null_is_nan)
    except WrongError:
        return False
    return True


def main(module: str, seconds: float, seed: str, last: Path) -> None:
    """Feed texts for so many seconds."""
    native, rng = load(module), Random(seed)
    datatypes = [DATATYPES[name] for name in native.DATATYPES]
    counts = {"read": 0, "left": 0}
    last_input = LastInput(last)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        make = rng.choice((well_formed, any_numbers, broken, pieces))
        made_for = rng.choice(datatypes)
        text, before, after = make(rng, made_for), 0, 0
        if rng.random() < 0.3:
            text, before, after = cut(rng, text)
        null_is_nan = rng.random() < 0.5
        if null_is_nan and rng.random() < 0.5:
            text = text.replace(b"NaN", b"null")
        last_input.write(text)
        for datatype in (made_for, rng.choice(datatypes)):
            found = _read(native, text, datatype, before, after, null_is_nan)
            counts["left" if found is None else "read"] += 1
            if found is not None:
                _check(_elements(text, before, after), datatype, null_is_nan, found)
            elif _is_valid(text, before, after, datatype, null_is_nan):
                raise WrongError(f"this is valid {datatype.name}, but was left")
    print(json.dumps(counts))


if __name__ == "__main__":
    run(main)
