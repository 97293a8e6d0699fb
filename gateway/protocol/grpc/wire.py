"""Reads and writes the protobuf wire format, without message objects.

The limits are those of the official runtime (upb), so that whatever it refuses is refused here:
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import Final

Buffer = bytes | memoryview

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
START_GROUP: Final = 3
END_GROUP: Final = 4
FIXED32: Final = 5

MAX_MESSAGE: Final = 2**31 - 1
"""The most bytes of a message or of a value in it; protobuf's own limit."""

MAX_GROUP_DEPTH: Final = 32
"""Nested groups that are skipped. The runtime takes 100, messages around them included."""

MAX_GROUP_SIZE: Final = 64 * 1024
"""Bytes of a group that is skipped; each of its fields costs time. No server uses groups."""

MAX_VARINT_BYTES: Final = 10
MAX_TAG_BYTES: Final = 5
"""The runtime refuses longer forms of small tags."""

_UINT32_END: Final = 2**32
_UINT64_END: Final = 2**64
_INT64_END: Final = 2**63


class WireError(Exception):
    """Bytes that are not valid protobuf; ``offset`` is where in the buffer they stand."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} at byte {offset}")
        self.reason: Final = reason
        self.offset: Final = offset


class TruncatedError(WireError):
    """Bytes that are not valid protobuf yet: they end within a field.

    ``missing`` are the bytes that a value lacks whose size is known; 0 for another field.
    """

    def __init__(self, reason: str, offset: int, missing: int = 0) -> None:
        super().__init__(reason, offset)
        self.missing: Final = missing


class SkippedGroup:
    """A group that is skipped, by the offsets of its tag and of its first field."""

    def __init__(self, number: int, tag_start: int, start: int) -> None:
        self.open: Final = [number]
        """The numbers of the groups that have not ended, the innermost one last."""
        self.tag_start = tag_start
        self.start = start
        self.fields = 0
        """Fields and groups in it so far."""


class WireReader:
    """Reads the fields of one message, which takes the bytes from ``start`` to ``end`` of a buffer.

    ``next_tag`` returns the tag of the next field. The caller then calls the method for the tag's
    wire type, or ``skip``. Every method raises WireError for bytes that the runtime refuses.
    """

    def __init__(self, data: Buffer, start: int = 0, end: int = -1) -> None:
        self.data: Final = data
        self.position = start
        self.end: Final = len(data) if end < 0 else end
        self.field_start = start
        """Where the field of the last tag begins."""

    def next_tag(self) -> int:
        """Return the field number times 8 plus the wire type; 0 at the end of the message."""
        position = self.position
        self.field_start = position
        if position >= self.end:
            return 0
        tag = _byte(self.data, position)
        # Most tags are one byte: a field number below 16.
        if 8 <= tag < 128 and tag & 7 < START_GROUP:
            self.position = position + 1
            return tag
        tag = self._read_tag()
        if tag & 7 == END_GROUP:
            raise WireError(f"group {tag >> 3} ends but never began", position)
        return tag

    def read_varint(self) -> int:
        """Return an unsigned 64-bit number; bits above are dropped, as the runtime does."""
        position = self.position
        if position < self.end:
            byte = _byte(self.data, position)
            if byte < 128:
                self.position = position + 1
                return byte
        return self._read_long(MAX_VARINT_BYTES) % _UINT64_END

    def read_int64(self) -> int:
        """Return a signed 64-bit number."""
        value = self.read_varint()
        return value if value < _INT64_END else value - _UINT64_END

    def read_length(self) -> int:
        """Return the size of a value, whose bytes begin at ``position``; all are in the message."""
        start = self.position
        size = _byte(self.data, start) if start < self.end else 128
        if size < 128:
            self.position = start + 1
        else:
            size = self._read_long(MAX_VARINT_BYTES) % _UINT64_END
            if size > MAX_MESSAGE:
                raise WireError(f"a length of {size} bytes exceeds protobuf's limit", start)
        if size > self.end - self.position:
            left = self.end - self.position
            reason = f"a value of {size} bytes is cut short: {left} are left"
            raise TruncatedError(reason, start, size - left)
        return size

    def size_ahead(self, tag: int) -> int:
        """Return the bytes of the field whose tag was read, if it is length-delimited; else 0."""
        if tag & 7 != LENGTH:
            return 0
        start = self.position
        size = self.read_length() + self.position - self.field_start
        self.position = start
        return size

    def read_view(self) -> memoryview:
        """Return a length-delimited value without a copy."""
        size = self.read_length()
        start = self.position
        self.position = start + size
        return memoryview(self.data)[start : start + size]

    def read_text(self) -> str:
        """Return a string; raises WireError unless it is UTF-8."""
        size = self.read_length()
        start = self.position
        self.position = start + size
        try:
            return str(self.data[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise WireError("a string that is not UTF-8", start + error.start) from None

    def read_fixed(self, size: int) -> memoryview:
        """Return the bytes of a number of 4 or 8 bytes, little-endian."""
        start = self.position
        if size > self.end - start:
            raise TruncatedError(f"a number of {size} bytes is cut short", start)
        self.position = start + size
        return memoryview(self.data)[start : start + size]

    def enter(self) -> WireReader:
        """Return the reader of a message within this one."""
        size = self.read_length()
        start = self.position
        self.position = start + size
        return WireReader(self.data, start, start + size)

    def skip(self, tag: int) -> None:
        """Skip the value of a field."""
        wire_type = tag & 7
        if wire_type == VARINT:
            self.read_varint()
        elif wire_type == LENGTH:
            size = self.read_length()
            self.position += size
        elif wire_type == FIXED32:
            self.read_fixed(4)
        elif wire_type == FIXED64:
            self.read_fixed(8)
        else:
            self.skip_group(tag >> 3)

    def skip_raw(self, tag: int) -> Buffer:
        """Skip a field and return all its bytes, tag included, so that they can be kept."""
        start = self.field_start
        self.skip(tag)
        return self.data[start : self.position]

    def skip_group(self, number: int) -> int:
        """Skip a group whose tag was read; return the number of fields and groups in it."""
        group = SkippedGroup(number, self.field_start, self.position)
        self.skip_rest(group)
        return group.fields

    def skip_rest(self, group: SkippedGroup) -> None:
        """Skip a group from a field in it; if it is cut short, ``field_start`` is the field's."""
        # A loop: nested groups cost two bytes each, and must not exhaust the stack.
        numbers = group.open
        while numbers:
            start = self.field_start = self.position
            if start - group.start > MAX_GROUP_SIZE:
                raise WireError(f"a group of more than {MAX_GROUP_SIZE} bytes", group.tag_start)
            if start >= self.end:
                raise TruncatedError(f"group {numbers[-1]} never ends", start)
            tag = self._read_tag()
            wire_type = tag & 7
            if wire_type == START_GROUP:
                if len(numbers) >= MAX_GROUP_DEPTH:
                    raise WireError(f"groups nested deeper than {MAX_GROUP_DEPTH}", start)
                numbers.append(tag >> 3)
            elif wire_type == END_GROUP:
                if numbers.pop() != tag >> 3:
                    raise WireError(f"group {tag >> 3} ends within another", start)
            else:
                self.skip(tag)
            group.fields += 1
        self.field_start = group.tag_start

    def _read_tag(self) -> int:
        start = self.position
        tag = self._read_long(MAX_TAG_BYTES)
        # A field number has 29 bits, so a tag has 32.
        if tag >= _UINT32_END:
            raise WireError("a field number above 536870911", start)
        if tag < 8:
            raise WireError("field number 0", start)
        if tag & 7 > FIXED32:
            raise WireError(f"field {tag >> 3} has the unknown wire type {tag & 7}", start)
        return tag

    def _read_long(self, max_bytes: int) -> int:
        """Return a varint of any length up to ``max_bytes``."""
        position = start = self.position
        value = 0
        shift = 0
        while position < self.end:
            byte = _byte(self.data, position)
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                self.position = position
                return value
            if position - start >= max_bytes:
                raise WireError(f"a varint of more than {max_bytes} bytes", start)
        raise TruncatedError("a varint that is cut short", start)


def _byte(data: Buffer, position: int) -> int:
    if isinstance(data, bytes):
        return data[position]  # compiled, that is no call of the interpreter
    return data[position]


def varint(value: int) -> bytes:
    """Write a number as a varint: unsigned, or signed in 64 bits."""
    if 0 <= value < 128:
        return _ONE_BYTE[value]
    value %= _UINT64_END
    code = bytearray()
    while value >= 128:
        code.append(value & 127 | 128)
        value >>= 7
    code.append(value)
    return bytes(code)


_ONE_BYTE: Final = [bytes([value]) for value in range(128)]


def varint_field(tag: int, value: int) -> bytes:
    """Write a field of an integer or a boolean, or what precedes a value of so many bytes."""
    return varint(tag) + varint(value)


def bytes_field(tag: int, value: bytes) -> bytes:
    """Write a field of bytes, of UTF-8 text, or of a message."""
    return varint(tag) + varint(len(value)) + value
