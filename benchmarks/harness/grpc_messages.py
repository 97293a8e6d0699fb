"""Builds infer messages as they travel in gRPC, once, to be sent many times."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.requests import Request, Values
from tests.support.grpc.proto_file import message_class

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
PREFIX_SIZE = 5


def with_prefix(message: bytes) -> bytes:
    """Put a message that is not compressed behind its length."""
    return b"\0" + len(message).to_bytes(4) + message


def infer_request(model: str, values: Values) -> Request:
    """Build a request with raw contents, as tritonclient does."""
    request = message_class("ModelInferRequest")(model_name=model)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=values.shape)
    request.raw_input_contents.append(values.tobytes())
    return Request([], with_prefix(request.SerializeToString()))


def infer_response(values: Values) -> bytes:
    """Build a response with raw contents, as Triton does."""
    return with_prefix(_response(values).SerializeToString())


def stream_response(values: Values) -> bytes:
    """Build the same response as a message of ModelStreamInfer."""
    message = message_class("ModelStreamInferResponse")(infer_response=_response(values))
    return with_prefix(message.SerializeToString())


def _response(values: Values) -> Any:
    response = message_class("ModelInferResponse")(model_name="static", model_version="1")
    response.outputs.add(name="OUTPUT0", datatype="FP32", shape=values.shape)
    response.raw_output_contents.append(values.tobytes())
    return response
