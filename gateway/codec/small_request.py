"""Client form → upstream form for a small JSON request at hand as a whole, in a few calls.

Most requests are small, and look like the one before but for their numbers: what stands around
the data is looked at once and remembered. What is not plain is left to InferRequestCodec, which
also says what is wrong with a request; for all else both give the same.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import orjson

from gateway.codec.json_cutter import stand_in
from gateway.errors import GatewayError
from gateway.protocol.inference_header import (
    AnswerForm,
    InputTensor,
    Source,
    parse_header,
    read_answer_form,
    read_inputs,
    request_binary_outputs,
    set_binary_size,
)
from gateway.protocol.tensors import element_count

LARGEST = 16 * 1024
"""Bytes of a request that pay off here: beyond, numbers are better not made Python objects."""

_REMEMBERED = 256
_KEY = b'"data"'

# A numeric array holds no quotes and no braces: it ends at the last bracket before the first.
_DATA = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*(\[[^"{}]*\])')
_NUMERIC = b"0123456789+-.eE, \t\r\n[]"
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
}


@dataclass(frozen=True, slots=True)
class SmallRequest:
    """A request as the server will get it: ``body`` starts with ``header_size`` bytes of JSON."""

    body: bytes
    header_size: int
    answer: AnswerForm


def convert_small_request(text: bytes, depth_cap: int) -> SmallRequest | None:
    """Convert a JSON request; ``depth_cap`` is in levels of nesting.

    Gives None where a closer look is needed.
    """
    around, arrays = _cut(text)
    plan = _plan(around, len(arrays), depth_cap)
    if plan is None or text.count(_KEY) != len(arrays):
        return None
    parts = [plan.header]
    try:
        for layout, array in zip(plan.layouts, arrays, strict=True):
            parts.append(layout.pack(*_numbers(array, depth_cap)))
    except (ValueError, TypeError, OverflowError, struct.error):
        return None  # an element that is not of the datatype, or not as many as the shape takes
    return SmallRequest(b"".join(parts), len(plan.header), plan.answer)


def _cut(text: bytes) -> tuple[bytes, list[bytes]]:
    """Take the arrays out of a request; give it with stand-ins, and them."""
    pieces = _DATA.split(text)
    arrays = pieces[1::2]
    for number in range(len(arrays)):
        pieces[2 * number + 1] = b'"data":' + orjson.dumps(stand_in(number))
    return b"".join(pieces), arrays


def _numbers(array: bytes, depth_cap: int) -> list[Any]:
    """Parse an array, nested or flat; raises ValueError or TypeError unless all are numbers."""
    if array.translate(None, _NUMERIC):
        raise ValueError("other things than numbers")
    numbers: list[Any] = orjson.loads(array)
    depth = 1
    while numbers and type(numbers[0]) is list:
        numbers = list(chain.from_iterable(numbers))
        depth += 1
    if depth > depth_cap:
        raise ValueError("nested too deep")
    return numbers


@dataclass(frozen=True, slots=True)
class _Plan:
    """What becomes of a request, but for its numbers."""

    header: bytes
    layouts: tuple[struct.Struct, ...]
    answer: AnswerForm


@lru_cache(maxsize=_REMEMBERED)
def _plan(around: bytes, arrays: int, depth_cap: int) -> _Plan | None:
    # Escapes could hide a second key of the same name.
    if b"\\" in around:
        return None
    try:
        fields = parse_header(around, depth_cap)
        inputs = read_inputs(fields)
        answer = read_answer_form(fields)
    except GatewayError:
        return None
    entries = [entry for entry in fields["inputs"] if "data" in entry]
    if [entry["data"] for entry in entries] != [stand_in(number) for number in range(arrays)]:
        return None
    if around.count(b'"datatype"') != len(inputs):
        return None
    layouts = []
    for entry, declared in zip(fields["inputs"], inputs, strict=True):
        if declared.source is Source.DATA:
            layout = _layout(declared)
            if layout is None:
                return None
            layouts.append(layout)
            set_binary_size(entry, layout.size)
        elif declared.source is Source.BINARY:
            return None
    request_binary_outputs(fields)
    return _Plan(orjson.dumps(fields), tuple(layouts), answer)


def _layout(declared: InputTensor) -> struct.Struct | None:
    code = _CODES.get(declared.datatype.name)
    count = element_count(declared.shape)
    return None if code is None or count > LARGEST else struct.Struct(f"<{count}{code}")
