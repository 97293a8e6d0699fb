"""Features of an infer request that crash or confuse some servers.

They are parameters of Triton's extensions: classification, sequence, schedule policy, and shared
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gateway.errors import ErrorKind, GatewayError, bad_request, shorten
from gateway.protocol.datatypes import Family
from gateway.protocol.json_errors import describe_value
from gateway.protocol.messages import (
    Fields,
    InferRequestHead,
    InputTensor,
    RequestedOutput,
    RequestFeatures,
)
from gateway.protocol.tensors import TensorSpec
from gateway.sizes import QUOTED_NAME

_REGION = "shared_memory_region"
_UINT64_END = 2**64


def read_features(
    parameters: Fields, inputs: Sequence[InputTensor], outputs: Sequence[RequestedOutput]
) -> RequestFeatures:
    """Read the features from the parameters of a request, its inputs and its requested outputs."""
    parts = [("the request", parameters, _REQUEST_PARAMETERS)]
    parts += [(f"input '{each.name}'", each.parameters, _TENSOR_PARAMETERS) for each in inputs]
    parts += [(f"output '{each.name}'", each.parameters, _OUTPUT_PARAMETERS) for each in outputs]
    # If an output is listed twice, some servers take the first and others the last.
    classified = tuple(each.name for each in outputs if each.parameters.get("classification"))
    errors = (_type_error(label, part, types) for label, part, types in parts)
    return RequestFeatures(classified, next(filter(None, errors), ""))


def may_hide_classification(text: bytes) -> bool:
    """Tell whether a header's text may request classification although its fields do not.

    If a key occurs twice, servers take the first and the parsed fields have the last.
    """
    return b"classification" in text or b"\\u" in text


def check_classified_inputs(head: InferRequestHead) -> None:
    """Refuse classification without elements: Triton divides by their number, and crashes.

    Raises GatewayError (400) that names the output and the empty input.
    """
    for tensor in head.inputs:
        if 0 in tensor.shape:
            raise bad_request(
                f"output '{head.features.classified_outputs[0]}': classification needs elements, "
                f"and input '{tensor.name}' of shape {list(tensor.shape)} has none"
            )


def check_classified_outputs(
    features: RequestFeatures, outputs: Sequence[TensorSpec], model: str | None
) -> None:
    """Refuse classification of strings: Triton crashes as it compares them.

    ``outputs`` are those of the model. Raises GatewayError: 400 that names the output, 501 if there
    are no outputs, as the server does not tell them.
    """
    if not outputs:
        raise GatewayError(
            ErrorKind.UNSUPPORTED,
            f"classification of output '{features.classified_outputs[0]}': the server does not "
            f"say what outputs model '{model}' has",
        )
    datatypes = {output.name: output.datatype for output in outputs}
    for name in features.classified_outputs:
        # The server refuses an output that the model does not have.
        if name in datatypes and datatypes[name].family is Family.TEXT:
            raise bad_request(
                f"output '{name}' of model '{model}' is {datatypes[name].name}, which "
                "cannot be classified"
            )


def region_error(what: str, tensors: Iterable[InputTensor | RequestedOutput], prefix: str) -> str:
    """Name the first tensor in a shared memory region whose name begins with a prefix.

    ``what`` is input or output. Empty if there is no such tensor.
    """
    for tensor in tensors:
        region = tensor.parameters.get(_REGION)
        if isinstance(region, str) and region.startswith(prefix):
            shown = shorten(region, QUOTED_NAME)
            return f"{what} '{tensor.name}': shared memory region '{shown}' is the gateway's own"
    return ""


_Type = tuple[tuple[type, ...], str]
"""Types of values, and their words in errors; an int is unsigned."""

_UNSIGNED: _Type = ((int,), "an integer of 0 or more")
_FLAG: _Type = ((bool,), "true or false")
_TEXT: _Type = ((str,), "a string")

_REQUEST_PARAMETERS: Mapping[str, _Type] = {
    "sequence_id": ((int, str), "an integer of 0 or more, or a string"),
    "sequence_start": _FLAG,
    "sequence_end": _FLAG,
    "priority": _UNSIGNED,
    "timeout": _UNSIGNED,
}
_TENSOR_PARAMETERS: Mapping[str, _Type] = {
    _REGION: _TEXT,
    "shared_memory_offset": _UNSIGNED,
    "shared_memory_byte_size": _UNSIGNED,
}
_OUTPUT_PARAMETERS: Mapping[str, _Type] = {**_TENSOR_PARAMETERS, "classification": _UNSIGNED}


def _type_error(label: str, parameters: Fields, types: Mapping[str, _Type]) -> str:
    for name, value in parameters.items():
        if name in types and not _is_one_of(value, types[name][0]):
            return f"{label}: {name} must be {types[name][1]}, got {describe_value(value)}"
    return ""


def _is_one_of(value: object, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds and (not isinstance(value, int) or 0 <= value < _UINT64_END)
