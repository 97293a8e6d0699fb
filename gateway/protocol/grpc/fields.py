"""Tags of the fields of infer messages; inference.proto has the messages as a whole.

A tag is a field number with its wire type. A field of another wire type is an unknown field, as the
official runtime has it.
"""

from __future__ import annotations

from typing import Final

from gateway.protocol.grpc.wire import FIXED64, LENGTH, VARINT

# ModelInferRequest and ModelInferResponse.
MODEL_NAME: Final = 1 << 3 | LENGTH
MODEL_VERSION: Final = 2 << 3 | LENGTH
ID: Final = 3 << 3 | LENGTH
PARAMETERS: Final = 4 << 3 | LENGTH
TENSORS: Final = 5 << 3 | LENGTH
"""Inputs or outputs."""
REQUESTED_OUTPUTS: Final = 6 << 3 | LENGTH
RAW_INPUT_CONTENTS: Final = 7 << 3 | LENGTH
RAW_OUTPUT_CONTENTS: Final = 6 << 3 | LENGTH

# ModelStreamInferResponse.
ERROR_MESSAGE: Final = 1 << 3 | LENGTH
INFER_RESPONSE: Final = 2 << 3 | LENGTH

# InferInputTensor and InferOutputTensor.
TENSOR_NAME: Final = 1 << 3 | LENGTH
DATATYPE: Final = 2 << 3 | LENGTH
SHAPE: Final = 3 << 3 | LENGTH
UNPACKED_SHAPE: Final = 3 << 3 | VARINT
TENSOR_PARAMETERS: Final = 4 << 3 | LENGTH
CONTENTS: Final = 5 << 3 | LENGTH

# InferRequestedOutputTensor.
REQUESTED_NAME: Final = 1 << 3 | LENGTH
REQUESTED_PARAMETERS: Final = 2 << 3 | LENGTH

CLASSIFICATION: Final = b"classification"
"""The parameter of a requested output that some servers die of."""

# Entries of a map of parameters, and InferParameter.
KEY: Final = 1 << 3 | LENGTH
VALUE: Final = 2 << 3 | LENGTH
BOOL_PARAM: Final = 1 << 3 | VARINT
INT64_PARAM: Final = 2 << 3 | VARINT
STRING_PARAM: Final = 3 << 3 | LENGTH
DOUBLE_PARAM: Final = 4 << 3 | FIXED64
UINT64_PARAM: Final = 5 << 3 | VARINT
