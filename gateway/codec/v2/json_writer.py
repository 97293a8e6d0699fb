"""Writes messages as JSON while the data of their tensors arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from sys import getsizeof
from typing import Any, Final

import orjson

from gateway.codec.elements.encode import (
    OffloadedText,
    TensorEncoder,
    TextChunk,
    join_text,
    make_tensor_encoder,
)
from gateway.codec.offload_interface import Offloader
from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.protocol.datatypes import Family
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary, Tensor
from gateway.protocol.messages import (
    Fields,
    InferRequest,
    InputTensor,
    OutputTensor,
    RequestedOutput,
)
from gateway.protocol.request_header import mark_base64
from gateway.protocol.tensors import element_count

_NUL: Final = b"\0"
"""Stands for the data of a tensor: JSON has it nowhere else."""
_PLACE: Final = orjson.Fragment(b"[%b]" % _NUL)


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
        """Bytes of a tensor that has begun."""

    def feed(self, data: bytes | memoryview) -> Iterator[TensorPiece]:
        """Yield the pieces of the next data, which may be empty."""
        data = memoryview(data)  # slices of bytes would be copies
        while self._current < len(self._tensors):
            chunks = self._buffered.pop(self._current, None)
            size = self._tensors[self._current].binary_size
            if size and chunks is None:
                missing = self._missing or size
                piece, data = data[:missing], data[missing:]
                self._missing = missing - len(piece)
                if piece:
                    yield TensorPiece(self._current, piece, not self._missing)
                if self._missing:
                    return
            elif chunks or size == 0:
                *first, last = chunks or [b""]
                for chunk in first:
                    yield TensorPiece(self._current, chunk, last=False)
                yield TensorPiece(self._current, last, last=True)
            self._current += 1
        if data:
            raise self._words.malformed(f"{self._words.name} holds more bytes than its header says")

    def finish(self) -> None:
        """Check that the data are complete."""
        if any(each.binary_size for each in self._tensors[self._current :]):
            raise self._words.malformed(
                f"{self._words.name} ends before all that its header says has come"
            )


class DataEncoder:
    """Encodes the data of a message's tensors as text, each by the policies for it."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        policies_of: Callable[[Any], JsonPolicies],
        words: ErrorVocabulary,
    ) -> None:
        self._tensors = tensors
        self._policies_of = policies_of
        self._words = words
        self._encoder: TensorEncoder | None = None

    def parts(
        self, piece: TensorPiece, offloader: Offloader | None = None
    ) -> Iterator[TextChunk | OffloadedText]:
        """Yield the text for the next piece; the ``offloader`` may encode parts of it.

        Raises GatewayError: 502 for an invalid response, 406 if a policy refuses a value; 400 for
        either in a request.
        """
        tensor = self._tensors[piece.index]
        if self._encoder is None:
            label, policies = self._words.label(tensor.name), self._policies_of(tensor)
            self._encoder = make_tensor_encoder(label, tensor.datatype, policies, self._words)
        yield from self._encoder.parts(piece.data, offloader)
        if piece.last:
            check_element_count(tensor, self._encoder, self._words)
            self._encoder = None


class JsonMessageWriter:
    """Writes a message as JSON while the data of its tensors arrive; it is a ResponseWriter.

    ``fields`` are its members, with its tensors but without data. ``texts`` are JSON data that are
    here already, by the index of their tensor.
    """

    def __init__(
        self,
        fields: Fields,
        tensors: Sequence[Tensor],
        policies_of: Callable[[Any], JsonPolicies],
        words: ErrorVocabulary,
        texts: Mapping[int, Sequence[bytes]],
    ) -> None:
        self._data = DataEncoder(tensors, policies_of, words)
        has_data = [each.binary_size is not None or i in texts for i, each in enumerate(tensors)]
        first, *parts = split_around_data(fields, words.tensors, has_data)
        skeleton = [first]
        with_data = [index for index, has in enumerate(has_data) if has]
        for index, after in zip(with_data, parts, strict=True):
            if index in texts:
                skeleton[-1] = b"".join((skeleton[-1], *texts[index], after))
            else:
                skeleton.append(after)
        self._skeleton = iter(skeleton)
        """The texts before, between and behind the data to come."""
        self.buffered_bytes = sum(map(getsizeof, skeleton))

    def start(self) -> Iterator[bytes]:
        """Yield the text before the first data to come."""
        yield next(self._skeleton)

    def encode(
        self, piece: TensorPiece, offloader: Offloader | None = None
    ) -> Iterator[TextChunk | OffloadedText]:
        """Yield the text for the next piece; see DataEncoder."""
        yield from self._data.parts(piece, offloader)
        if piece.last:
            yield next(self._skeleton)

    def finish(self) -> Iterator[bytes]:
        """Yield nothing: all has been written."""
        return iter(())


class JsonRequestWriter:
    """Writes a request as JSON while the data of its tensors arrives, for servers that need that.

    BYTES inputs get the encoding that the client used in JSON, else the policy's. An input with a
    content type of its own stays text: the content type tells the server how to read it.
    """

    def __init__(self, request: InferRequest, policies: JsonPolicies) -> None:
        inputs = request.head.inputs
        policies_of = partial(_policies_of, policies)  # a bound method would be a reference cycle
        fields = _request_fields(request, policies)
        self._writer = JsonMessageWriter(fields, inputs, policies_of, REQUEST, {})
        self._splitter = TensorSplitter(inputs, REQUEST)
        self._start = [*self._writer.start()]

    def feed(self, data: bytes | memoryview) -> bytes:
        """Return the text for the next data of the tensors; raises GatewayError (400)."""
        text, self._start = self._start, []
        text += [join_text(self._writer.encode(piece)) for piece in self._splitter.feed(data)]
        return b"".join(text)

    def finish(self) -> bytes:
        """Return the rest of the text: all of it if there was no data to feed."""
        text = self.feed(b"")
        self._splitter.finish()
        return text


def _request_fields(request: InferRequest, policies: JsonPolicies) -> Fields:
    head = request.head
    fields: Fields = {} if request.id is None else {"id": request.id}
    fields["inputs"] = [_input_fields(each, policies) for each in head.inputs]
    if head.outputs:
        as_base64 = head.output_encoding.as_base64
        fields["outputs"] = [_output_fields(each, as_base64) for each in head.outputs]
    if head.parameters:
        fields["parameters"] = head.parameters
    return {**fields, **head.extra}


def _input_fields(tensor: InputTensor, policies: JsonPolicies) -> Fields:
    fields = tensor_fields(tensor, tensor.parameters)
    is_text = tensor.datatype.family is Family.TEXT and tensor.binary_size is not None
    if is_text and _policies_of(policies, tensor).bytes_encoding is BytesEncoding.BASE64:
        mark_base64(fields)
    return fields


def _policies_of(policies: JsonPolicies, tensor: InputTensor) -> JsonPolicies:
    if tensor.base64 is None and "content_type" not in tensor.parameters:
        return policies
    encoding = BytesEncoding.BASE64 if tensor.base64 else BytesEncoding.UTF8
    return replace(policies, bytes_encoding=encoding)


def _output_fields(output: RequestedOutput, as_base64: frozenset[str]) -> Fields:
    fields: Fields = {"name": output.name, **output.extra}
    if output.parameters:
        fields["parameters"] = output.parameters
    if output.name in as_base64:
        mark_base64(fields)
    return fields


def check_element_count(tensor: Tensor, converter: TensorEncoder, words: ErrorVocabulary) -> None:
    """Raise GatewayError (502, 400) unless a tensor has as many elements as its shape."""
    converter.finish()
    expected = element_count(tensor.shape)
    if converter.count != expected:
        raise words.malformed(
            f"{words.label(tensor.name)} of {words.name} holds {converter.count} elements, "
            f"its shape {list(tensor.shape)} takes {expected}"
        )


def tensor_fields(tensor: InputTensor | OutputTensor, parameters: Fields) -> Fields:
    """Return the members of a tensor without its data, with these parameters."""
    datatype = tensor.datatype.name
    fields = {"name": tensor.name, "datatype": datatype, "shape": tensor.shape, **tensor.extra}
    return {**fields, "parameters": parameters} if parameters else fields


def split_around_data(fields: Fields, tensors: str, has_data: Sequence[bool]) -> list[bytes]:
    """Return a message's JSON, split where the data of tensors belong.

    ``tensors`` is the key of the tensors.
    """
    if has_data:
        entries = zip(fields[tensors], has_data, strict=True)
        marked = [{**entry, "data": _PLACE} if has else entry for entry, has in entries]
        fields = {**fields, tensors: marked}
    return orjson.dumps(fields).split(_NUL)
