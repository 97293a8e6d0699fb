"""Infer requests and responses, apart from the form in which they travel.

A reader makes a message of one form, a writer makes another form of it. Neither knows the other,
so that a new form costs one of each.

What is made for each call is a plain class: a frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from gateway.protocol.datatypes import Datatype
from gateway.protocol.tensors import element_count

Fields = dict[str, Any]

SEQUENCE_PREFIX: Final = "sequence_"
"""How the names of parameters begin that make requests parts of a sequence."""
_SEQUENCE_NAME: Final = re.compile(rb'"sequence_|\\u00[567]')
"""The start of such a name, or an escape of one of its letters."""

TensorData = Sequence[bytes | memoryview] | int
"""Little-endian bytes: buffered chunks, or the number of bytes that are still to come."""


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One input of a request, without its data.

    ``binary_size`` counts the bytes of its data, None if they are in shared memory. ``base64``
    tells whether JSON data had strings in base64, None if the data was no JSON. ``parameters``
    lack those that describe the form. ``extra`` are members that the protocol does not know;
    ``unknown_fields`` are such fields of a protobuf message, as their bytes. Each is for its own
    form only.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    binary_size: int | None = None
    base64: bool | None = None
    parameters: Fields = field(default_factory=dict)
    extra: Fields = field(default_factory=dict)
    unknown_fields: bytes = b""

    def with_size(self, size: int | None) -> InputTensor:
        """Return the input with that size of its data."""
        # dataclasses.replace takes three times as long: much for a thousand inputs.
        return InputTensor(
            self.name,
            self.datatype,
            self.shape,
            size,
            self.base64,
            self.parameters,
            self.extra,
            self.unknown_fields,
        )


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One output that a request lists; see InputTensor."""

    name: str
    parameters: Fields = field(default_factory=dict)
    extra: Fields = field(default_factory=dict)
    unknown_fields: bytes = b""


@dataclass(frozen=True, slots=True)
class OutputEncoding:
    """The requested encoding of each output: binary or JSON.

    ``as_base64`` names the JSON outputs whose BYTES elements are requested in base64.
    """

    binary_by_default: bool
    binary_by_output: Mapping[str, bool]
    as_base64: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[object, ...]:
        """Return what is equal for equal encodings, and can be a key."""
        return self.binary_by_default, tuple(self.binary_by_output.items()), self.as_base64

    def wants_binary(self, output: str) -> bool:
        """Tell whether the client requests this output in binary."""
        return self.binary_by_output.get(output, self.binary_by_default)

    @property
    def all_binary(self) -> bool:
        """Tell whether every output is requested in binary."""
        if self.binary_by_output:
            return all(self.binary_by_output.values())
        return self.binary_by_default

    @property
    def all_json(self) -> bool:
        """Tell whether every output is requested in JSON."""
        if self.binary_by_output:
            return not any(self.binary_by_output.values())
        return not self.binary_by_default


ALL_BINARY: Final = OutputEncoding(binary_by_default=True, binary_by_output={})
ALL_JSON: Final = OutputEncoding(binary_by_default=False, binary_by_output={})


@dataclass(frozen=True, slots=True)
class RequestFeatures:
    """The unusual features of a request; request_features.py reads them.

    ``classified_outputs`` are the outputs that request classification. ``error`` says which
    parameter has a type that the extensions do not allow; empty if none has.
    """

    classified_outputs: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_plain(self) -> bool:
        """Tell whether the request has no unusual features."""
        return not self.classified_outputs and not self.error


PLAIN: Final = RequestFeatures()


def may_name_sequence(text: bytes) -> bool:
    """Tell whether JSON may have a member with the name of a sequence parameter.

    Of duplicates, a parser sees one, and a server may take another. Escapes can hide a name.
    """
    return _SEQUENCE_NAME.search(text) is not None


@dataclass(frozen=True, slots=True)
class InferRequestHead:
    """What requests of one client have in common: all but the id and the data of tensors.

    Readers cache heads, and writers keep in ``written`` what they have made of one, each by keys
    of its own. ``memory`` estimates the bytes that the head takes. ``names_sequence`` is what
    ``may_name_sequence`` tells of its text. See also InputTensor.
    """

    inputs: tuple[InputTensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: Fields = field(default_factory=dict)
    extra: Fields = field(default_factory=dict)
    output_encoding: OutputEncoding = ALL_BINARY
    features: RequestFeatures = PLAIN
    memory: int = field(default=0, compare=False)
    names_sequence: bool = field(default=False, compare=False)
    written: dict[tuple[str, ...] | str, bytes] = field(
        default_factory=dict, compare=False, repr=False
    )
    unknown_fields: bytes = b""

    @property
    def is_in_sequence(self) -> bool:
        """Whether the request may belong to a sequence, whose state it changes.

        Triton has parameters for that, OpenVINO Model Server inputs with names of the same kind.
        """
        if self.names_sequence:
            return True
        names = chain(self.parameters, self.extra, (each.name for each in self.inputs))
        return any(name.startswith(SEQUENCE_PREFIX) for name in names)

    @property
    def element_count(self) -> int:
        """Return the number of elements of all inputs, but for those in shared memory."""
        return sum([element_count(each.shape) for each in self.inputs if each.binary_size])


class InferRequest:
    """An infer request; model and version are those of its Operation.

    ``tensors`` are the data of the inputs in order, but for those in shared memory. ``text`` is the
    client's inference header if it asks for what a server of the binary form needs, else empty.
    """

    def __init__(
        self,
        head: InferRequestHead,
        id: str | None,  # noqa: A002  (the protocol's name)
        tensors: tuple[TensorData, ...],
        text: bytes = b"",
    ) -> None:
        self.head: Final = head
        self.id: Final = id
        self.tensors: Final = tensors
        self.text: Final = text

    @property
    def data_size(self) -> int:
        """Return the bytes of all data."""
        size = 0
        for part in self.tensors:
            if isinstance(part, int):
                size += part
            else:
                for chunk in part:
                    size += len(chunk)
        return size

    @property
    def chunks(self) -> list[bytes | memoryview]:
        """Return the data that is buffered."""
        return [chunk for part in self.tensors if not isinstance(part, int) for chunk in part]

    @property
    def missing_size(self) -> int:
        """Return the bytes of data that are still to come."""
        return sum(part for part in self.tensors if isinstance(part, int))


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One output of a response, without its data.

    ``binary_size`` counts the bytes of its data, None if the data are JSON text or in shared
    memory. See also InputTensor.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    binary_size: int | None = None
    parameters: Fields = field(default_factory=dict)
    extra: Fields = field(default_factory=dict)
    unknown_fields: bytes = b""


@dataclass(frozen=True, slots=True)
class InferResponseHead:
    """What responses of one model have in common; see InferRequestHead."""

    outputs: tuple[OutputTensor, ...]
    model: str | None = None
    version: str | None = None
    parameters: Fields = field(default_factory=dict)
    extra: Fields = field(default_factory=dict)
    memory: int = field(default=0, compare=False)
    written: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    unknown_fields: bytes = b""

    @property
    def element_count(self) -> int:
        """Return the number of elements of all outputs, but for those in shared memory."""
        shared = "shared_memory_region"
        return sum([element_count(x.shape) for x in self.outputs if shared not in x.parameters])


class InferResponse:
    """An infer response; the data of its outputs follow in order, but for those in shared memory.

    ``texts`` are the exception, by the index of an output: JSON text between the brackets of data,
    which the client gets as it is.
    """

    def __init__(
        self,
        head: InferResponseHead,
        id: str | None = None,  # noqa: A002  (the protocol's name)
        texts: Mapping[int, Sequence[bytes]] | None = None,
    ) -> None:
        self.head: Final = head
        self.id: Final = id
        self.texts: Final = texts or {}
