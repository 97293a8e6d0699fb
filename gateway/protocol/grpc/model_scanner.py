"""Finds the model's name and version in a protobuf message that streams by."""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.errors import GatewayError, bad_request, shorten
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc.wire import (
    END_GROUP,
    FIXED32,
    LENGTH,
    MAX_GROUP_DEPTH,
    MAX_GROUP_SIZE,
    MAX_MESSAGE,
    MAX_TAG_BYTES,
    MAX_VARINT_BYTES,
    START_GROUP,
    UINT64_END,
    VARINT,
    Buffer,
    WireError,
    check_tag,
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
    """Finds the model of one message, whose pieces may end anywhere; it buffers nothing else.

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
        self.ended = False
        """Whether the message has ended, so that name and version are final."""
        self.fields = 0
        """Fields so far, with those in groups: what the scan has cost."""
        self.is_past_names = False
        """Whether a field has come that protobuf's writers put behind name and version."""
        self.marked: Final[list[bytes]] = []
        self.marked_error: GatewayError | None = None
        """Why not all of them are there, for callers that must know them: they are too large."""
        self._marked_field: Final = marked_field
        self._mark: Final = mark
        self._marked_size = 0
        self._name_fields: Final = name_fields
        self._version_field: Final = version_field
        fields = name_fields if version_field is None else (*name_fields, version_field)
        self._last_wanted: Final = max(fields, default=0)
        collected = (*fields, marked_field) if marked_field else fields
        self._wanted: Final = {number << 3 | LENGTH: number for number in collected}
        self._values: Final[dict[int, str]] = {}
        self._is_taken = False
        # Where the scan is: all that the bytes so far leave to the next piece.
        self._offset = 0
        """Bytes of the message before this piece."""
        self._tag = 0
        """The tag whose number or length follows; 0 if a tag follows."""
        self._varint = 0
        self._shift = 0
        self._start = 0
        """Where the tag, number or length begins."""
        self.skip_size = 0
        """How many of the next bytes are of one value: to scan them costs nothing."""
        self._field = 0
        """The field whose value is collected, 0 for none."""
        self._text = bytearray()
        self._groups: Final[list[int]] = []
        self._group_start = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Return what is known of all fields that may have the name, those that count first.

        Servers differ in which one they read: a policy must allow each.
        """
        known = [self._values.get(number, "") for number in self._name_fields]
        return tuple(name for name in known if name)

    @property
    def name_field(self) -> int:
        """Return the number of the field that has the name; 0 if none is known."""
        return next((number for number in self._name_fields if self._values.get(number)), 0)

    @property
    def model(self) -> ScannedModel:
        """Return what is known so far."""
        names = self.names
        version = "" if self._version_field is None else self._values.get(self._version_field, "")
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
            raise REQUEST.invalid_protobuf(error) from None
        self._offset += len(piece)

    def end(self) -> None:
        """Note the end of the message; raises GatewayError if it is within a field."""
        reason = ""
        if self._tag or self._shift or self.skip_size:
            reason = "a field that is cut short"
        elif self._groups:
            reason = f"group {self._groups[-1]} never ends"
        if reason:
            raise REQUEST.invalid_protobuf(WireError(reason, self._offset))
        self.ended = True

    def _scan(self, piece: Buffer) -> None:
        end = len(piece)
        position = 0
        while True:
            if self.skip_size:
                step = min(self.skip_size, end - position)
                self.skip_size -= step
                if self._field:
                    self._collect(piece, position, step)
                position += step
            if position >= end:
                return
            value: int = piece[position]
            if not self._shift:
                self._start = self._offset + position
            position += 1
            if value >= 128 or self._shift:
                self._varint |= (value & 127) << self._shift
                self._shift += 7
                if value >= 128:
                    self._check_varint_size()
                    continue
                value = self._varint
                self._varint = self._shift = 0
            if self._tag:
                self._read_value(value)
            else:
                self._read_tag(value)

    def _check_varint_size(self) -> None:
        limit = MAX_VARINT_BYTES if self._tag else MAX_TAG_BYTES
        if self._shift >= 7 * limit:
            raise WireError(f"a varint of more than {limit} bytes", self._start)

    def _read_tag(self, tag: int) -> None:
        self.fields += 1
        if self.fields > MAX_FIELDS:
            raise WireError(f"more than {MAX_FIELDS} fields", self._start)
        if self._groups:
            if self._group_start < 0:
                self._group_start = self._start
            if self._start - self._group_start > MAX_GROUP_SIZE:
                raise WireError(f"a group of more than {MAX_GROUP_SIZE} bytes", self._group_start)
        check_tag(tag, self._start)
        if tag >> 3 > self._last_wanted:
            self.is_past_names = True
        wire_type = tag & 7
        if wire_type in (LENGTH, VARINT):
            self._tag = tag
        elif wire_type == START_GROUP:
            self._open_group(tag >> 3)
        elif wire_type == END_GROUP:
            self._close_group(tag >> 3)
        else:
            self.skip_size = 4 if wire_type == FIXED32 else 8

    def _open_group(self, number: int) -> None:
        if not self._groups:
            self._group_start = -1  # where the next tag begins
        if len(self._groups) >= MAX_GROUP_DEPTH:
            raise WireError(f"groups nested deeper than {MAX_GROUP_DEPTH}", self._start)
        self._groups.append(number)

    def _close_group(self, number: int) -> None:
        if not self._groups:
            raise WireError(f"group {number} ends but never began", self._start)
        if self._groups.pop() != number:
            raise WireError(f"group {number} ends within another", self._start)

    def _read_value(self, value: int) -> None:
        """Read the number of a field, or the length of what follows."""
        tag = self._tag
        self._tag = 0
        if tag & 7 == VARINT:
            return
        size = value % UINT64_END
        if size > MAX_MESSAGE:
            raise WireError(f"a length of {size} bytes exceeds protobuf's limit", self._start)
        field = 0 if self._groups else self._wanted.get(tag, 0)
        self.skip_size = size
        if not field:
            return
        if field == self._marked_field:
            if size > MAX_MARKED:
                self.marked_error = bad_request(
                    f"field {field} of the request has {size} bytes; at most {MAX_MARKED} are "
                    "allowed"
                )
            self._field = 0 if self.marked_error is not None or not size else field
        elif size > MAX_NAME:
            raise bad_request(
                f"{self._label(field)} has {size} bytes; at most {MAX_NAME} are allowed"
            )
        elif size:
            self._field = field
        else:
            self._set(field, b"")

    def _collect(self, piece: Buffer, position: int, size: int) -> None:
        """Collect a part of the value of a field."""
        self._text += piece[position : position + size]
        if self.skip_size:
            return
        field, text = self._field, bytes(self._text)
        self._field = 0
        self._text.clear()
        if field != self._marked_field:
            self._set(field, text)
        elif self._mark in text:
            self._marked_size += len(text)
            if self._marked_size > MAX_ALL_MARKED:
                self.marked_error = bad_request(
                    f"fields {field} of the request with '{self._mark.decode()}' have more than "
                    f"{MAX_ALL_MARKED} bytes"
                )
            self.marked.append(text)

    def _set(self, field: int, text: bytes) -> None:
        try:
            value = text.decode()
        except UnicodeDecodeError:
            raise bad_request(f"{self._label(field)} is not UTF-8") from None
        routed = self._values.get(field, "")
        if self._is_taken and value != routed:
            raise bad_request(
                f"{self._label(field)} is '{shorten(value, QUOTED_NAME)}', but was "
                f"'{shorten(routed, QUOTED_NAME)}' when the call was routed; send it once, before "
                "the tensors"
            )
        self._values[field] = value

    def _label(self, field: int) -> str:
        return "the model's version" if field == self._version_field else "the model's name"
