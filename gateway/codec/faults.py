"""Finds the element that made a run fail, and says what is wrong with it."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

from gateway.codec.array_scanner import Run
from gateway.errors import GatewayError, bad_request
from gateway.protocol.datatypes import Datatype, Family

_TOKEN = re.compile(r'[ \t\n\r]*(?:([\[\],])|("(?:[^"\\]|\\.)*"?|[^ \t\n\r\[\],"]+))', re.DOTALL)


def element_fault(label: str, datatype: Datatype, run: Run, first_index: int) -> GatewayError:
    """Make the error for a run that could not be converted.

    ``first_index`` is the flat index of the run's first element. The error names the tensor, and
    index and value of the first element at fault.
    """
    text = run.text.decode("utf-8", "replace")
    index = first_index
    value_before = False
    for match in _TOKEN.finditer(text):
        mark, token = match[1], match[2]
        if token is not None:
            if fault := _token_fault(token, datatype):
                return bad_request(f"{label}: element {index} ({_quoted(token)}) {fault}")
            if value_before:
                break
            index += 1
        value_before = token is not None or (value_before and mark == "]")
    near = max(first_index, index - 1)
    return bad_request(f"{label}: data is not a valid JSON array, near element {near}")


def _token_fault(token: str, datatype: Datatype) -> str | None:
    try:
        value = json.loads(token, parse_int=_integer)
    except ValueError:
        return "is not a JSON value"
    wanted = f"is not {datatype.family.value}, as {datatype.name} needs"
    if datatype.family is Family.TEXT:
        return _text_fault(value) if isinstance(value, str) else wanted
    if datatype.family is Family.BOOLEAN:
        return None if isinstance(value, bool) else wanted
    if isinstance(value, bool) or not isinstance(value, int | float):
        return wanted
    if datatype.family is Family.INTEGER and not isinstance(value, int):
        return wanted
    return None if _fits(value, token, datatype) else f"does not fit {datatype.name}"


def _text_fault(value: str) -> str | None:
    try:
        value.encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair"
    return None


def _integer(digits: str) -> int | float:
    # Python refuses to read integers of thousands of digits; none of them fits any datatype.
    return int(digits) if len(digits) < 400 else 10**400


def _fits(value: float, token: str, datatype: Datatype) -> bool:
    dtype: np.dtype[Any] | None = datatype.dtype
    assert dtype is not None
    if datatype.family is Family.INTEGER:
        limits = np.iinfo(dtype)
        return int(limits.min) <= value <= int(limits.max)
    if token in ("NaN", "Infinity", "-Infinity"):
        return True
    try:
        number = float(value)
    except OverflowError:
        return False
    with np.errstate(over="ignore"):
        return math.isfinite(number) and bool(np.isfinite(np.float64(number).astype(dtype)))


def _quoted(token: str) -> str:
    return token if len(token) <= 40 else token[:37] + "..."
