"""Reads V1 predict requests."""

from __future__ import annotations

import json
import math
import re
from itertools import count
from typing import Any

import orjson

from gateway.codec.elements.rounding import may_decide_ties
from gateway.codec.json.text_reader import JsonTextReader, PauseReason, Steps
from gateway.codec.structure_scan import count_objects_and_members, scan_values
from gateway.codec.v1.nested_reader import (
    MemoryCounter,
    NestedTensorBuilder,
    input_names,
    read_members,
    read_value,
)
from gateway.errors import GatewayError, ModelMismatchError, bad_request
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.json_errors import describe_json_kind
from gateway.protocol.messages import InferRequest, InferRequestHead, InputTensor
from gateway.protocol.request_features import read_features
from gateway.protocol.tensors import MAX_TENSORS, ModelMetadata
from gateway.protocol.v1 import (
    BASE64_KEY,
    OTHER_FIELDS,
    V1Format,
    V1ResponseLayout,
    check_fields,
    check_shape,
)

_FORMATS = {form.value: form for form in V1Format}
MAX_MEMBERS = 64
"""The most members of a request: each takes about 50 us, even if it has a few bytes."""
_V2_PEEK = 128
"""So many bytes of inputs show whether they are V2 tensors."""
_V2_TENSOR = re.compile(
    rb'\[[ \t\r\n]*\{[ \t\r\n]*"(?:name|shape|datatype|data|parameters)"[ \t\r\n]*:'
)
_BASE64_OBJECT_START = re.compile(rb'[ \t\n\r\[]*\{[ \t\n\r]*"b64"[ \t\n\r]*:')
ROWS_WINDOW = 32 * 1024
"""Bytes of instances parsed together: each of their values becomes a Python object."""
_ROWS_WINDOW_PER_INPUT = 512
"""For requests with many inputs, a larger window: each input costs a conversion of its own."""
_INSTANCES_PER_SLICE = 8
"""Instances read one by one in a time slice."""


class PredictRequestReader:
    """Reads a predict request for a model while it arrives.

    ``header_cap`` limits the bytes beside the tensors, ``depth_cap`` the nesting, ``tensor_cap``
    the inputs; a model with more inputs raises GatewayError (400). Only the binary form of the data
    is buffered. Results and errors do not depend on how the text is split.
    """

    def __init__(
        self, model: ModelMetadata, header_cap: int, depth_cap: int, tensor_cap: int = MAX_TENSORS
    ) -> None:
        if len(model.inputs) > tensor_cap:
            raise ModelMismatchError(REQUEST.too_many_tensors(tensor_cap).message)
        self._model = model
        self._text = JsonTextReader(header_cap, depth_cap)
        self._memory = MemoryCounter()
        self._tensors = {
            each.name: NestedTensorBuilder(each, self._memory) for each in model.inputs
        }
        self._form: V1Format | None = None
        self._fields: dict[str, object] = {}
        self._fields_size = 0
        self._number = 0
        """That of the next instance."""
        self._steps = self._read_request()

    @property
    def preferred_read_size(self) -> int:
        """Return the size of text to feed next; any other size works too."""
        return self._text.preferred_read_size

    @property
    def buffered_bytes(self) -> int:
        """Return the memory in bytes of text, tensors and parsed values."""
        return self._text.buffered_bytes + self._memory.size

    def feed(self, text: bytes | memoryview, last: bool = False) -> None:
        """Take the next text of the request; ``last`` marks the end."""
        self._text.feed(text, last)

    def step(self) -> bool:
        """Convert some of the text; return whether more can be converted.

        Raises GatewayError: 400 that names what is invalid, 413 over the header cap.
        """
        if next(self._steps, PauseReason.NEED_DATA) is PauseReason.TIME_SLICE:
            return True
        self._text.compact()
        return False

    def close(self) -> None:
        """Release the reader, which is in a reference cycle with this object."""
        self._steps.close()

    def finish(self, request_id: str) -> tuple[InferRequest, V1ResponseLayout]:
        """Return the request with an id, and how to write the response.

        The whole text must be fed and converted. V1 has no request ids. The id is for models that
        return it; it may be empty, but some servers fail without it. Raises GatewayError (400) that
        names an input whose shape is wrong for the model.
        """
        if self._form is None:
            raise bad_request("the request has neither instances nor inputs")
        parameters = check_fields(self._fields)
        parameters.pop("binary_data_output", None)  # V1 knows only JSON
        inputs: list[InputTensor] = []
        single = False
        for tensor in self._tensors.values():
            declared, values, shape = tensor.declared, tensor.values, tensor.shape()
            if check_shape(self._model, declared, shape, self._form).single:
                single, shape = True, shape[1:]
            base64 = tensor.has_base64 or None
            inputs.append(InputTensor(declared.name, declared.datatype, shape, values.size, base64))
        head = InferRequestHead(
            tuple(inputs),
            parameters=parameters,
            features=read_features(parameters, (), ()),
            memory=self._fields_size,
        )
        data = tuple(tensor.values.chunks for tensor in self._tensors.values())
        return InferRequest(head, request_id, data), V1ResponseLayout(self._form, single)

    def _read_request(self) -> Steps[None]:
        text = self._text
        mark = yield from text.peek_byte()
        if mark != b"{":
            raise bad_request(
                "the request must be a JSON object with instances or inputs, "
                f"got {describe_json_kind(mark)}"
            )
        text.skip(1)
        mark = yield from text.peek_byte()
        if mark == b"}":
            text.skip(1)
        for number in count():
            if mark == b"}":
                break
            if number == MAX_MEMBERS:
                raise bad_request(f"the request has more than {MAX_MEMBERS} members")
            yield from self._read_member((yield from text.take_key()))
            mark = yield from text.expect(b",}", "a comma or the end of the request")
        yield from text.expect_end()

    def _read_member(self, name: str) -> Steps[None]:
        form = _FORMATS.get(name)
        if form is None:
            value, size = yield from self._text.take_value()
            if name in OTHER_FIELDS:
                self._fields[name] = value
                self._memory.size += size
                self._fields_size += size
            return
        if self._form is not None:
            raise bad_request("the request must have either instances or inputs, and once")
        self._form = form
        yield from (self._read_rows() if form is V1Format.ROWS else self._read_columns())

    def _read_rows(self) -> Steps[None]:
        text = self._text
        if (mark := (yield from text.peek_byte())) != b"[":
            raise bad_request(f"instances must be an array, got {describe_json_kind(mark)}")
        first = (yield from text.peek_window())[1:].lstrip(b" \t\n\r")[:1]
        if first == b"]":
            raise bad_request("instances is empty: there is nothing to predict")
        if first != b"{" or (yield from self._begins_with_base64()):
            yield from read_value(text, self._single_tensor("each of the instances"))
        else:
            text.skip(1)
            yield from self._read_objects()

    def _read_columns(self) -> Steps[None]:
        text = self._text
        mark = yield from text.peek_byte()
        if mark == b"[" and _V2_TENSOR.match((yield from text.peek_window(_V2_PEEK))):
            raise bad_request(
                "inputs is an array of tensors, as in the V2 protocol: "
                "send such a request to /v2/models/MODEL/infer"
            )
        if mark != b"{" or (yield from self._begins_with_base64()):
            yield from read_value(text, self._single_tensor("inputs"))
        else:
            yield from read_members(text, self._tensors, "inputs")

    def _begins_with_base64(self) -> Steps[bool]:
        """Tell whether the first object is a base64 element of the only input."""
        if len(self._tensors) > 1 or BASE64_KEY in self._tensors:
            return False
        return _BASE64_OBJECT_START.match((yield from self._text.peek_window())) is not None

    def _single_tensor(self, what: str) -> NestedTensorBuilder:
        if len(self._tensors) > 1:
            raise ModelMismatchError(
                f"{what} must be an object that names the inputs: model '{self._model.name}' "
                f"takes {input_names(self._tensors)}"
            )
        (tensor,) = self._tensors.values()
        return tensor

    def _read_objects(self) -> Steps[None]:
        """Read instances that are objects, from behind the opening bracket of their array.

        Small instances are parsed together, as many as fit into a window. Large and invalid ones
        are read value by value, so that none is buffered and each error can name its element.
        """
        while True:
            count = yield from self._read_window()
            for left in range(count, 0, -1):
                yield from self._read_instance()
                if left > 1:
                    yield from self._text.expect(b",", "a comma")
                    yield from self._expect_object()
            if (yield from self._text.expect(b",]", "a comma or the end of instances")) == b"]":
                return
            yield from self._expect_object()

    def _expect_object(self) -> Steps[None]:
        if (yield from self._text.peek_byte()) != b"{":
            raise bad_request(
                f"instances[{self._number}] must be an object, as those before it are"
            )

    def _read_window(self) -> Steps[int]:
        """Read the instances of a window; return how many must be read one by one."""
        # The window does not depend on how the text arrived.
        size = max(ROWS_WINDOW, _ROWS_WINDOW_PER_INPUT * len(self._tensors))
        window = yield from self._text.peek_window(size)
        ends, max_depth = scan_values(window)
        if not ends.size:
            return 1
        count = int(ends.size)
        converted = self._convert(window[: int(ends[-1])], max_depth)
        while not converted and count > _INSTANCES_PER_SLICE:
            # Reading the valid ones before an error one by one would take fifty times as long.
            count //= 2
            part = window[: int(ends[count - 1])]
            converted = self._convert(part, scan_values(part)[1])
        if not converted:
            return count
        self._text.skip(int(ends[count - 1]))
        self._number += converted
        yield PauseReason.TIME_SLICE
        return 0

    def _convert(self, text: bytes, depth: int) -> int:
        """Convert complete instances; return how many, 0 if any is invalid."""
        if depth - 1 > self._text.depth_cap:
            return 0
        try:
            rows = _parse(b"[%b]" % text)
            names = self._tensors.keys()
            if not all(isinstance(row, dict) and row.keys() == names for row in rows):
                return 0
            # All objects within the rows are base64 elements, with one member each.
            objects, members = count_objects_and_members(text)
            if members - objects != len(rows) * (len(self._tensors) - 1):
                return 0  # a key is a duplicate
            # Parsed numbers have no text any more to decide a tie.
            may_tie = may_decide_ties(text)
            converted = [
                (tensor, tensor.convert_rows([row[name] for row in rows], may_tie))
                for name, tensor in self._tensors.items()
            ]
        except (GatewayError, ValueError, TypeError):
            return 0
        for tensor, values in converted:
            tensor.begin_row()
            tensor.append_elements(values)
        return len(rows)

    def _read_instance(self) -> Steps[None]:
        yield from read_members(
            self._text, self._tensors, f"instances[{self._number}]", in_rows=True
        )
        self._number += 1
        if self._number % _INSTANCES_PER_SLICE == 0:
            yield PauseReason.TIME_SLICE


def _parse(text: bytes) -> Any:
    if b"NaN" not in text and b"Infinity" not in text:
        return orjson.loads(text)
    # Only the slower standard library parses those.
    return json.loads(text, parse_float=_parse_finite_float)


def _parse_finite_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(digits)
    return value
