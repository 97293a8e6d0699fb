"""Message classes of the official runtime, from the project's .proto files, and a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gateway
from gateway.protocol.grpc import descriptors
from tests.support.inference_messages import FLOATS

FOLDER = Path(gateway.__file__).parent / "protocol" / "grpc"


def message_class(name: str) -> Any:
    """Return the class of a message of the inference protocol, or of one by its full name."""
    return descriptors.message_class(name if name.startswith("grpc.") else f"inference.{name}")


InferParameter = message_class("InferParameter")
InferTensorContents = message_class("InferTensorContents")
ModelInferRequest = message_class("ModelInferRequest")
ModelInferResponse = message_class("ModelInferResponse")


def infer_request(
    model: str = "m",
    values: bytes = FLOATS.tobytes(),
    *,
    version: str = "",
    id: str = "7",  # noqa: A002  (that of the message)
    typed: bool = False,
) -> bytes:
    """Write a ModelInferRequest of one FP32 input, in raw contents or in typed ones."""
    request = ModelInferRequest(model_name=model, model_version=version, id=id)
    tensor = request.inputs.add(name="IN", datatype="FP32", shape=[len(values) // 4])
    if typed:
        tensor.contents.fp32_contents.extend(memoryview(values).cast("f"))
    else:
        request.raw_input_contents.append(values)
    return bytes(request.SerializeToString())
