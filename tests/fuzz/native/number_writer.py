"""A program that feeds generated elements to the C module, and checks the text that it writes.

harness.py tells its arguments.
"""

from __future__ import annotations

import json
import math
import struct
import time
from pathlib import Path
from random import Random
from typing import Any

from tests.codec.exact_rounding import nearest
from tests.fuzz.native.harness import LastInput, WrongError, call, load, run

_CODES = {
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
    "BF16": "H",
    "BOOL": "B",
}
"""Datatypes as the struct module has them; BF16 as an integer."""

_NONFINITE = (None, ("null",) * 3, ("NaN", "Infinity", "-Infinity"))
_WORDS = (*_NONFINITE, ('"NaN"', '"Infinity"', '"-Infinity"'))
"""How NaN and the infinities are written, by policy."""

_POSITIONAL = {4: range(-6, 13), 8: range(-5, 16)}
"""The exponents of floats that are written without one."""


def _write(native: Any, data: bytes, datatype: str, *more: Any) -> bytes | None:
    """Have elements written that are mostly unaligned."""
    code = native.DATATYPES.index(datatype)
    result: bytes | None = call(native.encode_numbers, data, code, *more, offset=1)
    return result


def _float_text(value: float, size: int) -> str:
    """Write a float with the fewest digits that give it back."""
    if value == 0:
        return "-0.0" if math.copysign(1, value) < 0 else "0.0"
    sign, value = "-" if value < 0 else "", abs(value)
    text = _shortest(value, size)
    mantissa, _, exponent_text = text.partition("e")
    digits, exponent = mantissa.replace(".", "").rstrip("0"), int(exponent_text)
    if exponent not in _POSITIONAL[size]:
        point = "." if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{point}{digits[1:]}e{exponent:+d}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    whole = digits[: exponent + 1].ljust(exponent + 1, "0")
    return f"{sign}{whole}.{digits[exponent + 1 :] or '0'}"


def _shortest(value: float, size: int) -> str:
    """Write a float with an exponent; each number of digits is rounded once, from the value."""
    texts = (f"{value:.{count}e}" for count in range(17))
    if size == 8:
        return next(text for text in texts if float(text) == value)
    packed = struct.pack("<f", value)
    return next(text for text in texts if nearest(text, "FP32") == packed)


def _is_power_of_two(value: float) -> bool:
    return math.frexp(abs(value))[0] == 0.5


def _value(element: bytes, datatype: str) -> int | float:
    if datatype == "BF16":
        element, datatype = b"\0\0" + element, "FP32"
    value: int | float = struct.unpack("<" + _CODES[datatype], element)[0]
    return value


def _expected(element: bytes, datatype: str, policy: int) -> str | None:
    """Return the text of an element, None where it is refused."""
    value = _value(element, datatype)
    if datatype == "BOOL":
        return {0: "false", 1: "true"}.get(int(value))
    if isinstance(value, int):
        return str(value)
    words = _WORDS[policy]
    if not math.isfinite(value):
        return words and words[0 if math.isnan(value) else 1 if value > 0 else 2]
    return _float_text(value, 8 if datatype == "FP64" else 4)


def _is_right(found: str, expected: str | None, element: bytes, datatype: str) -> bool:
    if found == expected:
        return True
    value = _value(element, datatype)
    if not isinstance(value, float) or not math.isfinite(value) or not _is_power_of_two(value):
        return False
    # The nearest number with fewer digits may be outside of the interval, and another within.
    if datatype == "FP64":
        return float(found) == value
    return nearest(found, "FP32") == struct.pack("<f", value)


def _check(found: bytes | None, elements: list[bytes], datatype: str, policy: int) -> None:
    expected = [_expected(element, datatype, policy) for element in elements]
    if found is None or None in expected:
        if found is not None or None not in expected:
            raise WrongError(f"{expected} of {datatype} was written as {found!r}")
        return
    texts = found.decode().split(",") if found else []
    if len(texts) != len(elements):
        raise WrongError(f"{len(elements)} elements were written as {found!r}")
    for text, right, element in zip(texts, expected, elements, strict=True):
        if not _is_right(text, right, element, datatype):
            raise WrongError(f"{datatype} {element.hex()} was written as {text}, not {right}")


def _element(rng: Random, datatype: str) -> bytes:
    code = _CODES[datatype]
    size = struct.calcsize(code)
    kind = rng.randrange(6)
    if datatype == "BOOL":
        return bytes((rng.randrange(2),)) if kind else rng.randbytes(1)
    if kind == 0 or datatype == "BF16":
        return rng.randbytes(size)
    if code not in "efd":
        bits = rng.getrandbits(rng.randint(1, 8 * size))
        return (bits | (kind == 1) << (8 * size - 1)).to_bytes(size, "little")
    if kind == 1:  # often halfway between two decimals, or at an end of an interval
        value = math.ldexp(rng.getrandbits(rng.randint(1, 53)), -rng.randint(-60, 80))
    elif kind == 2:
        value = rng.randint(-(10**6), 10**6) / 10 ** rng.randint(0, 8)
    elif kind == 3:
        value = math.ldexp(rng.choice((1, -1)), rng.randint(-1074, 1023))
    elif kind == 4:
        value = rng.gauss(0, 1)
    else:
        value = rng.choice((0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e16, 1e-7))
    try:
        return struct.pack("<" + code, value)
    except OverflowError:
        return rng.randbytes(size)


def main(module: str, seconds: float, seed: str, last: Path) -> None:
    """Feed elements for so many seconds."""
    native, rng = load(module), Random(seed)
    counts = {"written": 0, "refused": 0}
    last_input = LastInput(last)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        datatype, policy = rng.choice([*_CODES]), rng.randrange(4)
        elements = [_element(rng, datatype) for _ in range(rng.choice((0, 1, 2, 5, 60)))]
        data = b"".join(elements)
        last_input.write(f"{datatype} {policy} {data.hex()}".encode())
        found = _write(native, data, datatype, policy)
        counts["refused" if found is None else "written"] += 1
        _check(found, elements, datatype, policy)
        if found:
            rows = _write(native, data, datatype, policy, (len(elements), 1, 1))
            expected = "],[[".join(f"{each}]" for each in found.decode().split(","))
            if rows != f"[[{expected}]".encode():
                raise WrongError(f"{found!r} was nested as {rows!r}")
    print(json.dumps(counts))


if __name__ == "__main__":
    run(main)
