"""Parses the parts that infer requests and responses have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.codec.grpc.header_budget import HeaderBudget
from gateway.codec.grpc.parameters import read_parameter
from gateway.codec.grpc.tensors import TENSORS_TAG, ParsedTensor, pairs, read_tensor
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.wire import Buffer, WireReader
from gateway.protocol.messages import Fields


class MessageParts:
    """Parses the parts of a message apart from its id and raw contents.

    ``ranges`` are the start and end of each part in the buffer. A subclass sets its own attributes
    before it calls this constructor, which parses everything. Raises WireError and GatewayError.
    """

    def __init__(
        self, data: Buffer, ranges: Sequence[int], header_cap: int, words: ErrorVocabulary
    ) -> None:
        self.tensors: Final[list[ParsedTensor]] = []
        self.model = ""
        self.version = ""
        self.parameters: Final[Fields] = {}
        self.unknown: Final = bytearray()
        self.budget: Final = HeaderBudget(header_cap, words)
        self._words: Final = words
        for start, end in pairs(ranges):
            reader = WireReader(data, start, end)
            while tag := reader.next_tag():
                if tag == TENSORS_TAG:
                    self._read_tensor(reader)
                else:
                    self.budget.spend(reader.size_ahead(tag))
                    self.read_field(reader, tag)

    def read_field(self, reader: WireReader, tag: int) -> None:
        """Read a field that is no tensor; subclasses read theirs first."""
        if tag == fields.MODEL_NAME_TAG:
            self.model = reader.read_text()
        elif tag == fields.MODEL_VERSION_TAG:
            self.version = reader.read_text()
        elif tag == fields.PARAMETERS_TAG:
            read_parameter(reader, self.parameters)
        else:
            self.unknown.extend(reader.skip_raw(tag))

    def _read_tensor(self, reader: WireReader) -> None:
        tensor = reader.enter()
        self.budget.spend(tensor.position - reader.field_start)
        self.tensors.append(read_tensor(tensor, len(self.tensors), self.budget, self._words))
