"""Reads one value of a V1 request into its tensor, whatever its nesting."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.codec import native
from gateway.codec.elements.base64_elements import Base64Decoder
from gateway.codec.json.array_scanner import ArrayScanner, ElementRun, StringPart, find_string_cut
from gateway.codec.json.text_reader import WINDOW, JsonTextReader, PauseReason, Steps
from gateway.codec.v1.nested_tensor import NestedTensorBuilder
from gateway.errors import ModelMismatchError, bad_request
from gateway.protocol.json_errors import quote_bytes
from gateway.protocol.v1 import BASE64_KEY
from gateway.sizes import LISTED_NAMES, QUOTED_NAME

_ELEMENTS_PER_SLICE = 64
"""Elements read one by one in a time slice."""
_ALL_REMAINING = 2**63
_ELEMENT_WINDOWS = (2 * 1024, 32 * 1024)
"""Bytes of elements converted together: most arrays end within the first size."""
_MEMBERS_PER_SLICE = 16
"""Members of an object read in a time slice."""


def read_members(
    text: JsonTextReader,
    tensors: Mapping[str, NestedTensorBuilder],
    where: str,
    in_rows: bool = False,
) -> Steps[None]:
    """Read an object that has a member for each tensor; with ``in_rows``, the next row of each.

    ``where`` names the object in errors. Raises GatewayError (400) for a member that is missing,
    duplicate or unknown.
    """
    named = set[str]()
    yield from text.expect(b"{", "an object")
    mark = yield from text.peek_byte()
    if mark == b"}":
        text.skip(1)
    while mark != b"}":
        name = yield from text.take_key()
        if name not in tensors:
            raise ModelMismatchError(
                f"{where} names '{name[:QUOTED_NAME]}', but the model takes {input_names(tensors)}"
            )
        if name in named:
            raise bad_request(f"{where} names '{name}' twice")
        named.add(name)
        if len(named) % _MEMBERS_PER_SLICE == 0:
            yield PauseReason.TIME_SLICE
        if in_rows:
            tensors[name].begin_row()
        yield from read_value(text, tensors[name])
        mark = yield from text.expect(b",}", "a comma or the end of the object")
    missing = [name for name in tensors if name not in named]
    if missing:
        raise ModelMismatchError(
            f"{where} lacks '{missing[0]}'; the model takes {input_names(tensors)}"
        )


def input_names(tensors: Mapping[str, NestedTensorBuilder]) -> str:
    """List the inputs of a model for an error."""
    return ", ".join(list(tensors)[:LISTED_NAMES]) + (
        ", ..." if len(tensors) > LISTED_NAMES else ""
    )


def read_value(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    """Read an array or a single element of a tensor.

    An array of BYTES is read in runs if its first window contains no object.
    """
    mark = yield from text.peek_byte()
    if mark == b"[":
        if tensor.is_text and b"{" in (yield from text.peek_window()):
            yield from _read_elements(text, tensor)
        else:
            yield from _read_array(text, tensor)
    elif tensor.is_text and mark in b'"{':
        yield from read_element(text, tensor)
    elif mark == b"{":
        raise ModelMismatchError(
            f"{tensor.label}: element {tensor.values.count} is an object, "
            f"{tensor.declared.datatype.name} needs {tensor.declared.datatype.family.value}"
        )
    else:
        raw = yield from (text.take_string() if mark == b'"' else text.take_scalar())
        tensor.feed(ElementRun(raw, 1, 1, first=True))


def _read_array(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    """Read an array of plain values in runs."""
    start = text.offset
    scanner = ArrayScanner(tensor.label, text.depth_cap)
    while True:
        yield from _feed_runs(scanner, text, tensor)
        if scanner.invalid_text is not None:
            raise bad_request(
                f"{tensor.label} is not an array of plain values, at byte "
                f"{start + scanner.invalid_at}, near: {quote_bytes(scanner.invalid_text)}"
            )
        text.put_back(*scanner.take_rest())
        if scanner.ended:
            return
        yield from text.wait_for_more()


def _feed_runs(
    scanner: ArrayScanner, text: JsonTextReader, tensor: NestedTensorBuilder
) -> Steps[None]:
    """Convert the runs at hand; this frame, and so the text, is gone while more is awaited."""
    for item in scanner.scan(*_taken(text)):
        tensor.feed(item)
        if tensor.is_text:
            yield PauseReason.TIME_SLICE


def _taken(text: JsonTextReader) -> tuple[bytes, bool, int]:
    buffer, at = text.take_all()
    return buffer, text.ended, at


def _read_elements(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    """Read an array of BYTES of which some are base64 objects."""
    depth = read = 0
    single_reads = 1
    while True:
        mark = yield from text.peek_byte()
        if not single_reads:
            single_reads = yield from _read_window(text, tensor, depth)
        if single_reads and mark == b"[":
            text.skip(1)
            tensor.add_marks(b"[")
            depth += 1
            if depth > text.depth_cap:
                raise bad_request(f"{tensor.label} is nested deeper than {text.depth_cap}")
            single_reads = 0 if single_reads == 1 else single_reads
            if (yield from text.peek_byte()) != b"]":
                continue
        elif single_reads:
            yield from read_element(text, tensor)
            single_reads -= 1
            read += 1
            if read % _ELEMENTS_PER_SLICE == 0:
                yield PauseReason.TIME_SLICE
        while (yield from text.expect(b",]", "a comma or the end of the array")) == b"]":
            tensor.add_marks(b"]")
            depth -= 1
            if not depth:
                return
        tensor.add_marks(b",")


def _read_window(text: JsonTextReader, tensor: NestedTensorBuilder, depth: int) -> Steps[int]:
    """Convert the elements of a window; return how many must be read one by one."""
    for size in _ELEMENT_WINDOWS:
        window = yield from text.peek_window(size)
        end, ends, max_depth = native.scan_array_values(window)
        if ends:
            break
    if not end:
        return 1
    # Reading one by one names what is invalid.
    rows = None if depth + max_depth > text.depth_cap else tensor.convert_elements(window[:end])
    if rows is None:
        return _ALL_REMAINING
    tensor.append_elements(rows)
    text.skip(end)
    yield PauseReason.TIME_SLICE
    return 0


def read_element(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    """Read one element of BYTES: a string or a base64 object."""
    mark = yield from text.peek_byte()
    if mark == b'"':
        yield from _read_string(text, tensor)
        return
    if mark != b"{":
        raise tensor.not_bytes_error()
    text.skip(1)
    if (yield from text.peek_byte()) != b'"' or (yield from text.take_key()) != BASE64_KEY:
        raise tensor.not_bytes_error()
    if (yield from text.peek_byte()) != b'"':
        raise tensor.not_bytes_error()
    tensor.has_base64 = True
    yield from _read_base64(text, tensor)
    if (yield from text.peek_byte()) != b"}":
        raise tensor.not_bytes_error()
    text.skip(1)
    tensor.end_element()


def _read_base64(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    text.skip(1)
    decoder = Base64Decoder()
    ended = False
    while not ended:
        piece, ended = yield from text.take_until(b'"')
        try:
            tensor.append_to_element(decoder.feed(piece, last=ended))
        except ValueError as error:
            raise bad_request(
                f"{tensor.label}: element {tensor.values.count} is not base64 ({error})"
            ) from None


def _read_string(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    whole = yield from text.take_short_string()
    if whole is None:
        text.skip(1)
        yield from _read_long_string(text, tensor)
        whole = b'""'
    tensor.feed(ElementRun(whole, 1, 1, first=True))


def _read_long_string(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    while True:
        window = yield from text.peek_window()
        cut = find_string_cut(window, len(window) == WINDOW, text.ended)
        if cut is None:
            yield from text.wait_for_more()
            continue
        end, closed = cut
        tensor.feed(StringPart(window[:end]))
        text.skip(end + closed)
        if closed:
            return
