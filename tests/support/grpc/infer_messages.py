"""Writes the messages of inference over gRPC, and reads its responses."""

from __future__ import annotations

from tests.support.grpc.proto_file import message_class
from tests.support.inference_messages import FLOATS


def infer_request(
    model: str = "m",
    values: bytes = FLOATS.tobytes(),
    *,
    version: str = "",
    id: str = "7",  # noqa: A002  (that of the message)
    typed: bool = False,
) -> bytes:
    """Write a ModelInferRequest of one FP32 input, in raw contents or in typed ones."""
    request = message_class("ModelInferRequest")(model_name=model, model_version=version, id=id)
    tensor = request.inputs.add(name="IN", datatype="FP32", shape=[len(values) // 4])
    if typed:
        tensor.contents.fp32_contents.extend(memoryview(values).cast("f"))
    else:
        request.raw_input_contents.append(values)
    return bytes(request.SerializeToString())
