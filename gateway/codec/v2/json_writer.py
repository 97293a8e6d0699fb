"""Binary form → JSON: a message whose tensors follow its header, written as it arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from sys import getsizeof

import orjson

from gateway.codec.elements.encode import OffloadedText, TensorEncoder, TextChunk
from gateway.codec.json.parsed_size import estimate_parsed_size
from gateway.codec.offload import Offloader
from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import ErrorVocabulary, Tensor
from gateway.protocol.request_header import Fields
from gateway.protocol.tensors import element_count

_TENSOR_OVERHEAD = 150
"""Bytes of memory that what was checked of a tensor takes, beside the parsed header."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Bytes of the tensor number ``index``; ``last`` where they are its last."""

    index: int
    data: bytes | memoryview
    last: bool


class TensorReader:
    """Takes the body of a message in binary form; gives its fields, then the bytes of its tensors.

    ``header_size`` is the JSON part's, in bytes; ``parse`` makes fields and tensors of it. Raises
    GatewayError (502, or 400 for a request) for a body that is not what its header says.
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
    def held(self) -> int:
        """Give the bytes of memory that the header takes, as text while it comes and parsed."""
        return len(self._buffer) + self._fields_size

    def feed(self, data: bytes | memoryview) -> Iterator[TensorPiece]:
        """Yield the pieces of tensors that the data brings; ``fields`` are set before the first."""
        if self.fields is None:
            self._buffer += data
            if len(self._buffer) < self._header_size:
                return
            header, data = self._buffer[: self._header_size], self._buffer[self._header_size :]
            self._buffer = b""
            self.fields, self.tensors = self._parse(header)
            self._fields_size = estimate_parsed_size(header) + _TENSOR_OVERHEAD * len(self.tensors)
            yield from self._skip_empty()
        data = memoryview(data)  # slices of bytes would be copied for each tensor
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
        """Check that the body was whole."""
        if self.fields is None or self._current < len(self.tensors):
            raise truncated_error(self._message)

    def _skip_empty(self) -> Iterator[TensorPiece]:
        """Go to the next tensor that has bytes to come."""
        while self._current < len(self.tensors):
            self._missing = self.tensors[self._current].binary_size or 0
            if self._missing:
                return
            if self.tensors[self._current].binary_size == 0:
                yield TensorPiece(self._current, b"", last=True)
            self._current += 1


def truncated_error(message: ErrorVocabulary) -> GatewayError:
    """Make the error of a message that is not whole."""
    return message.malformed(f"{message.name} ends before all that its header says has come")


class JsonMessageWriter(ABC):
    """Writes what a reader gives as JSON while it arrives."""

    def __init__(self, reader: TensorReader, message: ErrorVocabulary) -> None:
        self._reader = reader
        self._message = message
        self._skeleton: deque[bytes] | None = None
        self._skeleton_size = 0
        self._encoder: TensorEncoder | None = None

    @property
    def held(self) -> int:
        """Give the bytes of memory that are held: all but what passes through."""
        return self._reader.held + self._skeleton_size

    @abstractmethod
    def _make_encoder(self, index: int) -> TensorEncoder:
        """Make the converter of a tensor."""

    def _rewrite_fields(self, fields: Fields) -> Fields:
        """Give the header's fields as they shall be, but for data and sizes."""
        return fields

    def feed(self, data: bytes | memoryview) -> bytes:
        """Give the text that the data brings.

        Raises GatewayError: 502 for a broken answer, 406 where a policy refuses a value; 400 for
        either in a request.
        """
        return b"".join([part for part in self.parts(data) if not isinstance(part, OffloadedText)])

    def parts(
        self, data: bytes | memoryview, offloader: Offloader | None = None
    ) -> Iterator[TextChunk | OffloadedText]:
        """Yield the text that the data brings; ``lender`` may have parts of it written elsewhere.

        Raises GatewayError as ``feed`` does.
        """
        for piece in self._reader.feed(data):
            if self._skeleton is None:
                yield self._write_first_part()
            yield from self._encode_piece(piece, offloader)
        if self._skeleton is None and self._reader.fields is not None:
            yield self._write_first_part()

    def finish(self) -> None:
        """Check that the message was whole; raises GatewayError as ``feed`` does."""
        self._reader.finish()

    def _write_first_part(self) -> bytes:
        follows = [tensor.binary_size is not None for tensor in self._reader.tensors]
        fields = self._rewrite_fields(self._reader.fields or {})
        self._skeleton = deque(skeleton(fields, self._message.tensors, follows))
        self._skeleton_size = sum(map(getsizeof, self._skeleton))
        return self._next_skeleton_part(self._skeleton)

    def _next_skeleton_part(self, skeleton: deque[bytes]) -> bytes:
        """Take what stands before or behind the data that are written next."""
        text = skeleton.popleft()
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
    """Raise GatewayError (502, 400) unless it had as many elements as its shape says."""
    converter.finish()
    expected = element_count(tensor.shape)
    if converter.count != expected:
        raise message.malformed(
            f"{message.label(tensor.name)} of {message.name} holds {converter.count} elements, "
            f"its shape {list(tensor.shape)} takes {expected}"
        )


def skeleton(fields: Fields, tensors: str, wants_json: list[bool]) -> list[bytes]:
    """Give the JSON around the data of the tensors that become JSON, cut where each data goes.

    ``tensors`` is the key that they stand under.
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
    """Give a tensor's fields without its data, or the size of it."""
    plain = {k: v for k, v in tensor.items() if k != "data"}
    return without_parameter(plain, "binary_data_size")


def without_parameter(fields: Fields, parameter: str) -> Fields:
    """Give fields without one of their parameters, and without any if it was the only one."""
    parameters = fields.get("parameters")
    if not isinstance(parameters, dict) or parameter not in parameters:
        return fields
    left = {k: v for k, v in parameters.items() if k != parameter}
    if left:
        return {**fields, "parameters": left}  # in its place
    return {k: v for k, v in fields.items() if k != "parameters"}
