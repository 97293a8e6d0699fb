"""Parses inference requests and encodes responses: JSON, binary, mixed and raw binary."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

from gateway.demo.server import documents, tensors
from gateway.demo.server.errors import RequestError
from gateway.demo.server.tensors import Tensor

HEADER_LENGTH: Final = "Inference-Header-Content-Length"

_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output that the request lists; with `classes` 0 it is the tensor itself."""

    name: str
    binary: bool = False
    classes: int = 0


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A parsed inference request.

    `raw` is the whole body of a raw binary request, which has no `inputs`. A request without
    `outputs` asks for all outputs of the model, as JSON or, if `binary_output`, in binary.
    """

    request_id: str = ""
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[RequestedOutput, ...] = ()
    binary_output: bool = False
    raw: bytes | None = None

    def wants_binary(self, output: str) -> bool:
        """Tell whether the response has this output as binary data."""
        # Triton ignores `binary_data_output` for listed outputs, against the specification:
        # without `binary_data` they are JSON.
        return {o.name: o.binary for o in self.outputs}.get(output, self.binary_output)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """An HTTP request.

    `path` is as it was sent, since Triton decodes no percent signs. `body` is decompressed.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An HTTP response; if there are `events`, they are sent one by one instead of the body."""

    status: int = 200
    body: bytes = b""
    content_type: str = _JSON
    header_length: int | None = None
    events: tuple[bytes, ...] = ()

    @property
    def headers(self) -> dict[str, str]:
        """Return the HTTP headers, without those that the connection adds."""
        headers = {"Content-Type": self.content_type}
        if self.header_length is not None:
            headers[HEADER_LENGTH] = str(self.header_length)
        return headers


def json_response(document: object, status: int = 200) -> HttpResponse:
    """Respond with a JSON document."""
    return HttpResponse(status, documents.encode(document))


def error_response(error: RequestError) -> HttpResponse:
    """Respond with the protocol's error object."""
    return json_response({"error": error.message}, error.status)


def parse_infer_request(headers: Mapping[str, str], body: bytes) -> InferRequest:
    """Parse the body of an inference request.

    Raises RequestError if the header length, the JSON or the sizes of the tensors are wrong.
    """
    length = _header_length(headers, len(body))
    if length == 0:
        return InferRequest(binary_output=True, raw=body)
    document = documents.parse_object(body[:length])
    parameters = _parameters(document)
    return InferRequest(
        request_id=documents.get_optional(document, "id", ""),
        inputs=_parse_inputs(documents.get_member(document, "inputs", list), body[length:]),
        outputs=tuple(map(_parse_output, documents.get_optional(document, "outputs", []))),
        binary_output=documents.get_optional(parameters, "binary_data_output", False),
    )


def encode_infer_response(
    model_name: str, model_version: str, request: InferRequest, outputs: Sequence[Tensor]
) -> HttpResponse:
    """Encode the outputs of a model, each as JSON or binary as the request asks."""
    entries: list[dict[str, Any]] = []
    chunks: list[bytes] = []
    for tensor in outputs:
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.array.shape,
        }
        entries.append(entry)
        if request.wants_binary(tensor.name):
            chunks.append(tensors.to_binary(tensor))
            entry["parameters"] = {"binary_data_size": len(chunks[-1])}
        else:
            entry["data"] = tensors.to_json(tensor)
    names = {"model_name": model_name, "model_version": model_version}
    identity = {"id": request.request_id} if request.request_id else {}
    header = documents.encode({**identity, **names, "outputs": entries})
    if not any(chunks):  # also if all binary outputs are empty
        return HttpResponse(body=header)
    return HttpResponse(200, b"".join((header, *chunks)), _BINARY, len(header))


def stated_header_length(headers: Mapping[str, str]) -> int | None:
    """Return the value of `Inference-Header-Content-Length`, None if it is not a number."""
    text = headers.get(HEADER_LENGTH, "")
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _header_length(headers: Mapping[str, str], body_size: int) -> int:
    if HEADER_LENGTH not in headers:
        return body_size
    length = stated_header_length(headers)
    if length is None or length > body_size:
        raise RequestError(
            f"inference header size should be in range (0, {body_size}), "
            f"got: {headers[HEADER_LENGTH]}"
        )
    return length


def _parameters(document: dict[str, Any]) -> dict[str, Any]:
    parameters = documents.get_optional(document, "parameters", dict[str, Any]())
    for name, value in parameters.items():
        if name.startswith("triton_"):
            raise RequestError("parameter keys starting with 'triton_' are reserved")
        if not isinstance(value, str | bool | int | float):
            raise RequestError(f"parameter '{name}' has invalid type")
    return parameters


def _parse_inputs(entries: list[Any], binary: bytes) -> tuple[Tensor, ...]:
    inputs = [documents.check_type(entry, dict, "an input") for entry in entries]
    ends = list(accumulate((_binary_size(entry) or 0 for entry in inputs), initial=0))
    if ends[-1] > len(binary):
        raise RequestError(f"unexpected size: {ends[-1] - len(binary)} additional bytes expected")
    if ends[-1] < len(binary):
        raise RequestError(f"unexpected additional input data: {len(binary) - ends[-1]} bytes")
    return tuple(
        _parse_input(entry, binary[start:end])
        for entry, (start, end) in zip(inputs, pairwise(ends), strict=True)
    )


def _parse_input(entry: dict[str, Any], binary: bytes) -> Tensor:
    name = documents.get_member(entry, "name", str)
    datatype = documents.get_member(entry, "datatype", str)
    shape = [
        documents.check_size(dimension, "'shape'")
        for dimension in documents.get_member(entry, "shape", list)
    ]
    if _binary_size(entry) is None:
        return tensors.from_json(name, datatype, shape, entry["data"])
    return tensors.from_binary(name, datatype, shape, binary)


def _binary_size(entry: dict[str, Any]) -> int | None:
    """Return the `binary_data_size` of an input, None if its elements are in `data`."""
    parameters = documents.get_optional(entry, "parameters", dict[str, Any]())
    _reject_shared_memory(parameters)
    if ("data" in entry) == ("binary_data_size" in parameters):
        raise RequestError(
            "Input must set only one of the following fields: "
            "'data', 'binary_data_size' in 'parameters'"
        )
    return None if "data" in entry else documents.get_size(parameters, "binary_data_size")


def _reject_shared_memory(parameters: dict[str, Any]) -> None:
    if "shared_memory_region" in parameters:
        region = parameters["shared_memory_region"]
        raise RequestError(f"Unable to find shared memory region: '{region}'", 404)


def _parse_output(entry: object) -> RequestedOutput:
    document = documents.check_type(entry, dict, "an output")
    parameters = documents.get_optional(document, "parameters", dict[str, Any]())
    _reject_shared_memory(parameters)
    return RequestedOutput(
        name=documents.get_member(document, "name", str),
        binary=documents.get_optional(parameters, "binary_data", False),
        classes=documents.get_size(parameters, "classification"),
    )
