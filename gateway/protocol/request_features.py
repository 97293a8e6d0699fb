"""Features of an infer request that crash or confuse some servers.

They are parameters of Triton's extensions: classification, sequence, schedule policy, and shared
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.protocol.request_header import Fields, InputTensor, describe_value

_UINT64_END = 2**64


@dataclass(frozen=True, slots=True)
class RequestFeatures:
    """The inputs of a request, and its unusual features.

    ``classified_outputs`` are the outputs that request classification. ``error`` says which
    parameter has a type that the extensions do not allow; empty if none has.
    """

    inputs: tuple[InputTensor, ...]
    classified_outputs: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_plain(self) -> bool:
        """Tell whether the request has no unusual features."""
        return not self.classified_outputs and not self.error


def read_features(fields: Fields, inputs: tuple[InputTensor, ...]) -> RequestFeatures:
    """Read the features from a request's checked fields."""
    parts = [("the request", fields, _REQUEST_PARAMETERS)]
    parts += [(f"input '{entry['name']}'", entry, _TENSOR_PARAMETERS) for entry in fields["inputs"]]
    outputs = fields.get("outputs", [])
    parts += [(f"output '{entry['name']}'", entry, _OUTPUT_PARAMETERS) for entry in outputs]
    # If an output is listed twice, some servers take the first and others the last.
    classified_outputs = tuple(entry["name"] for entry in outputs if _is_classified(entry))
    errors = (_type_error(label, part, types) for label, part, types in parts)
    return RequestFeatures(inputs, classified_outputs, next(filter(None, errors), ""))


def may_hide_classification(text: bytes) -> bool:
    """Tell whether a header's text may request classification although its fields do not.

    If a key occurs twice, servers take the first and the parsed fields have the last.
    """
    return b"classification" in text or b"\\u" in text


def _is_classified(output: Fields) -> bool:
    return bool(output.get("parameters", {}).get("classification"))


def _is_unsigned(value: object) -> bool:
    return type(value) is int and 0 <= value < _UINT64_END


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_sequence_id(value: object) -> bool:
    return _is_text(value) or _is_unsigned(value)


_Type = tuple[Callable[[object], bool], str]

_UNSIGNED: _Type = (_is_unsigned, "an integer of 0 or more")
_FLAG: _Type = (_is_flag, "true or false")
_TEXT: _Type = (_is_text, "a string")

_REQUEST_PARAMETERS: Mapping[str, _Type] = {
    "sequence_id": (_is_sequence_id, "an integer of 0 or more, or a string"),
    "sequence_start": _FLAG,
    "sequence_end": _FLAG,
    "priority": _UNSIGNED,
    "timeout": _UNSIGNED,
}
_TENSOR_PARAMETERS: Mapping[str, _Type] = {
    "shared_memory_region": _TEXT,
    "shared_memory_offset": _UNSIGNED,
    "shared_memory_byte_size": _UNSIGNED,
}
_OUTPUT_PARAMETERS: Mapping[str, _Type] = {**_TENSOR_PARAMETERS, "classification": _UNSIGNED}


def _type_error(label: str, part: Fields, types: Mapping[str, _Type]) -> str:
    for name, value in part.get("parameters", {}).items():
        if name in types and not types[name][0](value):
            return f"{label}: {name} must be {types[name][1]}, got {describe_value(value)}"
    return ""
