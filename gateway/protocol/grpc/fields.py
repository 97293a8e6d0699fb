"""Field numbers of the infer messages; inference.proto has the messages as a whole.

A ``..._TAG`` is a field number with its wire type. A field of another wire type is an unknown
field, as the official runtime has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gateway.protocol.grpc.wire import FIXED32, FIXED64, LENGTH, VARINT

# ModelInferRequest and ModelInferResponse.
MODEL_NAME: Final = 1
MODEL_VERSION: Final = 2
ID: Final = 3
PARAMETERS: Final = 4
INPUTS: Final = 5
REQUESTED_OUTPUTS: Final = 6
RAW_INPUT_CONTENTS: Final = 7
OUTPUTS: Final = 5
RAW_OUTPUT_CONTENTS: Final = 6

MODEL_NAME_TAG: Final = MODEL_NAME << 3 | LENGTH
MODEL_VERSION_TAG: Final = MODEL_VERSION << 3 | LENGTH
ID_TAG: Final = ID << 3 | LENGTH
PARAMETERS_TAG: Final = PARAMETERS << 3 | LENGTH
INPUTS_TAG: Final = INPUTS << 3 | LENGTH
REQUESTED_OUTPUTS_TAG: Final = REQUESTED_OUTPUTS << 3 | LENGTH
OUTPUTS_TAG: Final = OUTPUTS << 3 | LENGTH
RAW_OUTPUT_CONTENTS_TAG: Final = RAW_OUTPUT_CONTENTS << 3 | LENGTH

# ModelStreamInferResponse.
ERROR_MESSAGE: Final = 1
INFER_RESPONSE: Final = 2

ERROR_MESSAGE_TAG: Final = ERROR_MESSAGE << 3 | LENGTH
INFER_RESPONSE_TAG: Final = INFER_RESPONSE << 3 | LENGTH

# InferInputTensor and InferOutputTensor.
TENSOR_NAME: Final = 1
DATATYPE: Final = 2
SHAPE: Final = 3
TENSOR_PARAMETERS: Final = 4
CONTENTS: Final = 5

TENSOR_NAME_TAG: Final = TENSOR_NAME << 3 | LENGTH
DATATYPE_TAG: Final = DATATYPE << 3 | LENGTH
PACKED_SHAPE_TAG: Final = SHAPE << 3 | LENGTH
SHAPE_TAG: Final = SHAPE << 3 | VARINT
TENSOR_PARAMETERS_TAG: Final = TENSOR_PARAMETERS << 3 | LENGTH
CONTENTS_TAG: Final = CONTENTS << 3 | LENGTH

# InferRequestedOutputTensor.
REQUESTED_NAME: Final = 1
REQUESTED_PARAMETERS: Final = 2

REQUESTED_NAME_TAG: Final = REQUESTED_NAME << 3 | LENGTH
REQUESTED_PARAMETERS_TAG: Final = REQUESTED_PARAMETERS << 3 | LENGTH

CLASSIFICATION: Final = b"classification"
"""The parameter of a requested output that some servers die of."""

# Entries of a map of parameters, and InferParameter.
KEY: Final = 1
VALUE: Final = 2
BOOL_PARAM: Final = 1
INT64_PARAM: Final = 2
STRING_PARAM: Final = 3
DOUBLE_PARAM: Final = 4
UINT64_PARAM: Final = 5

KEY_TAG: Final = KEY << 3 | LENGTH
VALUE_TAG: Final = VALUE << 3 | LENGTH
BOOL_PARAM_TAG: Final = BOOL_PARAM << 3 | VARINT
INT64_PARAM_TAG: Final = INT64_PARAM << 3 | VARINT
STRING_PARAM_TAG: Final = STRING_PARAM << 3 | LENGTH
DOUBLE_PARAM_TAG: Final = DOUBLE_PARAM << 3 | FIXED64
UINT64_PARAM_TAG: Final = UINT64_PARAM << 3 | VARINT


@dataclass(frozen=True, slots=True, eq=False)
class ContentsField:
    """A field of InferTensorContents; ``dtype`` holds its elements, None for bool and bytes."""

    number: int
    name: str
    wire_type: int
    dtype: np.dtype[Any] | None = None


CONTENTS_FIELDS: Final = {
    field.number: field
    for field in (
        ContentsField(1, "bool_contents", VARINT),
        ContentsField(2, "int_contents", VARINT, np.dtype("<i4")),
        ContentsField(3, "int64_contents", VARINT, np.dtype("<i8")),
        ContentsField(4, "uint_contents", VARINT, np.dtype("<u4")),
        ContentsField(5, "uint64_contents", VARINT, np.dtype("<u8")),
        ContentsField(6, "fp32_contents", FIXED32, np.dtype("<f4")),
        ContentsField(7, "fp64_contents", FIXED64, np.dtype("<f8")),
        ContentsField(8, "bytes_contents", LENGTH),
    )
}
"""The fields of InferTensorContents by number."""

_NUMBERS = {
    "BOOL": 1,
    "INT8": 2,
    "INT16": 2,
    "INT32": 2,
    "INT64": 3,
    "UINT8": 4,
    "UINT16": 4,
    "UINT32": 4,
    "UINT64": 5,
    "FP32": 6,
    "FP64": 7,
    "BYTES": 8,
}
TYPED_CONTENTS: Final = {name: CONTENTS_FIELDS[number] for name, number in _NUMBERS.items()}
"""The field with the elements of each datatype. FP16 and BF16 have none: they travel raw only."""
