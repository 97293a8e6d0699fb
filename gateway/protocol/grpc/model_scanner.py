"""Finds the model's name and version in a protobuf message that streams by."""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.errors import GatewayError, bad_request, shorten
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc.wire import (
    LENGTH,
    MAX_MESSAGE,
    START_GROUP,
    Buffer,
    SkippedGroup,
    TruncatedError,
    WireError,
    WireReader,
)
from gateway.sizes import QUOTED_NAME

MAX_NAME: Final = 1024
"""Bytes of a model's name or version; a server's folder for it has at most 255."""


MAX_MARKED: Final = 64 * 1024
"""Bytes of a value that is searched for a mark: a requested output has a name and parameters."""

MAX_ALL_MARKED: Final = 256 * 1024
"""Bytes of all values of a message that have the mark, which are kept until its end."""

MAX_FIELDS: Final = 20_000
"""Fields of a message itself, which are inputs, outputs, parameters and raw contents."""


class ScannedModel(NamedTuple):
    """A model as a message names it; empty texts are what the message does not have."""

    name: str
    version: str


class ModelScanner:
    """Finds the model of a message, whose pieces may end anywhere; it buffers nothing else.

    Once a message has ended, ``begin`` lets it scan the next one.

    The name is that of the first of ``name_fields`` which is not empty. Of a field that occurs
    twice the last counts, so nothing is final before the message has ended. Whoever cannot wait
    calls ``take``. Field numbers, groups and lengths are refused where ``WireReader`` refuses them;
    each error is a GatewayError (400).

    ``marked`` are the values of the field ``marked_field`` that contain ``mark``.
    """

    def __init__(
        self,
        name_fields: tuple[int, ...],
        version_field: int | None,
        marked_field: int = 0,
        mark: bytes = b"",
    ) -> None:
        self._marked_field: Final = marked_field
        self._mark: Final = mark
        self._name_fields: Final = name_fields
        self._version_field: Final = version_field
        self._wanted: Final[dict[int, int]] = {}
        last = 0
        for number in name_fields if version_field is None else (*name_fields, version_field):
            self._wanted[number << 3 | LENGTH] = number
            last = max(last, number)
        self._last_wanted: Final = last
        if marked_field:
            self._wanted[marked_field << 3 | LENGTH] = marked_field
        self._incomplete = bytearray()
        """The start of a field that must be read whole: a tag, a number, a name, a marked value."""
        self._needed = 0
        """The bytes of it that must be there before it is read again."""
        self.skip_size = 0
        """How many of the next bytes are of one value: to scan them costs nothing."""
        self._group: SkippedGroup | None = None
        """The group that has not ended; none of its fields is kept."""
        self.marked: list[bytes] = []
        self.begin()

    def begin(self) -> None:
        """Begin to scan a message."""
        self.ended = False
        """Whether the message has ended, so that name and version are final."""
        self.fields = 0
        """Fields so far, with those in groups: what the scan has cost."""
        self.is_past_names = False
        """Whether a field has come that protobuf's writers put behind name and version."""
        if self.marked:
            self.marked = []  # somebody may have those of the last message
        self.marked_error: GatewayError | None = None
        """Why not all of them are there, for callers that must know them: they are too large."""
        self._marked_size = 0
        self.values: dict[int, str] = {}
        """The values of the fields that name the model, by their numbers."""
        self._is_taken = False
        self._offset = 0
        """Bytes of the message before this piece, or before the field that is incomplete."""

    @property
    def free_size(self) -> int:
        """How many of the next bytes cost nothing to scan."""
        return self.skip_size

    @property
    def names(self) -> tuple[str, ...]:
        """Return what is known of all fields that may have the name, those that count first.

        Servers differ in which one they read: a policy must allow each.
        """
        known = [self.values.get(number, "") for number in self._name_fields]
        return tuple([name for name in known if name])

    @property
    def name_field(self) -> int:
        """Return the number of the field that has the name; 0 if none is known."""
        return next((number for number in self._name_fields if self.values.get(number)), 0)

    @property
    def model(self) -> ScannedModel:
        """Return what is known so far."""
        names = self.names
        version = "" if self._version_field is None else self.values.get(self._version_field, "")
        return ScannedModel(names[0] if names else "", version)

    def take(self) -> ScannedModel:
        """Return what is known, for good: from now on a field with another value is an error."""
        self._is_taken = True
        return self.model

    def feed(self, piece: Buffer) -> None:
        """Scan the next piece of the message."""
        try:
            self._scan(piece)
        except WireError as error:
            in_message = WireError(error.reason, self._offset + error.offset)
            raise REQUEST.invalid_protobuf(in_message) from None

    def end(self) -> None:
        """Note the end of the message; raises GatewayError if it is within a field."""
        if self._incomplete or self.skip_size or self._group is not None:
            offset = self._offset + len(self._incomplete)
            raise REQUEST.invalid_protobuf(WireError("a field that is cut short", offset))
        self.ended = True

    def _scan(self, piece: Buffer) -> None:
        if self.skip_size:
            step = min(self.skip_size, len(piece))
            self.skip_size -= step
            self._advance(step)
            piece = piece[step:]
        if self._incomplete:
            self._incomplete += piece
            if len(self._incomplete) < self._needed:
                return
            piece = bytes(self._incomplete)
            self._incomplete.clear()
        self._needed = 0
        reader = WireReader(piece)
        try:
            if self._group is not None:
                self._skip_group(reader, self._group)
            while tag := reader.next_tag():
                self._read_field(reader, tag)
        except TruncatedError as error:
            self._keep_start(piece, reader.field_start, error.missing)
        else:
            self._offset += len(piece)

    def _keep_start(self, piece: Buffer, start: int, missing: int) -> None:
        """Keep the start of a field that has not arrived as a whole, but for values in groups."""
        if self._group is not None and missing:
            start = len(piece)
            self.skip_size = missing
            self._group.fields += 1
            self.fields += 1
        self._advance(start)
        self._incomplete += piece[start:]

    def _advance(self, size: int) -> None:
        """Leave bytes behind, which the next piece does not have."""
        self._offset += size
        if self._group is not None:
            self._group.tag_start -= size
            self._group.start -= size

    def _read_field(self, reader: WireReader, tag: int) -> None:
        if tag >> 3 > self._last_wanted:
            self.is_past_names = True
        wire_type = tag & 7
        if wire_type == LENGTH:
            self._read_value(reader, tag)
        elif wire_type == START_GROUP:
            self._group = SkippedGroup(tag >> 3, reader.field_start, reader.position)
            self._skip_group(reader, self._group)
            return
        else:
            reader.skip(tag)
        self.fields += 1
        if self.fields > MAX_FIELDS:
            raise _too_many_fields(reader)

    def _skip_group(self, reader: WireReader, group: SkippedGroup) -> None:
        """Skip what there is of a group."""
        before = group.fields
        try:
            reader.skip_rest(group)
        finally:
            self.fields += group.fields - before
        self._group = None
        self.fields += 1
        if self.fields > MAX_FIELDS:
            raise _too_many_fields(reader)

    def _read_value(self, reader: WireReader, tag: int) -> None:
        """Read a length, and what follows if it is wanted; else skip that."""
        start = reader.position
        size = reader.read_varint()
        if size > MAX_MESSAGE:
            raise WireError(f"a length of {size} bytes exceeds protobuf's limit", start)
        left = reader.end - reader.position
        field = self._wanted.get(tag, 0)
        if not field or not self._is_kept(field, size):
            step = min(size, left)
            reader.position += step
            self.skip_size = size - step
            return
        if size > left:
            self._needed = reader.position - reader.field_start + size
            raise TruncatedError("a field that is cut short", start)
        data, begin = reader.data, reader.position
        if isinstance(data, bytes):  # compiled, a slice without a call of the interpreter
            text = data[begin : begin + size]
        else:
            text = bytes(data[begin : begin + size])
        reader.position += size
        if field != self._marked_field:
            self._set(field, text)
        elif self._mark in text:
            self._marked_size += size
            if self._marked_size > MAX_ALL_MARKED:
                self.marked_error = bad_request(
                    f"fields {field} of the request with '{self._mark.decode()}' have more than "
                    f"{MAX_ALL_MARKED} bytes"
                )
            self.marked.append(text)

    def _is_kept(self, field: int, size: int) -> bool:
        """Tell whether the value of a wanted field is read; raises GatewayError (400)."""
        if field != self._marked_field:
            if size > MAX_NAME:
                raise bad_request(
                    f"{self._label(field)} has {size} bytes; at most {MAX_NAME} are allowed"
                )
            return True
        if size > MAX_MARKED:
            self.marked_error = bad_request(
                f"field {field} of the request has {size} bytes; at most {MAX_MARKED} are allowed"
            )
        return self.marked_error is None

    def _set(self, field: int, text: bytes) -> None:
        try:
            value = text.decode()
        except UnicodeDecodeError:
            raise bad_request(f"{self._label(field)} is not UTF-8") from None
        routed = self.values.get(field, "")
        if self._is_taken and value != routed:
            raise bad_request(
                f"{self._label(field)} is '{shorten(value, QUOTED_NAME)}', but was "
                f"'{shorten(routed, QUOTED_NAME)}' when the call was routed; send it once, before "
                "the tensors"
            )
        self.values[field] = value

    def _label(self, field: int) -> str:
        return "the model's version" if field == self._version_field else "the model's name"


def _too_many_fields(reader: WireReader) -> WireError:
    return WireError(f"more than {MAX_FIELDS} fields", reader.field_start)
