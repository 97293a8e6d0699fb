"""Parse sizes, durations and percentages as operators write them: ``64MiB``, ``500ms``, ``50%``."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway.settings.values.wording import describe, did_you_mean

# Binary ones come first: a bare M is meant as one of them.
_SIZE_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}

# Bounded digit counts keep int() and float() clear of their own limits.
_COUNT = re.compile(r"[0-9]{1,18}")
_SIZE = re.compile(r"([0-9]{1,18}) ?([A-Za-z]*)")
_PERCENT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)(?P<sign> ?%)?")
_DURATION = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Bounded:
    """Check of a value by two inclusive bounds, written as operators write values.

    With a ``word``, the value may be that word instead.
    """

    parse: Callable[[object], float]
    least: str
    most: str
    word: str = ""

    def __call__(self, value: object) -> Any:
        """Return the parsed value, or the word. Raises ValueError."""
        expected, hint = f"expected {self.least} to {self.most}", ""
        if self.word:
            if value == self.word:
                return self.word
            expected, hint = f"{expected}, or {self.word}", did_you_mean(value, [self.word])
        try:
            number = self.parse(value)
            if self.parse(self.least) <= number <= self.parse(self.most):
                return number
        except ValueError:
            if not self.word:
                raise
        raise ValueError(f"{expected}, got {describe(value)}{hint}")

    def describe(self) -> str:
        """Return kind and bounds as a sentence, such as: A duration from 1ms to 1h."""
        word = f", or {self.word}" if self.word else ""
        return f"{_KINDS[self.parse].name} from {self.least} to {self.most}{word}."

    def format(self, number: float) -> str:
        """Return a number as operators write it: ``1m`` for 60 seconds."""
        return _KINDS[self.parse].write(number)


def parse_count(value: object) -> int:
    """Return a whole number, given as one or as its digits. Raises ValueError."""
    match value:
        case int() if not isinstance(value, bool):
            return value
        case str() if _COUNT.fullmatch(value):
            return int(value)
    raise ValueError(f"expected a whole number, got {describe(value)}")


def parse_percent(value: object) -> float:
    """Return a percentage: 50 for ``50%``, ``50`` or the number 50.

    A number between 0 and 1 needs the sign, as it may be meant as a part of one. Raises ValueError.
    """
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if isinstance(text, str) and (found := _PERCENT.fullmatch(text)):
        percent = float(found[1])
        if found["sign"] or percent == 0 or percent >= 1:
            return percent
    hint = _or(_plain_percent(value))
    raise ValueError(f"expected a percentage such as 50%, got {describe(value)}{hint}")


def format_percent(percent: float) -> str:
    """Write a percentage as ``parse_percent`` reads it."""
    return f"{percent:g}%"


def parse_size(value: object) -> int:
    """Return a size in bytes.

    Takes a whole number of bytes, or text such as ``100``, ``512KiB``, ``10MB``, ``4GiB``. Raises
    ValueError.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    digits, factor = _split(value, _SIZE, _SIZE_UNITS, "B", "a size such as 64MiB")
    return int(digits) * factor


def parse_duration(value: object) -> float:
    """Return a duration in seconds.

    Takes a number of seconds, or text such as ``500ms``, ``5s``, ``2m``, ``1.5h``. Raises
    ValueError.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    digits, factor = _split(value, _DURATION, _MILLISECONDS, "s", "a duration such as 30s")
    return float(digits) * factor / 1000


def _split(
    value: object, form: re.Pattern[str], units: Mapping[str, int], usual: str, expected: str
) -> tuple[str, int]:
    """Return the digits of a text, and the factor of its unit, or of the usual one."""
    hint = ""
    if isinstance(value, str) and (found := form.fullmatch(value)):
        digits, unit = found.groups()
        if factor := units.get(unit or usual):
            return digits, factor
        written = unit.lower()
        alike = [
            each
            for each in units
            if each.lower().startswith(written) or written.startswith(each.lower())
        ]
        hint = _or(digits + alike[0]) if alike else ""
    raise ValueError(f"expected {expected}, got {describe(value)}{hint}")


def _format_size(size: float) -> str:
    binary = {unit: factor for unit, factor in _SIZE_UNITS.items() if "i" in unit or unit == "B"}
    return _in_largest(size, binary) or "0"


def _format_duration(seconds: float) -> str:
    return _in_largest(round(seconds * 1000), _MILLISECONDS) or "0s"


class _Kind(NamedTuple):
    """What a value is called, and how it is written."""

    name: str
    write: Callable[[float], str]


_KINDS: Mapping[Callable[[object], float], _Kind] = {
    parse_count: _Kind("A whole number", str),
    parse_size: _Kind("A size", _format_size),
    parse_duration: _Kind("A duration", _format_duration),
    parse_percent: _Kind("A percentage", format_percent),
}


def _or(plain: str | None) -> str:
    """Return the end of a message: what was meant, as the setting takes it."""
    return f"; did you mean {plain}?" if plain else ""


def _plain_percent(value: object) -> str | None:
    text = value.removesuffix("percent").strip() if isinstance(value, str) else str(value)
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,3}(?:\.[0-9]{1,9})?", text):
        return None
    number = float(text)
    if 0 < number < 1:  # a part of one
        return format_percent(number * 100)
    return format_percent(number) if number <= 100 else None


def _in_largest(total: float, units: Mapping[str, int]) -> str | None:
    """Write a number in the largest unit of which it is a whole multiple."""
    if total <= 0 or total != int(total):
        return None
    best = max((unit for unit in units if total % units[unit] == 0), key=lambda unit: units[unit])
    return f"{int(total) // units[best]}{best}"
