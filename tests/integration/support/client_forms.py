"""Sends one inference call in the form of each client, and reads what comes back."""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.client import RemoteDisconnected
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.infer_messages import (
    DTYPES,
    Output,
    Parameters,
    Request,
    Tensor,
    encode,
    in_pieces,
    read_outputs,
)

PATIENCE = 20.0

CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of each datatype that has typed contents."""


@dataclass(frozen=True, slots=True)
class InferCall:
    """An inference call, whatever the form.

    ``outputs`` are those requested: each name with its number of classes, 0 for the tensor itself.
    ``pieces`` is the size of the chunks of a body over HTTP, 0 for one piece. ``in_rows`` is for
    V1. ``flaw`` names what is wrong with it, if anything.
    """

    model: str
    inputs: tuple[Tensor, ...]
    version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    outputs: tuple[tuple[str, int], ...] = ()
    pieces: int = 0
    in_rows: bool = False
    flaw: str = ""

    @property
    def path(self) -> str:
        """Return the model with its version, as a path has it."""
        return f"{self.model}/versions/{self.version}" if self.version else self.model


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came back: an HTTP status or a gRPC code, and the outputs or the text of the error.

    ``outputs`` of V1 are JSON values, as V1 tells no datatypes.
    """

    status: int | grpc.StatusCode
    outputs: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    version: str = ""
    id: str = ""
    error: str = ""

    @property
    def succeeded(self) -> bool:
        """Return whether there are outputs."""
        return self.status in (200, grpc.StatusCode.OK)


class Target:
    """A server or a gateway, with a connection for each protocol it speaks.

    ``closes`` says that it closes connections over HTTP without notice: KServe does after errors.
    """

    def __init__(self, http: Client, stub: Any, *, closes: bool = False) -> None:
        self._http = http
        self._closes = closes
        self.stub = stub

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Response:
        """Send a request; where the connection has been closed, send it again."""
        try:
            return self._http.send("POST", path, body, headers)
        except (ConnectionError, RemoteDisconnected):
            if not self._closes:
                raise
            return self._http.send("POST", path, body, headers)


def stub_of(channel: grpc.Channel) -> Any:
    """Return the stub of the inference service."""
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def open_channel(address: str) -> grpc.Channel:
    """Open a channel of its own, for messages of any size."""
    unlimited = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
    options = [*((name, -1) for name in unlimited), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(address, options=options)


# ------------------------------------------------------------------------------- over HTTP


def send_json(target: Target, call: InferCall) -> Outcome:
    """Send and request JSON."""
    return _send(target, call, binary=False)


def send_binary(target: Target, call: InferCall) -> Outcome:
    """Send and request binary tensors."""
    return _send(target, call, binary=True)


def _send(target: Target, call: InferCall, *, binary: bool) -> Outcome:
    request = Request(
        call.path,
        tuple(replace(each, binary=binary) for each in call.inputs),
        outputs=tuple((name, binary) for name, _ in call.outputs),
        binary_data_output=binary or None,
        id=call.id or None,
        with_length=binary,
        classes={name: classes for name, classes in call.outputs if classes},
        parameters=call.parameters,
    )
    return _read(_post(target, call, *request.encoded()))


def send_raw(target: Target, call: InferCall) -> Outcome:
    """Send the bytes of the only tensor; those of BYTES are its only element."""
    (tensor,) = call.inputs
    body = tensor.elements[0] if tensor.datatype == "BYTES" else tensor.encoded()
    return _read(_post(target, call, body, {HEADER_LENGTH: "0"}))


def send_v1(target: Target, call: InferCall) -> Outcome:
    """Send instances, or inputs."""
    columns = {each.name: _v1_values(each) for each in call.inputs}
    if call.in_rows:
        rows = zip(*columns.values(), strict=True)
        instances = [dict(zip(columns, row, strict=True)) for row in rows]
        fields: Any = {"instances": instances}
    else:
        fields = {"inputs": columns}
    path = f"/v1/models/{call.path}:predict"
    response = target.post(path, in_pieces(json.dumps(fields).encode(), call.pieces))
    if response.status != 200:
        return Outcome(response.status, error=response.error)
    (values,) = response.fields.values()
    if call.in_rows and values and isinstance(values[0], dict):
        values = {name: [row[name] for row in values] for name in values[0]}
    return Outcome(200, values if isinstance(values, dict) else {"": values})


def _post(
    target: Target, call: InferCall, body: bytes, headers: Mapping[str, str] | None = None
) -> Response:
    return target.post(f"/v2/models/{call.path}/infer", in_pieces(body, call.pieces), headers)


def _read(response: Response) -> Outcome:
    if response.status != 200:
        return Outcome(response.status, error=_error_text(response.body))
    fields = response.fields
    outputs = {each.name: each for each in read_outputs(response)}
    assert len(outputs) == len(fields["outputs"])
    version = fields.get("model_version") or ""
    return Outcome(200, outputs, fields["model_name"], version, fields.get("id") or "")


def _error_text(body: bytes) -> str:
    """Return the message, or the body where it has no other form."""
    if not body.startswith(b'{"error":'):
        return body.decode()
    error: str = json.loads(body)["error"]
    return error


def _v1_values(tensor: Tensor) -> Any:
    if tensor.datatype != "BYTES":
        return tensor.values()
    values = np.array([None, *map(_v1_element, tensor.elements)], object)[1:]
    return values.reshape(tensor.shape).tolist()


def _v1_element(element: bytes) -> Any:
    """Return text, and in base64 what has an odd number of bytes."""
    if len(element) % 2:
        return {"b64": base64.b64encode(element).decode()}
    return element.decode()


# ------------------------------------------------------------------------------- over gRPC


def send_grpc_raw(target: Target, call: InferCall) -> Outcome:
    """Send raw contents."""
    request = _message(call)
    request.raw_input_contents.extend(each.encoded() for each in call.inputs)
    return _infer(target, request)


def send_grpc_typed(target: Target, call: InferCall) -> Outcome:
    """Send typed contents."""
    request = _message(call)
    for entry, tensor in zip(request.inputs, call.inputs, strict=True):
        contents = getattr(entry.contents, CONTENTS[tensor.datatype])
        contents.extend(tensor.elements.tolist())
    return _infer(target, request)


def _message(call: InferCall) -> Any:
    request = service_pb2.ModelInferRequest(
        model_name=call.model, model_version=call.version, id=call.id
    )
    for name, value in call.parameters.items():
        _set(request.parameters[name], value)
    for each in call.inputs:
        request.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
    for name, classes in call.outputs:
        output = request.outputs.add(name=name)
        if classes:
            _set(output.parameters["classification"], classes)
    return request


def _set(parameter: Any, value: bool | float | str) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def _infer(target: Target, request: Any) -> Outcome:
    try:
        response = target.stub.ModelInfer(request, timeout=PATIENCE)
    except grpc.RpcError as error:
        return Outcome(error.code(), error=error.details())
    raw = list(response.raw_output_contents)
    assert not raw or len(raw) == len(response.outputs)
    outputs = {}
    for each in response.outputs:
        data = raw.pop(0) if raw else _typed_data(each)
        outputs[each.name] = Output(each.name, each.datatype, tuple(each.shape), data)
    assert len(outputs) == len(response.outputs)
    return Outcome(
        grpc.StatusCode.OK, outputs, response.model_name, response.model_version, response.id
    )


def _typed_data(output: Any) -> bytes:
    values = getattr(output.contents, CONTENTS[output.datatype])
    return encode(
        output.datatype, np.array([None, *values], object)[1:].astype(DTYPES[output.datatype])
    )


Send = Callable[[Target, InferCall], Outcome]

FORMS: dict[str, Send] = {
    "JSON": send_json,
    "binary": send_binary,
    "raw": send_raw,
    "V1": send_v1,
    "gRPC raw": send_grpc_raw,
    "gRPC typed": send_grpc_typed,
}
