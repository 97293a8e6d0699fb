"""Message classes of the official runtime, from the project's .proto files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gateway
from gateway.protocol.grpc import descriptors

FOLDER = Path(gateway.__file__).parent / "protocol" / "grpc"


def message_class(name: str) -> Any:
    """Return the class of a message of the inference protocol, or of one by its full name."""
    return descriptors.message_class(name if name.startswith("grpc.") else f"inference.{name}")


InferParameter = message_class("InferParameter")
InferTensorContents = message_class("InferTensorContents")
ModelInferRequest = message_class("ModelInferRequest")
ModelInferResponse = message_class("ModelInferResponse")
