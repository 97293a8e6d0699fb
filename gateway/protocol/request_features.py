"""What an infer request's JSON part asks beside the data, as far as not every server stands it.

Triton's extensions: classification, sequence, schedule policy, and shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.protocol.request_header import Fields, InputTensor, describe_value

_BOUND = 2**64


@dataclass(frozen=True, slots=True)
class RequestFeatures:
    """The inputs of a request, and what is odd about the rest of it.

    ``classified`` are the outputs of which the classes are wanted. ``fault`` says which parameter
    is not of the type that the extensions give it; empty if none is.
    """

    inputs: tuple[InputTensor, ...]
    classified_outputs: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_plain(self) -> bool:
        """Tell whether there is nothing odd."""
        return not self.classified_outputs and not self.error


def read_features(fields: Fields, inputs: tuple[InputTensor, ...]) -> RequestFeatures:
    """Tell the facts of a request's checked fields."""
    parts = [("the request", fields, _OF_THE_REQUEST)]
    parts += [(f"input '{entry['name']}'", entry, _OF_A_TENSOR) for entry in fields["inputs"]]
    outputs = fields.get("outputs", [])
    parts += [(f"output '{entry['name']}'", entry, _OF_AN_OUTPUT) for entry in outputs]
    # Of an output listed twice, there are servers that take the first, and such that take the last.
    classified_outputs = tuple(entry["name"] for entry in outputs if _is_classified(entry))
    faults = (_fault(label, part, types) for label, part, types in parts)
    return RequestFeatures(inputs, classified_outputs, next(filter(None, faults), ""))


def may_hide_classification(text: bytes) -> bool:
    """Tell whether a header's text could ask for classes where its fields do not.

    Of two keys of one name, servers take the first and the fields have the last.
    """
    return b"classification" in text or b"\\u" in text


def _is_classified(output: Fields) -> bool:
    return bool(output.get("parameters", {}).get("classification"))


def _is_unsigned(value: object) -> bool:
    return type(value) is int and 0 <= value < _BOUND


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

_OF_THE_REQUEST: Mapping[str, _Type] = {
    "sequence_id": (_is_sequence_id, "an integer of 0 or more, or a string"),
    "sequence_start": _FLAG,
    "sequence_end": _FLAG,
    "priority": _UNSIGNED,
    "timeout": _UNSIGNED,
}
_OF_A_TENSOR: Mapping[str, _Type] = {
    "shared_memory_region": _TEXT,
    "shared_memory_offset": _UNSIGNED,
    "shared_memory_byte_size": _UNSIGNED,
}
_OF_AN_OUTPUT: Mapping[str, _Type] = {**_OF_A_TENSOR, "classification": _UNSIGNED}


def _fault(label: str, part: Fields, types: Mapping[str, _Type]) -> str:
    for name, value in part.get("parameters", {}).items():
        if name in types and not types[name][0](value):
            return f"{label}: {name} must be {types[name][1]}, got {describe_value(value)}"
    return ""
