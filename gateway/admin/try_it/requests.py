"""Reads the description of a call, makes its tensors, and writes it in each form of clients."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import orjson
from multidict import CIMultiDict
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from gateway.codec.elements.bytes_elements import PREFIX_SIZE, pack_strings, split_elements
from gateway.codec.elements.rounding import round_to
from gateway.codec.grpc.infer import write_infer_request
from gateway.codec.policies import JsonPolicies, Nonfinite
from gateway.codec.v1.nested_writer import nested_encoder
from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.json_writer import JsonRequestWriter
from gateway.codec.v2.request import InferRequestReader, with_data
from gateway.errors import bad_request
from gateway.protocol.datatypes import DATATYPES, Datatype, Family
from gateway.protocol.messages import Fields, InferRequest, InputTensor
from gateway.protocol.operations import model_path, quote_name
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.protocol.tensors import MAX_TENSORS, element_count
from gateway.protocol.v1 import V1Format
from gateway.proxy.infer.grpc_upstream import one_message_request
from gateway.upstream.transport import HOP_BY_HOP, UpstreamRequest

MAX_DATA = 8 * 2**20
"""Bytes of all tensors together."""
_STRING_SIZE = 80
"""Bytes that an element of BYTES counts as, before it is made."""
_MAX_HEADER = 2**20
_MAX_DEPTH = 64
_WINDOW = 128 * 1024
"""Bytes that are read or written as JSON without giving other threads a chance."""

_MOST_RANDOM = 100
"""Random integers are below it, and in the range of their datatype."""
_WORDS = ("gateway", "tensor", "proxy", "model", "server", "client", "bytes", "call")
_MADE_HERE = HOP_BY_HOP | {"content-length"}
"""Headers that frame the request, so that an operator cannot choose them."""

# RFC 9110, sections 5.1 and 5.5, without what is not ASCII.
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e\t]*[\x21-\x7e])?")


def _check_datatype(name: str) -> str:
    if name not in DATATYPES:
        raise ValueError(f"expected one of {', '.join(DATATYPES)}")
    return name


def _decode(value: object) -> bytes:
    if not isinstance(value, str):
        raise ValueError("expected base64")  # what pydantic expects
    return b64decode(value, validate=True)


def _check_headers(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        is_valid = _HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)
        if not is_valid or name.lower() in _MADE_HERE:
            raise ValueError(f"{name[:60]!r} is not a header that can be sent")
    return headers


class TensorInput(BaseModel):
    """An input, with one source of its elements."""

    name: str
    datatype: Annotated[str, AfterValidator(_check_datatype)]
    shape: list[Annotated[int, Field(ge=0)]]
    fill: Literal["random", "zeros", "ones"] | None = None
    values: Any = None
    """The elements as JSON, nested or not."""
    data: Annotated[bytes, BeforeValidator(_decode)] | None = Field(None, alias="bytes")

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if len(self.model_fields_set & {"fill", "values", "data"}) != 1:
            raise ValueError("expected one of fill, values, bytes")
        return self

    @property
    def is_values(self) -> bool:
        """Tell whether the elements are JSON."""
        return self.fill is None and self.data is None

    @property
    def size(self) -> int:
        """Return the bytes of the elements that are not JSON, or rather more."""
        if self.fill is None:
            return len(self.data or b"")
        return element_count(self.shape) * (DATATYPES[self.datatype].size or _STRING_SIZE)


class Call(BaseModel):
    """A call that an operator wants to make."""

    form: Literal["json", "binary", "raw", "v1", "grpc"]
    model: str = Field(min_length=1)
    version: str = ""
    inputs: list[TensorInput] = Field(max_length=MAX_TENSORS)
    outputs: list[str] = []
    """The names of the wanted outputs; without any, all are wanted."""
    headers: Annotated[dict[str, str], AfterValidator(_check_headers)] = {}
    """Further headers, such as the key of a client."""
    compare: bool = False


def make_request(inputs: Sequence[TensorInput], outputs: Sequence[str]) -> InferRequest:
    """Make a request. Raises GatewayError (400) that names what is wrong."""
    _check_size(each.size for each in inputs)
    entries: list[Fields] = []
    data: list[bytes] = []
    for each in inputs:
        entry: Fields = {"name": each.name, "datatype": each.datatype, "shape": each.shape}
        if each.is_values:
            entry["data"] = each.values
        else:
            data.append(_fill(each) if each.data is None else each.data)
            entry["parameters"] = {"binary_data_size": len(data[-1])}
        entries.append(entry)
    fields: Fields = {"inputs": entries}
    if outputs:
        fields["outputs"] = [{"name": name} for name in outputs]
    request = _read(json.dumps(fields).encode())
    _check_size(tensor.binary_size or 0 for tensor in request.head.inputs)
    for each in inputs:
        if each.data is not None and DATATYPES[each.datatype].family is Family.TEXT:
            _check_elements(each, each.data)
    return with_data(request, b"".join(data), 0)


def _check_size(sizes: Iterable[int]) -> None:
    if sum(sizes) > MAX_DATA:
        raise bad_request(f"inputs: all tensors together may have {MAX_DATA >> 20} MiB")


def _check_elements(each: TensorInput, data: bytes) -> None:
    elements, end = split_elements(data, 0)
    count = element_count(each.shape)
    if end < len(data) or len(elements) != count:
        raise bad_request(
            f"input '{each.name}': bytes: expected {count} elements,"
            " each its length as uint32 and then its bytes"
        )


def _read(text: bytes) -> InferRequest:
    """Read a request as a client may send it: so its errors are those that clients get."""
    reader = InferRequestReader(_MAX_HEADER, _MAX_DEPTH)
    for start in range(0, len(text), _WINDOW):
        reader.feed(text[start : start + _WINDOW], last=start + _WINDOW >= len(text))
        while reader.step():
            pass
    return reader.finish()


def _fill(each: TensorInput) -> bytes:
    datatype, count = DATATYPES[each.datatype], element_count(each.shape)
    generator = np.random.default_rng()
    if (dtype := datatype.dtype) is not None:
        return _numbers(each.fill, datatype, dtype, count, generator).tobytes()
    if each.fill == "random":
        return pack_strings([_WORDS[at] for at in generator.integers(len(_WORDS), size=count)])
    return pack_strings(["0" if each.fill == "zeros" else "1"] * count)


def _numbers(
    fill: str | None,
    datatype: Datatype,
    dtype: np.dtype[Any],
    count: int,
    generator: np.random.Generator,
) -> np.ndarray[Any, Any]:
    if fill == "zeros":
        return np.zeros(count, dtype)
    if datatype.floats is not None:
        is_random = fill == "random"
        return round_to(generator.standard_normal(count) if is_random else np.ones(count), datatype)
    if fill == "ones":
        return np.ones(count, dtype)
    most = 2 if datatype.family is Family.BOOLEAN else _MOST_RANDOM
    return generator.integers(most, size=count).astype(dtype)


_JSON_TYPE = ("Content-Type", "application/json")
_BINARY_TYPE = ("Content-Type", "application/octet-stream")

Chunks = list[bytes | memoryview]
Form = Callable[[InferRequest, str, str], UpstreamRequest]


def write_json(request: InferRequest, model: str, version: str) -> UpstreamRequest:
    """Write a request of the protocol's JSON form."""
    writer = JsonRequestWriter(request, JsonPolicies())
    text: Chunks = [writer.feed(piece) for piece in _windows(request.chunks)]
    text.append(writer.finish())
    return _post(f"{_path(model, version)}/infer", text, _JSON_TYPE)


def write_binary(request: InferRequest, model: str, version: str) -> UpstreamRequest:
    """Write a request of the binary tensor data extension."""
    header = write_binary_header(request)
    size = (HEADER_LENGTH, str(len(header)))
    return _post(f"{_path(model, version)}/infer", [header, *request.chunks], _BINARY_TYPE, size)


def write_raw(request: InferRequest, model: str, version: str) -> UpstreamRequest:
    """Write a raw binary request, whose body is the data of its only input.

    Raises GatewayError (400) if there are more.
    """
    inputs, data = request.head.inputs, b"".join(request.chunks)
    if len(inputs) != 1:
        raise bad_request(f"a raw request has one input, not {len(inputs)}")
    if inputs[0].datatype.family is Family.TEXT:
        if element_count(inputs[0].shape) != 1:
            raise bad_request("a raw request of BYTES has one element")
        data = data[PREFIX_SIZE:]
    return _post(f"{_path(model, version)}/infer", [data], _BINARY_TYPE, (HEADER_LENGTH, "0"))


def write_v1(request: InferRequest, model: str, version: str) -> UpstreamRequest:
    """Write a V1 request: rows for one input, columns for several. Raises GatewayError."""
    pairs = zip(request.head.inputs, request.tensors, strict=True)
    tensors = [_nested(tensor, data) for tensor, data in pairs if not isinstance(data, int)]
    if len(tensors) == 1:
        layout, body = V1Format.ROWS, tensors[0]
    else:
        names = [orjson.dumps(each.name) for each in request.head.inputs]
        members = [b"%b:%b" % pair for pair in zip(names, tensors, strict=True)]
        layout, body = V1Format.COLUMNS, b"{%b}" % b",".join(members)
    text = b'{"%b":%b}' % (layout.value.encode(), body)
    return _post(f"{_path(model, version, '/v1')}:predict", [text], _JSON_TYPE)


def write_grpc(request: InferRequest, model: str, version: str) -> UpstreamRequest:
    """Write a gRPC call."""
    message = write_infer_request(request, model, version)
    return one_message_request("ModelInfer", message, CIMultiDict())


FORMS: dict[str, Form] = {
    "json": write_json,
    "binary": write_binary,
    "raw": write_raw,
    "v1": write_v1,
    "grpc": write_grpc,
}


def _post(target: str, body: Chunks, *headers: tuple[str, str]) -> UpstreamRequest:
    return UpstreamRequest("POST", target, CIMultiDict(headers), body)


def _path(model: str, version: str, prefix: str = "/v2") -> str:
    return model_path(quote_name(model), quote_name(version) or None, prefix)


def _windows(chunks: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        for start in range(0, len(chunk), _WINDOW):
            yield memoryview(chunk)[start : start + _WINDOW]


def _nested(tensor: InputTensor, data: Sequence[bytes | memoryview]) -> bytes:
    label = f"input '{tensor.name}'"
    encoder = nested_encoder(label, tensor, tensor.shape, Nonfinite.LITERAL, as_base64=False)
    return b"".join([*map(encoder.feed, _windows(data)), encoder.end()])
