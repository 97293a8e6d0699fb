"""Client form → upstream form: an infer request with its JSON ``data`` turned into binary."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from gateway.codec.array_scanner import Run, StringPart
from gateway.codec.elements_from_json import TensorFromJson
from gateway.codec.json_cutter import ArrayStart, Event, JsonCutter, stand_in
from gateway.codec.loans import NEVER_DONE, Lender, Loan, Work
from gateway.errors import GatewayError, bad_request
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.header_facts import HeaderFacts, may_hide_classification, read_facts
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
    facts: HeaderFacts

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


@dataclass(frozen=True, slots=True)
class _LentRun:
    """A run that is converted elsewhere, and where in its tensor the result goes."""

    tensor: TensorFromJson
    place: int
    run: Run
    loan: Loan


@dataclass(frozen=True, slots=True)
class _Header:
    """The JSON around the data, with a stand-in for each array."""

    text: bytes
    fields: Fields
    inputs: tuple[InputTensor, ...]


class InferRequestCodec:
    """Converts the JSON part of an infer request as it arrives.

    ``header_cap`` is in bytes, ``depth_cap`` in levels of nesting; ``lender`` may have numbers
    converted elsewhere. Holds the binary form of the data, and its text for as long as its
    datatype has not been seen. What comes first in the text is converted first, so that of two
    errors the same one is raised however the text is split.
    """

    def __init__(self, header_cap: int, depth_cap: int, lender: Lender | None = None) -> None:
        self._cutter = JsonCutter(header_cap, depth_cap)
        self._lender = lender
        self._lent: deque[_LentRun] = deque()
        self._depth_cap = depth_cap
        self._arrays: list[_Array] = []
        self._waiting: deque[tuple[_Array, Run | StringPart]] = deque()
        self._waiting_text = 0
        self._failure: GatewayError | None = None
        self._header: _Header | None = None

    @property
    def room(self) -> int:
        """Give the bytes of text that are best fed next: any number will do."""
        return self._cutter.room

    def feed(self, text: bytes | memoryview, last: bool = False) -> None:
        """Convert the next text of the request; ``last`` tells that it is the end.

        Raises GatewayError: 400 naming what is wrong, 413 over the header cap.
        """
        if self._failure is None:
            for event in self._events(text, last):
                self._take(event)
            if last:
                self._read_header()
        if self._failure is not None:
            self.work()

    def _events(self, text: bytes | memoryview, last: bool) -> Iterator[Event]:
        """Cut the text; an error waits until what comes before it is converted."""
        try:
            yield from self._cutter.feed(text, last)
        except GatewayError as error:
            self._failure = error

    def _take(self, event: Event) -> None:
        if isinstance(event, ArrayStart):
            if self._arrays:
                self._arrays[-1].learn(event.previous)
            self._arrays.append(_Array(event.index))
            self._arrays[-1].learn(event.fields)
        else:
            self._waiting.append((self._arrays[-1], event))
            self._waiting_text += len(event.text)
            self.work()

    def work(self) -> bool:
        """Convert one run that had to wait for a datatype; tell whether there was one.

        Raises GatewayError as ``feed`` does.
        """
        self._take_back()
        if self._waiting:
            array, item = self._waiting[0]
            if array.tensor is not None:
                self._waiting.popleft()
                self._waiting_text -= len(item.text)
                self._convert(array.tensor, item)
                return True
        if self._failure is not None and not self._lent:
            raise self._failure
        return False

    @property
    def held(self) -> int:
        """Give the bytes of data that are held, converted or not."""
        converted = sum(array.tensor.size for array in self._arrays if array.tensor is not None)
        return converted + self._waiting_text

    @property
    def loan(self) -> Loan | None:
        """Give the work lent out that has to be done before ``finish``, the first of it."""
        return self._lent[0].loan if self._lent else None

    def _convert(self, tensor: TensorFromJson, item: Run | StringPart) -> None:
        """Convert an item, here or elsewhere; what is wrong with it waits for those before it."""
        work = Work(to_json=False, datatype=tensor.datatype)
        run = item if isinstance(item, Run) and work.can_be_lent else None
        if run is not None and (loan := self._lend(work, run)) is not None:
            self._lent.append(_LentRun(tensor, tensor.leave_out(), run, loan))
            return
        try:
            tensor.feed(item)
        except GatewayError as error:
            if not self._lent:
                raise
            if run is not None:
                # Its fault is known once all before it is counted.
                self._lent.append(_LentRun(tensor, tensor.leave_out(), run, NEVER_DONE))
            else:
                self._failure = error
                self._waiting.clear()

    def _lend(self, work: Work, run: Run) -> Loan | None:
        if self._lender is None or run.lacks_element:
            return None
        return self._lender.lend(work, *run.pieces)

    def _take_back(self) -> None:
        """Take what was converted elsewhere, in order."""
        while self._lent and self._lent[0].loan.done:
            lent = self._lent.popleft()
            lent.tensor.fill_in(lent.place, lent.run, lent.loan.result)

    def finish(self) -> InferRequest:
        """Give the request, once all text was fed, the end of it as such.

        Raises GatewayError (400) that names the tensor for whatever the header gets wrong.
        """
        while self.work():
            pass
        assert not self._lent
        assert self._header is not None
        text, fields, inputs = self._header.text, self._header.fields, self._header.inputs
        entries = fields["inputs"]
        answer = read_answer_form(fields)
        facts = read_facts(fields, inputs)
        converted = {array.index: array.converted(inputs[array.index]) for array in self._arrays}
        for index, tensor in converted.items():
            _check_count(inputs[index], tensor)
            set_binary_size(entries[index], tensor.size)
        changed = request_binary_outputs(fields) or may_hide_classification(text)
        # Byte for byte where nothing had to change.
        header = orjson.dumps(fields) if changed or converted else text
        return InferRequest(header, _body(inputs, converted), answer, facts)

    def _read_header(self) -> None:
        """Read what stands around the data; the last datatype may be seen only here."""
        if self._failure is not None:
            return
        try:
            text = self._cutter.finish()
            fields = parse_header(text, self._depth_cap)
            inputs = read_inputs(fields)
            self._check_places(fields["inputs"])
        except GatewayError as error:
            self._failure = error
            return
        self._header = _Header(text, fields, inputs)
        for array in self._arrays:
            array.learn(fields["inputs"][array.index])

    def _check_places(self, entries: list[Fields]) -> None:
        """Check that every data is an array that was cut out, and stands where it was cut."""
        places = {array.index: stand_in(number) for number, array in enumerate(self._arrays)}
        for index, entry in enumerate(entries):
            if "data" in entry and entry["data"] != places.pop(index, None):
                raise bad_request(f"the data of inputs[{index}] must be an array under a plain key")
        if places:
            raise bad_request("a data array stands in inputs that the request gives more than once")


class _Array:
    """The data of one input; ``tensor`` is its converter, None while no datatype is known."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.tensor: TensorFromJson | None = None
        self._label = f"inputs[{index}]"

    def learn(self, fields: Fields) -> None:
        """Take note of the input's fields: name and datatype, if they are there by now."""
        name, datatype = fields.get("name"), fields.get("datatype")
        if isinstance(name, str):
            self._label = f"input '{name}'"
        if self.tensor is None and isinstance(datatype, str) and datatype in DATATYPES:
            self.tensor = TensorFromJson(self._label, DATATYPES[datatype])

    def converted(self, declared: InputTensor) -> TensorFromJson:
        """Give the converted tensor; the header, which has the last word, must agree."""
        assert self.tensor is not None
        if self.tensor.datatype is not declared.datatype:
            raise bad_request(f"input '{declared.name}' has more than one datatype")
        return self.tensor


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
