"""A strict reader of HTTP/1.1 responses, and of the inference responses in them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.codec.reference import DTYPES, pack
from tests.codec.reference import RefusedError as PlainRefusedError
from tests.fuzz.strict_http1 import MAX_HEAD, Fields, RefusedError, all_of, chunked, read_fields

_FIRST = re.compile(rb"HTTP/1\.([01]) +([1-9][0-9]{2})(?: ([\t -~\x80-\xff]*))?")
_MAX_INTERIM = 100
HEADER_LENGTH = b"inference-header-content-length"

Value = tuple[str, str, tuple[int, ...], bytes | None]
"""Name, datatype, shape and bytes of an output, None where there are none; every NaN is the same.

What is in the bytes of BOOL and BYTES is for the client to look at that gets them as they are.
"""


@dataclass(frozen=True)
class Response:
    """A complete final response."""

    status: int
    fields: Fields
    body: bytes

    @property
    def lengths(self) -> list[bytes]:
        """Return what is said of the size of the JSON before the tensors."""
        return all_of(self.fields, HEADER_LENGTH)

    @property
    def content(self) -> tuple[bytes, list[bytes]]:
        """Return the body, and what is said of it."""
        return self.body, self.lengths

    @property
    def as_json(self) -> Response:
        """Return the same as if it were JSON alone."""
        fields = [(name, value) for name, value in self.fields if name != HEADER_LENGTH]
        return replace(self, fields=fields)


def read_response(stream: bytes, method: str = "POST", closed: bool = True) -> Response | None:
    """Read the final response at the start of a stream; None where that is not whole.

    ``closed`` tells whether its sender has closed the connection. Raises RefusedError.
    """
    for _ in range(_MAX_INTERIM + 1):
        stream = stream.lstrip(b"\r\n")
        end = stream.find(b"\r\n\r\n")
        if end >= MAX_HEAD or (end < 0 and len(stream) >= MAX_HEAD):
            raise RefusedError("a long head")
        if end < 0:
            return None
        first, *lines = stream[:end].split(b"\r\n")
        words = _FIRST.fullmatch(first)
        if not words:
            raise RefusedError("no status line")
        status, fields = int(words[2]), read_fields(lines)
        stream = stream[end + 4 :]
        if status == 101:
            raise RefusedError("101, which nobody asked for")
        if status >= 200:
            return _with_body(status, fields, stream, method, closed)
    raise RefusedError("too many interim responses")


def _with_body(
    status: int, fields: Fields, stream: bytes, method: str, closed: bool
) -> Response | None:
    codings, lengths = all_of(fields, b"transfer-encoding"), all_of(fields, b"content-length")
    if codings and (lengths or [each.lower() for each in codings] != [b"chunked"]):
        raise RefusedError("a coding in doubt")
    if lengths and (len(lengths) > 1 or not re.fullmatch(rb"[0-9]{1,20}", lengths[0])):
        raise RefusedError("a length in doubt")
    if status in (204, 304) or method == "HEAD":
        return Response(status, fields, b"")
    if codings:
        found = chunked(stream, 0)
        return None if found is None else Response(status, fields, found[0])
    if lengths:
        size = int(lengths[0])
        return Response(status, fields, stream[:size]) if len(stream) >= size else None
    return Response(status, fields, stream) if closed else None


def outputs_of(response: Response) -> list[Value]:
    """Read the outputs of an inference response; raises RefusedError where they are in doubt."""
    try:
        return _outputs(response)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as no:
        raise RefusedError(f"no inference answer: {no!r}") from None
    except PlainRefusedError as no:
        raise RefusedError(f"no inference answer: {no!r}") from None


def _outputs(response: Response) -> list[Value]:
    size = len(response.body)
    if response.lengths:
        (length,) = response.lengths
        if not re.fullmatch(rb"[0-9]{1,19}", length) or int(length) > size:
            raise RefusedError("a header length in doubt")
        size = int(length)
    document, rest = response.body[:size], response.body[size:]
    fields = json.loads(document.decode())  # of two values of a key, the last counts
    values: list[Value] = []
    for output in fields["outputs"]:
        value, rest = _output(output, rest)
        values.append(value)
    if rest:
        raise RefusedError("more than the tensors")
    return values


def _output(output: dict[str, Any], rest: bytes) -> tuple[Value, bytes]:
    name, datatype, shape = output["name"], output["datatype"], output["shape"]
    for each in shape:
        if type(each) is not int or each < 0:
            raise RefusedError("no shape")
    if not isinstance(name, str) or (datatype != "BYTES" and datatype not in DTYPES):
        raise RefusedError("no name, or no datatype")
    size = (output.get("parameters") or {}).get("binary_data_size")
    if size is not None:
        if type(size) is not int or not 0 <= size <= len(rest):
            raise RefusedError("no size of the data")
        data, rest = rest[:size], rest[size:]
        _check_size(datatype, shape, size)
    elif "data" not in output:
        # OpenVINO Model Server says no more of an output without elements.
        return (name, datatype, tuple(shape), b"" if 0 in shape else None), rest
    else:
        data = _packed(datatype, shape, output["data"])
    return (name, datatype, tuple(shape), _with_one_nan(datatype, data)), rest


def _packed(datatype: str, shape: list[int], value: Any) -> bytes:
    """Return the bytes of a tensor in JSON, or its text if it is no tensor.

    So it is the same in JSON alone.
    """
    try:
        elements = _flat(value)
        if datatype != "BYTES":
            # So KServe writes NaN and the infinities, for which JSON has no form.
            elements = [math.nan if each is None else each for each in elements]
        if len(elements) == math.prod(shape):
            return pack(datatype, elements)
    except (PlainRefusedError, RefusedError):
        pass
    return b"no tensor: " + json.dumps(value).encode()


def _check_size(datatype: str, shape: list[int], size: int) -> None:
    if datatype != "BYTES" and size != math.prod(shape) * np.dtype(DTYPES[datatype]).itemsize:
        raise RefusedError("not as many bytes as its shape says")


def _with_one_nan(datatype: str, data: bytes) -> bytes:
    if not datatype.startswith(("FP", "BF")) or data.startswith(b"no tensor: "):
        return data
    values = np.frombuffer(data, DTYPES[datatype]).copy()
    values[np.isnan(values)] = np.nan
    return values.tobytes()


def _flat(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise RefusedError("no array")
    return [each for item in data for each in (_flat(item) if isinstance(item, list) else [item])]
