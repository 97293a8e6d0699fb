"""Writes messages as JSON while the data of their tensors arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Any

import orjson

from gateway.codec.elements.encode import OffloadedText, TensorEncoder, TextChunk
from gateway.codec.offload_interface import Offloader
from gateway.protocol.datatypes import Datatype
from gateway.protocol.error_vocabulary import ErrorVocabulary, Tensor
from gateway.protocol.messages import Fields
from gateway.protocol.tensors import element_count


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Bytes of tensor number ``index``; ``last`` marks its last piece."""

    index: int
    data: bytes | memoryview
    last: bool


class TensorSplitter:
    """Splits the data of a message's tensors, which follow each other.

    ``buffered`` are data that are here already, by the index of their tensor. Raises GatewayError
    (502, or 400 for a request) for data that do not match their sizes.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        words: ErrorVocabulary,
        buffered: Mapping[int, Sequence[bytes]] | None = None,
    ) -> None:
        self._tensors = tensors
        self._words = words
        self._buffered = dict(buffered or {})
        self._current = 0
        self._missing = 0

    def feed(self, data: bytes | memoryview) -> Iterator[TensorPiece]:
        """Yield the pieces of the next data, which may be empty."""
        data = memoryview(data)  # slices of bytes would be copies
        yield from self._advance()
        while data:
            if self._current == len(self._tensors):
                raise self._words.malformed(
                    f"{self._words.name} holds more bytes than its header says"
                )
            piece, data = data[: self._missing], data[self._missing :]
            self._missing -= len(piece)
            yield TensorPiece(self._current, piece, not self._missing)
            if not self._missing:
                self._current += 1
                yield from self._advance()

    def finish(self) -> None:
        """Check that the data are complete."""
        if any(each.binary_size for each in self._tensors[self._current :]):
            raise self._words.malformed(
                f"{self._words.name} ends before all that its header says has come"
            )

    def _advance(self) -> Iterator[TensorPiece]:
        """Advance to the next tensor whose data are to come."""
        while not self._missing and self._current < len(self._tensors):
            chunks = self._buffered.pop(self._current, None)
            self._missing = self._tensors[self._current].binary_size or 0
            if chunks is None and self._missing:
                return
            if chunks or self._tensors[self._current].binary_size == 0:
                *first, last = chunks or [b""]
                for chunk in first:
                    yield TensorPiece(self._current, chunk, last=False)
                yield TensorPiece(self._current, last, last=True)
            self._missing = 0
            self._current += 1


class JsonMessageWriter(ABC):
    """Writes a message of these tensors as JSON while their data arrive.

    ``texts`` are JSON data that are here already, by the index of their tensor.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        words: ErrorVocabulary,
        texts: Mapping[int, Sequence[bytes]] | None = None,
    ) -> None:
        self._tensors = tensors
        self._words = words
        self._texts = texts or {}
        self._skeleton: deque[bytes] = deque()
        self._skeleton_size = 0
        self._encoder: TensorEncoder | None = None

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes buffered."""
        return self._skeleton_size

    @abstractmethod
    def _make_encoder(self, index: int) -> TensorEncoder:
        """Make the encoder of a tensor."""

    @abstractmethod
    def _write_fields(self) -> Fields:
        """Return the message, with its tensors but without data."""

    def start(self) -> Iterator[bytes]:
        """Yield the text before the first data to come."""
        has_data = [
            tensor.binary_size is not None or index in self._texts
            for index, tensor in enumerate(self._tensors)
        ]
        parts = split_around_data(self._write_fields(), self._words.tensors, has_data)
        self._skeleton.append(parts.popleft())
        for index in (index for index, has in enumerate(has_data) if has):
            after = parts.popleft()
            if index in self._texts:
                self._skeleton[-1] = b"".join((self._skeleton[-1], *self._texts[index], after))
            else:
                self._skeleton.append(after)
        self._texts = {}
        self._skeleton_size = sum(map(getsizeof, self._skeleton))
        yield self._next_skeleton_part()

    def encode(
        self, piece: TensorPiece, offloader: Offloader | None = None
    ) -> Iterator[TextChunk | OffloadedText]:
        """Yield the text for the next piece; the ``offloader`` may encode parts of it.

        Raises GatewayError: 502 for an invalid response, 406 if a policy refuses a value; 400 for
        either in a request.
        """
        yield from self._encode_data(piece, offloader)
        if piece.last:
            yield self._next_skeleton_part()

    def _encode_data(
        self, piece: TensorPiece, offloader: Offloader | None = None
    ) -> Iterator[TextChunk | OffloadedText]:
        """Yield the text for the data of a piece alone."""
        if self._encoder is None:
            self._encoder = self._make_encoder(piece.index)
        yield from self._encoder.parts(piece.data, offloader)
        if piece.last:
            check_element_count(self._tensors[piece.index], self._encoder, self._words)
            self._encoder = None

    def _next_skeleton_part(self) -> bytes:
        """Take the text before or behind the next data."""
        text = self._skeleton.popleft()
        self._skeleton_size -= getsizeof(text)
        return text


def check_element_count(tensor: Tensor, converter: TensorEncoder, words: ErrorVocabulary) -> None:
    """Raise GatewayError (502, 400) unless a tensor has as many elements as its shape."""
    converter.finish()
    expected = element_count(tensor.shape)
    if converter.count != expected:
        raise words.malformed(
            f"{words.label(tensor.name)} of {words.name} holds {converter.count} elements, "
            f"its shape {list(tensor.shape)} takes {expected}"
        )


def tensor_fields(
    name: str, datatype: Datatype, shape: tuple[int, ...], parameters: Fields, extra: Fields
) -> Fields:
    """Return the members of a tensor without its data."""
    fields = {"name": name, "datatype": datatype.name, "shape": shape, **extra}
    return {**fields, "parameters": parameters} if parameters else fields


def split_around_data(fields: Fields, tensors: str, has_data: Sequence[bool]) -> deque[bytes]:
    """Return a message's JSON, split where the data of tensors belong.

    ``tensors`` is the key of the tensors.
    """
    pieces = [bytearray(b"{")]  # bytes would be copied for each tensor
    for number, (key, value) in enumerate(fields.items()):
        pieces[-1] += (b"," if number else b"") + orjson.dumps(key) + b":"
        if key == tensors:
            _split_tensors(value, has_data, pieces)
        else:
            pieces[-1] += orjson.dumps(value)
    pieces[-1] += b"}"
    return deque(map(bytes, pieces))


def _split_tensors(
    tensors: Sequence[Any], has_data: Sequence[bool], pieces: list[bytearray]
) -> None:
    pieces[-1] += b"["
    for index, tensor in enumerate(tensors):
        if index:
            pieces[-1] += b","
        pieces[-1] += orjson.dumps(tensor)
        if has_data[index]:
            pieces[-1][-1:] = b',"data":['
            pieces.append(bytearray(b"]}"))
    pieces[-1] += b"]"
