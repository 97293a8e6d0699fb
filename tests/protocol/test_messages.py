from __future__ import annotations

import pytest

from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import InferRequestHead, InputTensor

TENSOR = InputTensor("IN", DATATYPES["FP32"], (1,), 4)


@pytest.mark.parametrize(
    "head",
    [
        InferRequestHead((TENSOR,), parameters={"sequence_id": 7}),
        InferRequestHead((TENSOR,), extra={"sequence_id": "a"}),
        InferRequestHead(
            (TENSOR, InputTensor("sequence_control_input", DATATYPES["UINT32"], (1,)))
        ),
    ],
    ids=["id", "unknown member", "input"],
)
def test_request_with_a_sequence_parameter_or_input_is_in_a_sequence(
    head: InferRequestHead,
) -> None:
    assert head.is_in_sequence


def test_request_without_sequence_parameters_is_in_no_sequence() -> None:
    assert not InferRequestHead((TENSOR,)).is_in_sequence
    assert not InferRequestHead((TENSOR,), parameters={"priority": 1}).is_in_sequence
