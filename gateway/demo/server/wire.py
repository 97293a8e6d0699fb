"""Inference requests and responses on the wire: JSON, binary, mixed and raw binary."""

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
    """Name an output that the request lists; `classes` 0 asks for the tensor itself."""

    name: str
    binary: bool = False
    classes: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """Hold a parsed inference request.

    `raw` is the whole body of a raw binary request, which has no `inputs`. Without `outputs`
    all outputs of the model are wanted, in the form that `binary_output` tells.
    """

    request_id: str = ""
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[RequestedOutput, ...] = ()
    binary_output: bool = False
    raw: bytes | None = None

    def wants_binary(self, output: str) -> bool:
        """Tell whether the response carries this output as binary data."""
        # A listed output that says nothing is JSON, whatever `binary_data_output` says:
        # against the specification, and what Triton does.
        return {o.name: o.binary for o in self.outputs}.get(output, self.binary_output)


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold an HTTP answer; `events`, if any, are sent one by one instead of the body."""

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


def json_answer(document: object, status: int = 200) -> Answer:
    """Answer with a JSON document."""
    return Answer(status, documents.to_text(document))


def error_answer(error: RequestError) -> Answer:
    """Answer with the protocol's error object."""
    return json_answer({"error": error.message}, error.status)


def parse_request(headers: Mapping[str, str], body: bytes) -> Request:
    """Parse the body of an inference request.

    Raises RequestError when the header length, the JSON or the tensors' sizes are wrong.
    """
    length = _header_length(headers, len(body))
    if length == 0:
        return Request(binary_output=True, raw=body)
    document = documents.parse_object(body[:length])
    parameters = _parameters(document)
    return Request(
        request_id=documents.optional(document, "id", ""),
        inputs=_parse_inputs(documents.member(document, "inputs", list), body[length:]),
        outputs=tuple(map(_parse_output, documents.optional(document, "outputs", []))),
        binary_output=documents.optional(parameters, "binary_data_output", False),
    )


def encode_response(
    model_name: str, model_version: str, request: Request, outputs: Sequence[Tensor]
) -> Answer:
    """Encode the outputs of a model, each as JSON or binary, as the request wants it."""
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
    header = documents.to_text({**identity, **names, "outputs": entries})
    if not any(chunks):  # also where binary outputs are all empty
        return Answer(body=header)
    return Answer(200, b"".join((header, *chunks)), _BINARY, len(header))


def stated_header_length(headers: Mapping[str, str]) -> int | None:
    """Return what `Inference-Header-Content-Length` says, None if that is no number."""
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
    parameters = documents.optional(document, "parameters", dict[str, Any]())
    for name, value in parameters.items():
        if name.startswith("triton_"):
            raise RequestError("parameter keys starting with 'triton_' are reserved")
        if not isinstance(value, str | bool | int | float):
            raise RequestError(f"parameter '{name}' has invalid type")
    return parameters


def _parse_inputs(entries: list[Any], binary: bytes) -> tuple[Tensor, ...]:
    inputs = [documents.as_type(entry, dict, "an input") for entry in entries]
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
    name = documents.member(entry, "name", str)
    datatype = documents.member(entry, "datatype", str)
    shape = [
        documents.as_size(dimension, "'shape'")
        for dimension in documents.member(entry, "shape", list)
    ]
    if _binary_size(entry) is None:
        return tensors.from_json(name, datatype, shape, entry["data"])
    return tensors.from_binary(name, datatype, shape, binary)


def _binary_size(entry: dict[str, Any]) -> int | None:
    """Return the `binary_data_size` of an input, or None when its elements are in `data`."""
    parameters = documents.optional(entry, "parameters", dict[str, Any]())
    _refuse_shared_memory(parameters)
    if ("data" in entry) == ("binary_data_size" in parameters):
        raise RequestError(
            "Input must set only one of the following fields: "
            "'data', 'binary_data_size' in 'parameters'"
        )
    return None if "data" in entry else documents.size(parameters, "binary_data_size")


def _refuse_shared_memory(parameters: dict[str, Any]) -> None:
    if "shared_memory_region" in parameters:
        region = parameters["shared_memory_region"]
        raise RequestError(f"Unable to find shared memory region: '{region}'", 404)


def _parse_output(entry: object) -> RequestedOutput:
    document = documents.as_type(entry, dict, "an output")
    parameters = documents.optional(document, "parameters", dict[str, Any]())
    _refuse_shared_memory(parameters)
    return RequestedOutput(
        name=documents.member(document, "name", str),
        binary=documents.optional(parameters, "binary_data", False),
        classes=documents.size(parameters, "classification"),
    )
