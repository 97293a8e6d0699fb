"""Writes messages with binary tensors as JSON while they arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from sys import getsizeof

import orjson

from gateway.codec.elements.encode import OffloadedText, TensorEncoder, TextChunk
from gateway.codec.json.parsed_size import estimate_parsed_size
from gateway.codec.offload_interface import Offloader
from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import ErrorVocabulary, Tensor
from gateway.protocol.messages import Fields
from gateway.protocol.tensors import element_count

_TENSOR_OVERHEAD = 150
"""Bytes of memory of a tensor's checked description, beside the parsed header."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Bytes of tensor number ``index``; ``last`` marks its last piece."""

    index: int
    data: bytes | memoryview
    last: bool


class TensorReader:
    """Reads a message in binary form: its header, then the bytes of its tensors.

    ``header_size`` is the size of the JSON part, which ``parse`` turns into fields and tensors.
    Raises GatewayError (502, or 400 for a request) for a body that does not match its header.
    """

    def __init__(
        self,
        header_size: int,
        parse: Callable[[bytes], tuple[Fields, Sequence[Tensor]]],
        message: ErrorVocabulary,
    ) -> None:
        self._header_size = header_size
        self._parse = parse
        self._message = message
        self._buffer = b""
        self._current = 0
        self._missing = 0
        self._fields_size = 0
        self.fields: Fields | None = None
        self.tensors: Sequence[Tensor] = ()

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of memory of the header, as text and parsed."""
        return len(self._buffer) + self._fields_size

    def feed(self, data: bytes | memoryview) -> Iterator[TensorPiece]:
        """Yield pieces of tensors; ``fields`` is set before the first piece."""
        if self.fields is None:
            self._buffer += data
            if len(self._buffer) < self._header_size:
                return
            header, data = self._buffer[: self._header_size], self._buffer[self._header_size :]
            self._buffer = b""
            self.fields, self.tensors = self._parse(header)
            self._fields_size = estimate_parsed_size(header) + _TENSOR_OVERHEAD * len(self.tensors)
            yield from self._skip_empty()
        data = memoryview(data)  # slices of bytes would be copies
        while data:
            if self._current == len(self.tensors):
                raise self._message.malformed(
                    f"{self._message.name} holds more bytes than its header says"
                )
            piece, data = data[: self._missing], data[self._missing :]
            self._missing -= len(piece)
            yield TensorPiece(self._current, piece, not self._missing)
            if not self._missing:
                self._current += 1
                yield from self._skip_empty()

    def finish(self) -> None:
        """Check that the body is complete."""
        if self.fields is None or self._current < len(self.tensors):
            raise truncated_error(self._message)

    def _skip_empty(self) -> Iterator[TensorPiece]:
        """Advance to the next tensor with bytes to come."""
        while self._current < len(self.tensors):
            self._missing = self.tensors[self._current].binary_size or 0
            if self._missing:
                return
            if self.tensors[self._current].binary_size == 0:
                yield TensorPiece(self._current, b"", last=True)
            self._current += 1


def truncated_error(message: ErrorVocabulary) -> GatewayError:
    """Make the error for a truncated message."""
    return message.malformed(f"{message.name} ends before all that its header says has come")


class JsonMessageWriter(ABC):
    """Writes the message of a TensorReader as JSON while it arrives."""

    def __init__(self, reader: TensorReader, message: ErrorVocabulary) -> None:
        self._reader = reader
        self._message = message
        self._skeleton: deque[bytes] | None = None
        self._skeleton_size = 0
        self._encoder: TensorEncoder | None = None

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes buffered."""
        return self._reader.buffered_bytes + self._skeleton_size

    @abstractmethod
    def _make_encoder(self, index: int) -> TensorEncoder:
        """Make the encoder of a tensor."""

    def _rewrite_fields(self, fields: Fields) -> Fields:
        """Return the fields to write; data and sizes are handled elsewhere."""
        return fields

    def feed(self, data: bytes | memoryview) -> bytes:
        """Return the text for the next data.

        Raises GatewayError: 502 for an invalid response, 406 if a policy refuses a value; 400 for
        either in a request.
        """
        return b"".join([part for part in self.parts(data) if not isinstance(part, OffloadedText)])

    def parts(
        self, data: bytes | memoryview, offloader: Offloader | None = None
    ) -> Iterator[TextChunk | OffloadedText]:
        """Yield the text for the next data; the ``offloader`` may encode parts of it.

        Raises GatewayError as ``feed`` does.
        """
        for piece in self._reader.feed(data):
            if self._skeleton is None:
                yield self._write_first_part()
            yield from self._encode_piece(piece, offloader)
        if self._skeleton is None and self._reader.fields is not None:
            yield self._write_first_part()

    def finish(self) -> bytes:
        """Return the rest of the text: all of it if there was no data to feed.

        Raises GatewayError as ``feed`` does, and if the message is not complete.
        """
        text = self.feed(b"")
        self._reader.finish()
        return text

    def _write_first_part(self) -> bytes:
        follows = [tensor.binary_size is not None for tensor in self._reader.tensors]
        fields = self._rewrite_fields(self._reader.fields or {})
        self._skeleton = deque(split_around_data(fields, self._message.tensors, follows))
        self._skeleton_size = sum(map(getsizeof, self._skeleton))
        return self._next_skeleton_part(self._skeleton)

    def _next_skeleton_part(self, split_around_data: deque[bytes]) -> bytes:
        """Take the text before or behind the next data."""
        text = split_around_data.popleft()
        self._skeleton_size -= getsizeof(text)
        return text

    def _encode_piece(
        self, piece: TensorPiece, offloader: Offloader | None
    ) -> Iterator[TextChunk | OffloadedText]:
        assert self._skeleton is not None
        if self._encoder is None:
            self._encoder = self._make_encoder(piece.index)
        if offloader is None:
            yield self._encoder.feed(piece.data)
        else:
            yield from self._encoder.parts(piece.data, offloader)
        if piece.last:
            check_element_count(self._reader.tensors[piece.index], self._encoder, self._message)
            self._encoder = None
            yield self._next_skeleton_part(self._skeleton)


def check_element_count(tensor: Tensor, converter: TensorEncoder, message: ErrorVocabulary) -> None:
    """Raise GatewayError (502, 400) unless a tensor has as many elements as its shape."""
    converter.finish()
    expected = element_count(tensor.shape)
    if converter.count != expected:
        raise message.malformed(
            f"{message.label(tensor.name)} of {message.name} holds {converter.count} elements, "
            f"its shape {list(tensor.shape)} takes {expected}"
        )


def split_around_data(fields: Fields, tensors: str, wants_json: list[bool]) -> list[bytes]:
    """Return the JSON around the data of the tensors written as JSON, split at each data.

    ``tensors`` is the key of the tensors.
    """
    pieces = [bytearray(b"{")]  # bytes would be copied for each tensor
    for number, (key, value) in enumerate(fields.items()):
        pieces[-1] += (b"," if number else b"") + orjson.dumps(key) + b":"
        if key == tensors:
            _tensors_skeleton(value, wants_json, pieces)
        else:
            pieces[-1] += orjson.dumps(value)
    pieces[-1] += b"}"
    return list(map(bytes, pieces))


def _tensors_skeleton(
    tensors: list[Fields], wants_json: list[bool], pieces: list[bytearray]
) -> None:
    pieces[-1] += b"["
    for index, tensor in enumerate(tensors):
        if index:
            pieces[-1] += b","
        if not wants_json[index]:
            pieces[-1] += orjson.dumps(tensor)
            continue
        pieces[-1] += orjson.dumps(_without_data(tensor))[:-1] + b',"data":['
        pieces.append(bytearray(b"]}"))
    pieces[-1] += b"]"


def _without_data(tensor: Fields) -> Fields:
    """Return a tensor's fields without its data and its binary size."""
    plain = {k: v for k, v in tensor.items() if k != "data"}
    return without_parameter(plain, "binary_data_size")


def without_parameter(fields: Fields, parameter: str) -> Fields:
    """Return fields without a parameter, and without parameters if it was the only one."""
    parameters = fields.get("parameters")
    if not isinstance(parameters, dict) or parameter not in parameters:
        return fields
    left = {k: v for k, v in parameters.items() if k != parameter}
    if left:
        return {**fields, "parameters": left}  # keeps the order of the keys
    return {k: v for k, v in fields.items() if k != "parameters"}
