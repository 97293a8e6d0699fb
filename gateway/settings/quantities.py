"""Sizes, durations and shares as operators write them: ``64MiB``, ``500ms``, ``10%``."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.settings.words import describe

_SIZE_UNITS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

# Bounded digit counts keep int() and float() clear of their own limits.
_COUNT = re.compile(r"[0-9]{1,18}")
_SIZE = re.compile(r"([0-9]{1,18}) ?([A-Za-z]*)")
_DURATION = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]*)")
_SHARE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?(%?)")

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Between(Generic[Number]):
    """Parse a value and hold it to two bounds, both allowed and both written as operators do."""

    parse: Callable[[object], Number]
    least: str
    most: str

    def __call__(self, value: object) -> Number:
        """Return the parsed value. Raises ValueError."""
        number = self.parse(value)
        if self.parse(self.least) <= number <= self.parse(self.most):
            return number
        raise ValueError(f"expected {self.least} to {self.most}, got {describe(value)}")


def parse_count(value: object) -> int:
    """Return a whole number, given as one or as its digits. Raises ValueError."""
    match value:
        case int() if not isinstance(value, bool):
            return value
        case str() if _COUNT.fullmatch(value):
            return int(value)
    raise ValueError(f"expected a whole number, got {describe(value)}")


def parse_size(value: object) -> int:
    """Return a size in bytes.

    Takes a whole number of bytes, or text such as ``100``, ``512KiB``, ``10MB``, ``4GiB``. Raises
    ValueError.
    """
    match value:
        case int() if not isinstance(value, bool):
            return value
        case str() if found := _SIZE.fullmatch(value):
            digits, unit = found.groups()
            if factor := _SIZE_UNITS.get(unit or "B"):
                return int(digits) * factor
    raise ValueError(f"expected a size such as 64MiB, got {describe(value)}")


def parse_duration(value: object) -> float:
    """Return a duration in seconds.

    Takes a number of seconds, or text such as ``500ms``, ``5s``, ``2m``, ``1.5h``. Raises
    ValueError.
    """
    match value:
        case int() | float() if not isinstance(value, bool):
            return float(value)
        case str() if found := _DURATION.fullmatch(value):
            digits, unit = found.groups()
            if factor := _DURATION_UNITS.get(unit or "s"):
                return float(digits) * factor
    raise ValueError(f"expected a duration such as 30s, got {describe(value)}")


def parse_share(value: object) -> float:
    """Return a share of a whole, which is 1.

    Takes a fraction, or text such as ``10%``, ``0.5%``. Raises ValueError.
    """
    match value:
        case int() | float() if not isinstance(value, bool):
            return float(value)
        case str() if found := _SHARE.fullmatch(value):
            digits, percent = found.groups()
            return float(digits) / 100 if percent else float(digits)
    raise ValueError(f"expected a share such as 10%, got {describe(value)}")
