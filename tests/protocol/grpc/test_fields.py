"""The field numbers in code are those of inference.proto."""

from __future__ import annotations

import pytest

from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.wire import FIXED32, FIXED64, LENGTH, VARINT
from tests.support.grpc.proto_file import message_class

WIRE_TYPES = {"bool": VARINT, "bytes": LENGTH, "float": FIXED32, "double": FIXED64}


def numbers(name: str) -> dict[str, int]:
    return {each.name: each.number for each in message_class(name).DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "ModelInferRequest",
            {
                "model_name": fields.MODEL_NAME,
                "model_version": fields.MODEL_VERSION,
                "id": fields.ID,
                "parameters": fields.PARAMETERS,
                "inputs": fields.INPUTS,
                "outputs": fields.REQUESTED_OUTPUTS,
                "raw_input_contents": fields.RAW_INPUT_CONTENTS,
            },
        ),
        (
            "ModelInferResponse",
            {
                "model_name": fields.MODEL_NAME,
                "model_version": fields.MODEL_VERSION,
                "id": fields.ID,
                "parameters": fields.PARAMETERS,
                "outputs": fields.OUTPUTS,
                "raw_output_contents": fields.RAW_OUTPUT_CONTENTS,
            },
        ),
        *(
            (
                name,
                {
                    "name": fields.TENSOR_NAME,
                    "datatype": fields.DATATYPE,
                    "shape": fields.SHAPE,
                    "parameters": fields.TENSOR_PARAMETERS,
                    "contents": fields.CONTENTS,
                },
            )
            for name in (
                "ModelInferRequest.InferInputTensor",
                "ModelInferResponse.InferOutputTensor",
            )
        ),
        (
            "ModelInferRequest.InferRequestedOutputTensor",
            {"name": fields.REQUESTED_NAME, "parameters": fields.REQUESTED_PARAMETERS},
        ),
        (
            "InferParameter",
            {
                "bool_param": fields.BOOL_PARAM,
                "int64_param": fields.INT64_PARAM,
                "string_param": fields.STRING_PARAM,
                "double_param": fields.DOUBLE_PARAM,
                "uint64_param": fields.UINT64_PARAM,
            },
        ),
        (
            "ModelInferRequest.ParametersEntry",
            {"key": fields.KEY, "value": fields.VALUE},
        ),
        (
            "InferTensorContents",
            {each.name: number for number, each in fields.CONTENTS_FIELDS.items()},
        ),
    ],
)
def test_numbers_are_those_of_the_proto_file(name: str, expected: dict[str, int]) -> None:
    assert numbers(name) == expected


def test_every_datatype_but_half_floats_has_typed_contents() -> None:
    assert DATATYPES.keys() - fields.TYPED_CONTENTS.keys() == {"FP16", "BF16"}
    for name, field in fields.TYPED_CONTENTS.items():
        dtype = DATATYPES[name].dtype
        if field.dtype is not None:
            assert dtype is not None
            assert dtype.kind == field.dtype.kind
            assert dtype.itemsize <= field.dtype.itemsize
