"""Generates the text of arrays of a datatype: well-formed ones, near ties, and broken ones."""

from __future__ import annotations

import struct
from fractions import Fraction
from random import Random

from gateway.protocol.datatypes import Datatype, Family
from tests.codec.exact_rounding import FORMATS, tie, written

_FORMATS = FORMATS | {"FP64": (53, -1022, 1023)}
_WORDS = ("NaN", "Infinity", "-Infinity")
_PIECES = (
    *("NaN", "Infinity", "-", "+", ".", "e", "E", "e+", "0", "00", "1e", "[", "]", ",", "[]", " "),
    *("\n", "\t", "\r", "\0", "\x0b", "null", "true", '"1"', "{}", "Na", "aN", "Infinit", "e99999"),
    *("false", "tru", "fals", "truefalse", "255", "256", "-129", "18446744073709551616"),
    *(
        "12345678",
        "00000000",
        "99999999999999999999",
        "0.",
        "-0",
        "e-400",
        "e400",
        "\x80",
        "/",
        ":",
    ),
)
_SPACES = ("", "", "", " ", "\n", "\t\r ")


def well_formed(rng: Random, datatype: Datatype) -> bytes:
    """Generate an array that every reader takes as one of the datatype."""
    return _array(rng, lambda: _common(rng, datatype)).encode()


def any_numbers(rng: Random, datatype: Datatype) -> bytes:
    """Generate an array as JSON has it, or clients write it; some elements may not fit."""
    return _array(rng, lambda: _number(rng, datatype)).encode()


def pieces(rng: Random, datatype: Datatype) -> bytes:
    """Generate a short text of what arrays are made of, in any order."""
    digits = ("true", "false") if datatype.family is Family.BOOLEAN else ("0", "1", "9")
    inner = rng.choices((*digits, ",", ",", "[", "]", rng.choice(_PIECES)), k=rng.randint(0, 9))
    return f"[{''.join(inner)}{rng.choice((']', ']', ''))}".encode("latin-1")


def broken(rng: Random, datatype: Datatype) -> bytes:
    """Generate an array, and change it at a few places."""
    text = bytearray(rng.choice((well_formed, any_numbers))(rng, datatype))
    for _ in range(rng.randint(1, 4)):
        _change(text, rng)
    return bytes(text)


def cut(rng: Random, text: bytes) -> tuple[bytes, int, int]:
    """Take brackets off both ends of a text; return it, and how many are open around it."""
    before, after = rng.randint(0, 2), rng.randint(0, 2)
    for _ in range(before):
        text = text.lstrip().removeprefix(b"[")
    for _ in range(after):
        text = text.rstrip().removesuffix(b"]")
    return text, before, after


def _common(rng: Random, datatype: Datatype) -> str:
    """Write an element of a size that fits, mostly as clients do."""
    if datatype.family is Family.BOOLEAN:
        return rng.choice(("true", "false"))
    if datatype.integers is not None:
        limits = datatype.integers
        size = 10 ** rng.randint(0, 20)
        return str(max(limits.least, min(limits.most, rng.randint(-size, size))))
    most = 4 if datatype.name == "FP16" else 30
    kind = rng.randrange(6)
    if kind == 0:
        size = 10 ** rng.randint(0, min(most, 18))
        return str(rng.randint(-size, size))
    if kind == 1:
        return repr(rng.uniform(-1, 1) * 10.0 ** rng.randint(-30, most))
    if kind == 2:
        return repr(struct.unpack("<f", struct.pack("<f", rng.gauss(0, 1)))[0])
    if kind == 3:
        return f"{rng.uniform(-999, 999):.{rng.randint(0, 15)}f}"
    if kind == 4:
        precision, least, _ = _FORMATS[datatype.name]
        return _near_tie(rng, (precision, least, 3))
    return rng.choice((*_WORDS, "0", "-0", "-0.0", "1", "255", "1e4", "1E-5", "2.5e+3"))


def _number(rng: Random, datatype: Datatype) -> str:
    """Write a number of any size, mostly of the datatype's family."""
    kind = rng.randrange(5)
    if kind == 0:
        return _common(rng, datatype)
    if datatype.integers is not None and rng.random() < 0.9:
        edge = rng.choice((datatype.integers.least, datatype.integers.most, 0, 2**64, 10**19))
        return str(edge + rng.randint(-2, 2) if kind < 4 else rng.getrandbits(rng.randint(1, 80)))
    if kind == 1:
        return (
            repr(struct.unpack("<d", rng.randbytes(8))[0])
            .replace("inf", "Infinity")
            .replace("nan", "NaN")
        )
    if kind == 2:
        return _near_tie(rng, rng.choice(list(_FORMATS.values())))
    if kind == 3:
        return _digits(rng, 24) + rng.choice(("", "." + _any_digits(rng, 24))) + _exponent(rng)
    return rng.choice(("-", "")) + "0." + "0" * rng.randint(0, 330) + _any_digits(rng, 20)


def _near_tie(rng: Random, of: tuple[int, int, int]) -> str:
    """Write a number at, or a hair beside, the middle of two floats of a format."""
    precision, least, most = of
    if rng.random() < 0.1:
        significand, exponent = 2**precision - 1, most  # between the largest float and infinity
    else:
        significand = rng.getrandbits(precision) | rng.choice((0, 1 << (precision - 1)))
        exponent = rng.randint(least - precision - 2, most)
    value = tie(significand, exponent, of)
    hair = rng.choice((rng.randint(7, 20), 40, rng.randint(700, 900)))
    value *= 1 + Fraction(rng.randint(-9, 9), 10**hair)
    digits = rng.choice(
        (rng.randint(7, 19), 17, 18, 19, rng.randint(20, 60), rng.randint(700, 999))
    )
    return rng.choice(("", "-")) + written(value, digits, rng.randrange(4))


def _exponent(rng: Random) -> str:
    if rng.random() < 0.3:
        return ""
    size = str(rng.randint(0, 10 ** rng.choice((1, 2, 2, 3, 4, 20))))
    return rng.choice("eE") + rng.choice(("", "+", "-", "-")) + rng.choice(("", "00")) + size


def _digits(rng: Random, most: int) -> str:
    """Write an integer."""
    return rng.choice(("-", "")) + str(rng.getrandbits(rng.randint(1, most * 3)))


def _any_digits(rng: Random, most: int) -> str:
    return "".join(rng.choices("0123456789", k=rng.randint(1, most)))


def _array(rng: Random, number: object, depth: int = 1) -> str:
    assert callable(number)
    space = rng.choice(_SPACES)
    elements = []
    for _ in range(rng.choice((0, 1, 2, 5, rng.randint(0, 30), rng.randint(8, 30)))):
        nests = depth < 5 and rng.random() < 0.1
        elements.append(_array(rng, number, depth + 1) if nests else number())
    text = f"{space}[{space}{f',{space}'.join(elements)}{space}]{space}"
    if depth == 1 and rng.random() < 0.02:
        around = rng.randint(50, 80)
        text = "[" * around + text + "]" * around
    return text


def _change(text: bytearray, rng: Random) -> None:
    """Change a text in place: put in, take out, overwrite, repeat or cut off."""
    at = rng.randint(0, len(text))
    end = min(len(text), at + rng.choice((0, 1, 1, 2, 9)))
    kind = rng.randrange(6)
    if kind == 0:
        text[at:end] = rng.choice(_PIECES).encode("latin-1")
    elif kind == 1:
        text[at:end] = rng.randbytes(rng.randint(0, 3))
    elif kind == 2:
        del text[at:end]
    elif kind == 3:
        text[at:at] = text[max(0, at - rng.randint(1, 30)) : at]
    elif kind == 4:
        del text[at:]
    else:
        del text[:at]
