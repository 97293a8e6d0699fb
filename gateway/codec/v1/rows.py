"""The instances of a V1 request that are objects: rows of several tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.codec.elements.decode import finite_float
from gateway.codec.elements.rounding import may_decide_ties
from gateway.codec.json.text_reader import JsonTextReader, Pause, Steps
from gateway.codec.json.value_walk import count_objects_and_members, scan_values
from gateway.codec.v1.nested_tensor import NestedTensorBuilder
from gateway.codec.v1.values import read_members
from gateway.errors import GatewayError, bad_request

_TOGETHER = 32 * 1024
"""Bytes of instances that are parsed together: Python looks at each value of theirs."""
_EACH = 512
"""Bytes likewise for each tensor, as numbers of each tensor are converted together."""
_INSTANCES = 8
"""Instances that are read one by one before others get their turn."""


class RowsReader:
    """Reads instances, from behind the bracket that opens their array.

    Those that are small are parsed together, as many as 32 KiB hold; those that are not, and
    any with a fault, are read value by value, so that none is held and each fault is named.
    """

    def __init__(self, text: JsonTextReader, tensors: Mapping[str, NestedTensorBuilder]) -> None:
        self._text = text
        self._tensors = tensors
        self._number = 0

    def read(self) -> Steps[None]:
        """Read all instances, and the bracket that closes their array."""
        while True:
            count = yield from self._together()
            for left in range(count, 0, -1):
                yield from self._instance()
                if left > 1:
                    yield from self._text.take(b",", "a comma")
                    yield from self._object()
            if (yield from self._text.take(b",]", "a comma or the end of instances")) == b"]":
                return
            yield from self._object()

    def _object(self) -> Steps[None]:
        if (yield from self._text.mark()) != b"{":
            raise bad_request(
                f"instances[{self._number}] must be an object, as those before it are"
            )

    def _together(self) -> Steps[int]:
        """Read what instances a window holds; give the number of those to be read one by one."""
        # What is read together does not depend on how the text arrived.
        size = max(_TOGETHER, _EACH * len(self._tensors))
        window = yield from self._text.window(size)
        ends, deepest = scan_values(window)
        if not ends.size:
            return 1
        count = int(ends.size)
        converted = self._converted(window[: int(ends[-1])], deepest)
        while not converted and count > _INSTANCES:
            # Those before a fault are not read one by one, which takes fifty times as long.
            count //= 2
            part = window[: int(ends[count - 1])]
            converted = self._converted(part, scan_values(part)[1])
        if not converted:
            return count
        self._text.skip(int(ends[count - 1]))
        self._number += converted
        yield Pause.TURN
        return 0

    def _converted(self, text: bytes, depth: int) -> int:
        """Take whole instances, which nest so deep; tell how many, none where there is a fault."""
        if depth - 1 > self._text.depth_cap:
            return 0
        try:
            rows = _parsed(b"[%b]" % text)
            if not all(self._is_whole(row) for row in rows):
                return 0
            # All objects within the rows are elements in base64, of one member each.
            objects, members = count_objects_and_members(text)
            if members - objects != len(rows) * (len(self._tensors) - 1):
                return 0  # a key comes twice
            # What is parsed has no text any more that would decide a tie.
            may_tie = may_decide_ties(text)
            converted = [
                (tensor, tensor.convert_rows([row[name] for row in rows], may_tie))
                for name, tensor in self._tensors.items()
            ]
        except (GatewayError, ValueError, TypeError):
            return 0
        for tensor, values in converted:
            tensor.take_rows(values)
        return len(rows)

    def _is_whole(self, row: Any) -> bool:
        return isinstance(row, dict) and row.keys() == self._tensors.keys()

    def _instance(self) -> Steps[None]:
        yield from read_members(
            self._text, self._tensors, f"instances[{self._number}]", in_rows=True
        )
        self._number += 1
        if self._number % _INSTANCES == 0:
            yield Pause.TURN


def _parsed(text: bytes) -> Any:
    if b"NaN" not in text and b"Infinity" not in text:
        return orjson.loads(text)
    # The standard library's parser knows those; it is slow.
    return json.loads(text, parse_float=finite_float)
