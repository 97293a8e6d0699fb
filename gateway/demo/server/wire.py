"""Parses inference requests and encodes responses: JSON, binary, mixed and raw binary."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final, Self, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gateway.demo.server import tensors
from gateway.demo.server.tensors import NamedFloat, RequestError, Tensor

HEADER_LENGTH: Final = "Inference-Header-Content-Length"

_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"

Size = Annotated[int, Field(ge=0)]
Model = TypeVar("Model", bound=BaseModel)


class Document(BaseModel):
    """A part of a JSON document; other members are ignored, and a bool is no integer."""

    model_config = ConfigDict(strict=True)


class _TensorParameters(Document):
    binary_data_size: Size | None = None
    binary_data: bool = False
    classification: Size = 0
    shared_memory_region: Any = None

    @model_validator(mode="after")
    def _reject_shared_memory(self) -> Self:
        if (region := self.shared_memory_region) is not None:
            raise RequestError(f"Unable to find shared memory region: '{region}'", 404)
        return self


class _Input(Document):
    name: str
    datatype: str
    shape: list[Size]
    data: Any = None
    parameters: _TensorParameters = _TensorParameters()

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if ("data" in self.model_fields_set) == (self.parameters.binary_data_size is not None):
            raise RequestError(
                "Input must set only one of the following fields: "
                "'data', 'binary_data_size' in 'parameters'"
            )
        return self


class RequestedOutput(Document):
    """An output that the request lists; with `classification` 0 it is the tensor itself."""

    name: str
    parameters: _TensorParameters = _TensorParameters()


class _InferDocument(Document):
    id: str = ""
    inputs: list[_Input]
    outputs: list[RequestedOutput] = []
    parameters: dict[str, str | bool | int | float] = {}

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        if any(name.startswith("triton_") for name in self.parameters):
            raise RequestError("parameter keys starting with 'triton_' are reserved")
        if not isinstance(self.parameters.get("binary_data_output", False), bool):
            raise RequestError("parameter 'binary_data_output' has invalid type")
        return self


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A parsed inference request.

    `raw` is the whole body of a raw binary request, which has no `inputs`. A request without
    `outputs` asks for all outputs of the model, as JSON or, if `binary_output`, in binary.
    """

    request_id: str = ""
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[RequestedOutput] = ()
    binary_output: bool = False
    raw: bytes | None = None

    def wants_binary(self, output: str) -> bool:
        """Tell whether the response has this output as binary data."""
        # Triton ignores `binary_data_output` for listed outputs, against the specification:
        # without `binary_data` they are JSON.
        listed = {each.name: each.parameters.binary_data for each in self.outputs}
        return listed.get(output, self.binary_output)


def json_response(document: object, status: int = 200) -> web.Response:
    """Respond with a JSON document."""
    return web.Response(status=status, body=encode(document), content_type=_JSON)


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; if a name is repeated, the first member counts, as in Triton.

    Raises RequestError for any other text, and for nesting that is too deep for Python's parser.
    """
    try:
        document = json.loads(
            text.decode(),
            parse_constant=NamedFloat,
            object_pairs_hook=lambda members: dict(reversed(members)),
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(document, dict):
        raise RequestError("Unable to parse the request: not a JSON object")
    return document


def validate(model: type[Model], document: object) -> Model:
    """Return a document as a model has it; raises RequestError."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise RequestError(f"Unable to parse '{path}': {first['msg']}") from None


def encode(document: object) -> bytes:
    """Encode a JSON document: compact, in UTF-8, with NaN and infinities as bare tokens."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="replace")  # an error message may quote a lone surrogate


def parse_infer_request(headers: Mapping[str, str], body: bytes) -> InferRequest:
    """Parse the body of an inference request.

    Raises RequestError if the header length, the JSON or the sizes of the tensors are wrong.
    """
    length = len(body)
    if HEADER_LENGTH in headers:
        stated = stated_header_length(headers)
        if stated is None or stated > length:
            raise RequestError(
                f"inference header size should be in range (0, {length}), "
                f"got: {headers[HEADER_LENGTH]}"
            )
        length = stated
    if length == 0:
        return InferRequest(binary_output=True, raw=body)
    document = validate(_InferDocument, parse_object(body[:length]))
    return InferRequest(
        document.id,
        _read_inputs(document.inputs, body[length:]),
        document.outputs,
        bool(document.parameters.get("binary_data_output")),
    )


def encode_infer_response(
    model_name: str, model_version: str, request: InferRequest, outputs: Sequence[Tensor]
) -> web.Response:
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
    header = encode({**identity, **names, "outputs": entries})
    if not any(chunks):  # also if all binary outputs are empty
        return web.Response(body=header, content_type=_JSON)
    headers = {"Content-Type": _BINARY, HEADER_LENGTH: str(len(header))}
    return web.Response(body=b"".join((header, *chunks)), headers=headers)


def stated_header_length(headers: Mapping[str, str]) -> int | None:
    """Return the value of `Inference-Header-Content-Length`, None if it is not a number."""
    text = headers.get(HEADER_LENGTH, "")
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _read_inputs(inputs: Sequence[_Input], binary: bytes) -> Sequence[Tensor]:
    sizes = [each.parameters.binary_data_size or 0 for each in inputs]
    ends = list(accumulate(sizes, initial=0))
    if ends[-1] > len(binary):
        raise RequestError(f"unexpected size: {ends[-1] - len(binary)} additional bytes expected")
    if ends[-1] < len(binary):
        raise RequestError(f"unexpected additional input data: {len(binary) - ends[-1]} bytes")
    return [
        tensors.from_json(each.name, each.datatype, each.shape, each.data)
        if each.parameters.binary_data_size is None
        else tensors.from_binary(each.name, each.datatype, each.shape, binary[start:end])
        for each, (start, end) in zip(inputs, pairwise(ends), strict=True)
    ]
