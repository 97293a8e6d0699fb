"""Client form → upstream form: an infer request with its JSON ``data`` turned into binary."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from gateway.codec.array_scanner import Run, StringPart
from gateway.codec.elements_from_json import TensorFromJson
from gateway.codec.json_cutter import ArrayStart, JsonCutter
from gateway.errors import bad_request
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.inference_header import (
    AnswerForm,
    Fields,
    InputTensor,
    Source,
    parse_header,
    read_answer_form,
    read_inputs,
    request_binary_outputs,
    set_binary_size,
)
from gateway.protocol.tensors import element_count

Body = tuple[Sequence[bytes] | int, ...]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request as the server will get it.

    ``tensors`` are the bytes behind the header, in order: chunks held, or the number of bytes to
    take from what follows the JSON in the client's body.
    """

    header: bytes
    tensors: Body
    answer: AnswerForm

    @property
    def content_length(self) -> int:
        """Give the bytes of the whole body."""
        return len(self.header) + sum(map(_size, self.tensors))

    @property
    def expected_size(self) -> int:
        """Give the bytes that must follow the JSON in the client's body."""
        return sum(part for part in self.tensors if isinstance(part, int))


def _size(part: Sequence[bytes] | int) -> int:
    return part if isinstance(part, int) else sum(map(len, part))


class InferRequestCodec:
    """Converts the JSON part of an infer request as it arrives.

    ``header_cap`` is in bytes, ``depth_cap`` in levels of nesting. Holds the binary form of the
    data, and its text for as long as its datatype has not been seen.
    """

    def __init__(self, header_cap: int, depth_cap: int) -> None:
        self._cutter = JsonCutter(header_cap, depth_cap)
        self._depth_cap = depth_cap
        self._arrays: list[_Array] = []

    def feed(self, text: bytes, last: bool = False) -> None:
        """Convert the next text of the request; ``last`` tells that it is the end.

        Raises GatewayError: 400 naming what is wrong, 413 over the header cap.
        """
        for event in self._cutter.feed(text, last):
            if isinstance(event, ArrayStart):
                if self._arrays:
                    self._arrays[-1].learn(event.previous)
                self._arrays.append(_Array(event.index))
                self._arrays[-1].learn(event.fields)
            else:
                self._arrays[-1].take(event)

    def work(self) -> bool:
        """Convert one run that had to wait for its datatype; tell whether there was one."""
        return any(array.work() for array in self._arrays)

    def finish(self) -> InferRequest:
        """Give the request, once all text was fed.

        Raises GatewayError (400) that names the tensor for whatever the header gets wrong.
        """
        text = self._cutter.finish()
        fields = parse_header(text, self._depth_cap)
        inputs = read_inputs(fields)
        entries = fields["inputs"]
        self._check_places(entries)
        for array in self._arrays:
            array.learn(entries[array.index])
        while self.work():
            pass
        answer = read_answer_form(fields)
        converted = {array.index: array.tensor(inputs[array.index]) for array in self._arrays}
        for index, tensor in converted.items():
            _check_count(inputs[index], tensor)
            set_binary_size(entries[index], tensor.size)
        changed = request_binary_outputs(fields)
        # Byte for byte where nothing had to change.
        header = orjson.dumps(fields) if changed or converted else text
        return InferRequest(header, _body(inputs, converted), answer)

    def _check_places(self, entries: list[Fields]) -> None:
        """Check that every data is an array that was cut out, and stands where it was cut."""
        places = {array.index: number for number, array in enumerate(self._arrays)}
        for index, entry in enumerate(entries):
            if "data" in entry and entry["data"] != places.get(index):
                raise bad_request(f"the data of inputs[{index}] must be an array under a plain key")


class _Array:
    """The data of one input: its converter, or its text while the datatype is not known."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._waiting: deque[Run | StringPart] = deque()
        self._tensor: TensorFromJson | None = None

    def learn(self, fields: Fields) -> None:
        """Take note of the input's fields: name and datatype, if they are there by now."""
        datatype = fields.get("datatype")
        if self._tensor is None and isinstance(datatype, str) and datatype in DATATYPES:
            name = fields.get("name")
            label = f"input '{name}'" if isinstance(name, str) else f"inputs[{self.index}]"
            self._tensor = TensorFromJson(label, DATATYPES[datatype])

    def take(self, item: Run | StringPart) -> None:
        if self._tensor is None or self._waiting:
            self._waiting.append(item)
        else:
            self._tensor.feed(item)

    def work(self) -> bool:
        if self._tensor is None or not self._waiting:
            return False
        self._tensor.feed(self._waiting.popleft())
        return True

    def tensor(self, declared: InputTensor) -> TensorFromJson:
        """Give the converted tensor; the header, which has the last word, must agree."""
        assert self._tensor is not None
        if self._tensor.datatype is not declared.datatype:
            raise bad_request(f"input '{declared.name}' has more than one datatype")
        return self._tensor


def _check_count(declared: InputTensor, tensor: TensorFromJson) -> None:
    expected = element_count(declared.shape)
    if tensor.count != expected:
        raise bad_request(
            f"input '{declared.name}': shape {list(declared.shape)} takes {expected} elements, "
            f"data has {tensor.count}"
        )


def _body(inputs: tuple[InputTensor, ...], converted: dict[int, TensorFromJson]) -> Body:
    parts: list[Sequence[bytes] | int] = []
    for index, declared in enumerate(inputs):
        if declared.source is Source.DATA:
            parts.append(converted[index].chunks)
        elif declared.binary_size is not None:
            parts.append(declared.binary_size)
    return tuple(parts)
