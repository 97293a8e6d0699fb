"""Compresses and decompresses header lists: HPACK, RFC 7541.

Each direction of a connection has one encoder and one decoder. While the table does not change, a
field is always written in the same way, and equal blocks mean equal lists: both are cached.
"""

from __future__ import annotations

from typing import Final, cast

from gateway.http2.errors import ErrorCode, Http2Error, compression_error
from gateway.http2.huffman import BYTES, huffman_decode, huffman_encode
from gateway.sizes import CACHED_LINES
from gateway.system.bounded_cache import cached

Header = tuple[bytes, bytes]
"""The name, in lower case, and the value of a header field.

Compiled, a variable of this type is two values, which become a new tuple at each look-up. So loops
that look fields up, or pass them on, take them as objects.
"""

DEFAULT_TABLE_SIZE: Final = 4096
"""SETTINGS_HEADER_TABLE_SIZE unless a peer says otherwise: RFC 9113, section 6.5.2."""

FIELD_OVERHEAD: Final = 32
"""Bytes that each field counts beside its name and value: RFC 7541, section 4.1."""

MAX_HEADER_LIST: Final = 64 * 1024
"""Maximum size of a header list, as SETTINGS_MAX_HEADER_LIST_SIZE counts it."""

MAX_FIELDS: Final = 4096
"""Maximum number of fields in a block. Decoding more of them would hold up all other calls."""

_MAX_SIZE_UPDATES: Final = 16
"""Maximum changes of the table size at the start of a block. RFC 7541, section 4.2, needs two, but
some encoders tell each change."""

_MAX_INTEGER_BYTES: Final = 4
"""Maximum bytes of an integer after its first one. No valid one has more than 28 bits."""

_MAX_CACHED_BLOCKS: Final = 32
"""Maximum number of cached blocks of a decoder."""
_MAX_CACHED_FIELDS: Final = 64
"""Maximum number of fields of a cached block. With 32 of them, a cache takes 50 KB at most."""
_MAX_CACHED_LITERALS: Final = 64
"""Maximum bytes of a cached block with literals, which may be 21 fields: 90 KB at most."""

_MAX_CACHED_LITERAL: Final = 128
"""Maximum bytes of a cached literal. With ``CACHED_LINES`` of them, a cache takes 1 MB at most."""

NEVER_INDEXED: Final = frozenset(
    b"api-key authorization cookie proxy-authorization set-cookie x-api-key".split()
)
"""Secrets. The encoder never indexes them, so that they cannot be guessed by the size of blocks:
RFC 7541, section 7.1."""

NOT_INDEXED: Final = frozenset(
    b"age b3 baggage content-length content-range etag grpc-message grpc-timeout"
    b" if-modified-since if-none-match inference-header-content-length last-modified location range"
    b" retry-after server-timing traceparent tracestate x-b3-spanid x-b3-traceid x-request-id"
    b" x-request-start x-envoy-upstream-service-time".split()
)
"""Headers with another value in each message. They would evict those that repeat."""

# The representations of a literal field: their pattern, and the bits of the index of the name.
_INCREMENTAL: Final = 0x40  # section 6.2.1
_WITHOUT_INDEXING: Final = 0x00  # section 6.2.2
_NEVER: Final = 0x10  # section 6.2.3

_NAMES_ALONE: Final = (
    b"accept-language accept-ranges accept access-control-allow-origin age allow authorization"
    b" cache-control content-disposition content-encoding content-language content-length"
    b" content-location content-range content-type cookie date etag expect expires from host"
    b" if-match if-modified-since if-none-match if-range if-unmodified-since last-modified link"
    b" location max-forwards proxy-authenticate proxy-authorization range referer refresh"
    b" retry-after server set-cookie strict-transport-security transfer-encoding user-agent vary"
    b" via www-authenticate"
).split()

STATIC_TABLE: Final[tuple[Header, ...]] = (
    (b"", b""),  # indexes begin with 1
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    *[(name, b"") for name in _NAMES_ALONE],
)
"""The static table, by index: RFC 7541, appendix A."""

STATIC_SIZE: Final = len(STATIC_TABLE) - 1
"""The last index of the static table."""

STATIC_FIELDS: Final[dict[Header, int]] = {
    field: index for index, field in enumerate(STATIC_TABLE) if index
}
"""The indexes of the static table's fields."""

STATIC_NAMES: Final[dict[bytes, int]] = {
    STATIC_TABLE[index][0]: index for index in range(STATIC_SIZE, 0, -1)
}
"""The first index of each name in the static table."""


def field_size(field: Header) -> int:
    """Return what a field counts in tables and header lists: RFC 7541, section 4.1."""
    return len(field[0]) + len(field[1]) + FIELD_OVERHEAD


class DynamicTable:
    """The dynamic table of one direction: RFC 7541, section 2.3.2.

    Encoder and decoder each have one; the encoder's blocks keep them equal.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.size = 0
        self.added = 0
        """How many fields were ever added: the number of the newest one."""
        self._fields: list[object] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._fields)

    def get(self, index: int) -> object:
        """Return the field of an index beyond the static table, None if there is none."""
        place = len(self._fields) + STATIC_SIZE - index
        return self._fields[place] if place >= 0 else None

    def add(self, field: Header) -> list[Header]:
        """Add a field, and return those that were evicted for it.

        A field larger than the table empties it: RFC 7541, section 4.4.
        """
        size = field_size(field)
        evicted = self._evict(self.max_size - size)
        if size <= self.max_size:
            self._fields.append(field)
            self.size += size
            self.added += 1
        return evicted

    def resize(self, max_size: int) -> list[Header]:
        """Change the maximum size, and return the evicted fields: section 4.3."""
        self.max_size = max_size
        return self._evict(max_size)

    def _evict(self, max_size: int) -> list[Header]:
        """Evict the oldest fields until no more than ``max_size`` is left."""
        if self.size <= max_size:
            return []
        fields = self._fields
        count = 0
        while self.size > max_size and count < len(fields):
            self.size -= field_size(cast("Header", fields[count]))
            count += 1
        evicted = cast("list[Header]", fields[:count])
        del fields[:count]
        return evicted


class HeaderList:
    """A decoded header list; its fields are immutable, as those that repeat are cached.

    ``too_large`` tells that the list exceeds the maximum size: ``fields`` are the first ones then,
    and the message must be refused.
    """

    def __init__(self, fields: tuple[Header, ...], too_large: bool) -> None:
        self.fields: Final = fields
        self.too_large: Final = too_large
        self.checked: tuple[int, int] | None = None
        """Status (0 in requests) and Content-Length, once the list was checked as headers."""
        self.checked_as_trailers = False


class Decoder:
    """Decodes the header blocks that a peer sends, in their order."""

    def __init__(self) -> None:
        self.table: Final = DynamicTable(DEFAULT_TABLE_SIZE)
        self._cache: dict[bytes, HeaderList] = {}
        self._block = b""
        self._position = 0
        self._max_cached = 0
        """Maximum bytes of the block if it is to be cached."""

    def decode(self, block: bytes) -> HeaderList:
        """Decode a complete block; raises Http2Error, and the connection must end then.

        A list that is too large is decoded to its end, so that the connection can go on.
        """
        cached = self._cache.get(block)
        if cached is not None:
            return cached
        self._block = block
        self._position = count = 0
        self._max_cached = MAX_HEADER_LIST
        self._read_size_updates()
        fields: list[object] = []
        room = MAX_HEADER_LIST
        while self._position < len(block):
            first = block[self._position]
            if first >= 0x80:
                field = self._field(self._read_integer(0x7F))  # section 6.1
            else:
                field = self._read_literal(first)
            # RFC 9113, section 6.5.2: names, values and 32 bytes for each field.
            room -= field_size(cast("Header", field))
            if room >= 0:
                fields.append(field)
            count += 1
            if count > MAX_FIELDS:
                reason = f"more than {MAX_FIELDS} fields in a header block"
                raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, reason)
        headers = HeaderList(cast("tuple[Header, ...]", tuple(fields)), room < 0)
        if len(block) <= self._max_cached and count <= _MAX_CACHED_FIELDS:
            if len(self._cache) >= _MAX_CACHED_BLOCKS:
                self._cache.clear()
            self._cache[block] = headers
        return headers

    def _read_size_updates(self) -> None:
        """Apply the changes of the table size at the start of a block."""
        block = self._block
        count = 0
        while self._position < len(block) and block[self._position] & 0xE0 == 0x20:
            size = self._read_integer(0x1F)  # section 6.3
            if size > DEFAULT_TABLE_SIZE:
                raise compression_error(
                    f"a table size of {size} bytes, where {DEFAULT_TABLE_SIZE} are allowed"
                )
            count += 1
            if count > _MAX_SIZE_UPDATES:
                raise compression_error("too many changes of the table size")
            self.table.resize(size)
            self._forget_blocks()

    def _forget_blocks(self) -> None:
        """Drop the cached blocks, as the table changes, and do not cache this one."""
        self._cache.clear()
        self._max_cached = -1

    def _read_literal(self, first: int) -> Header:
        """Read a literal field, and add it to the table if it asks for that."""
        if first & 0xC0 == _INCREMENTAL:
            field = self._read_name_and_value(0x3F)
            self.table.add(field)
            self._forget_blocks()
            return field
        if first & 0xE0 == 0x20:
            raise compression_error("a change of the table size after a field")  # section 4.2
        field = self._read_name_and_value(0x0F)
        most = -1 if field[0] in NOT_INDEXED else _MAX_CACHED_LITERALS
        self._max_cached = min(self._max_cached, most)
        return field

    def _read_name_and_value(self, mask: int) -> Header:
        index = self._read_integer(mask)
        name = cast("Header", self._field(index))[0] if index else self._read_string()
        return name, self._read_string()

    def _field(self, index: int) -> object:
        """Return a field of the tables; both are one address space (section 2.3.3)."""
        if index <= STATIC_SIZE:
            if not index:
                raise compression_error("a field with index 0")  # section 6.1
            return cast("tuple[object, ...]", STATIC_TABLE)[index]
        field = self.table.get(index)
        if field is None:
            raise compression_error(f"index {index} is beyond the table")
        return field

    def _read_integer(self, mask: int) -> int:
        """Read an integer whose first bits are those of ``mask``: section 5.1."""
        block = self._block
        position = self._position
        value = block[position] & mask
        position += 1
        if value == mask:
            shift = 0
            while True:
                if shift == 7 * _MAX_INTEGER_BYTES:
                    raise compression_error("an integer of too many bytes")
                if position == len(block):
                    raise compression_error("the block ends within an integer")
                byte = block[position]
                position += 1
                value += (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
        self._position = position
        return value

    def _read_string(self) -> bytes:
        """Read a string: section 5.2."""
        block = self._block
        if self._position == len(block):
            raise compression_error("the block ends before a string")
        is_huffman = block[self._position] >= 0x80
        length = self._read_integer(0x7F)
        start = self._position
        end = start + length
        if end > len(block):
            raise compression_error("the block ends within a string")
        self._position = end
        text = block[start:end]
        return huffman_decode(text) if is_huffman else text


class Encoder:
    """Encodes the header blocks of one direction, in the order in which they are sent."""

    def __init__(self) -> None:
        self.table: Final = DynamicTable(DEFAULT_TABLE_SIZE)
        # The numbers of the fields in the table, and the latest with each name.
        self._fields: dict[object, int] = {}
        self._names: dict[bytes, int] = {}
        self._indexed: dict[object, bytes] = {}
        """How fields of both tables are written, while the table does not change."""
        self._size_update = b""
        """The start of the next block: a new size of the table."""

    def limit_table(self, size: int) -> None:
        """Obey the peer's SETTINGS_HEADER_TABLE_SIZE: the table never grows again.

        The next block tells the new size: section 4.2.
        """
        if size < self.table.max_size:
            self._forget(self.table.resize(size))
            self._indexed.clear()
            self._size_update = _integer(size, 0x1F, 0x20)

    def encode(self, fields: tuple[Header, ...]) -> bytes:
        """Encode a header list whose names are in lower case; ``NEVER_INDEXED`` are secrets."""
        parts = [self._size_update]
        self._size_update = b""
        indexed = self._indexed
        for field in cast("tuple[object, ...]", fields):
            part = indexed.get(field)
            parts.append(self._encode_field(field) if part is None else part)
        return b"".join(parts)

    def _encode_field(self, each: object) -> bytes:
        """Encode a field that is in no table, or for the first time since the table changed."""
        field = cast("Header", each)
        name, value = field
        start = _NOT_INDEXED_STARTS.get(name)
        if start is not None:
            return start + _plain_string(value)
        number = self._fields.get(each)
        index = STATIC_FIELDS.get(field, 0) if number is None else self._dynamic_index(number)
        if index:
            # This tuple, which may come again, is found faster than an equal one.
            part = self._indexed[each] = _integer(index, 0x7F, 0x80)  # section 6.1
            return part
        index = STATIC_NAMES.get(name, 0)
        if not index and (number := self._names.get(name)) is not None:
            index = self._dynamic_index(number)
        # A large field would evict many others.
        if field_size(field) > self.table.max_size // 2:
            return _literal_start(_WITHOUT_INDEXING, index, name) + _plain_string(value)
        self._add(field)
        is_short = len(name) + len(value) <= _MAX_CACHED_LITERAL
        encode = _cached_indexed_literal if is_short else _indexed_literal
        return encode(index, b"" if index else name, value)

    def _dynamic_index(self, number: int) -> int:
        return STATIC_SIZE + 1 + self.table.added - number

    def _add(self, field: Header) -> None:
        evicted = self.table.add(field)
        number = self.table.added
        self._fields[field] = number
        self._names[field[0]] = number
        self._indexed.clear()
        if evicted:
            self._forget(evicted)

    def _forget(self, evicted: list[Header]) -> None:
        """Drop the numbers of evicted fields."""
        oldest = self.table.added - len(self.table) + 1
        for field in evicted:
            del self._fields[field]
            if self._names.get(field[0], oldest) < oldest:
                del self._names[field[0]]


def _integer(value: int, mask: int, pattern: int) -> bytes:
    """Encode an integer after the bits of a pattern: RFC 7541, section 5.1."""
    if value < mask:
        return BYTES[pattern | value]
    encoded = bytearray([pattern | mask])
    value -= mask
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _plain_string(text: bytes) -> bytes:
    """Encode a string of a field that is not indexed.

    It differs from message to message, and the Huffman code would cost more than it saves.
    """
    return _integer(len(text), 0x7F, 0) + text


def _literal_start(pattern: int, index: int, name: bytes) -> bytes:
    """Encode a literal field that is not indexed, without its value."""
    return _integer(index, 0x0F, pattern) + (b"" if index else _plain_string(name))


_NOT_INDEXED_STARTS: Final = {
    name: _literal_start(
        _NEVER if name in NEVER_INDEXED else _WITHOUT_INDEXING, STATIC_NAMES.get(name, 0), name
    )
    for name in NEVER_INDEXED | NOT_INDEXED
}
"""How fields that are never in the dynamic table are written, without their values."""


def _indexed_literal(index: int, name: bytes, value: bytes) -> bytes:
    """Encode a literal field that is added to the table."""
    start = _integer(index, 0x3F, _INCREMENTAL)
    return start + _string(value) if index else start + _string(name) + _string(value)


_cached_indexed_literal = cached(CACHED_LINES)(_indexed_literal)


def _string(text: bytes) -> bytes:
    """Encode a string in the shorter way: RFC 7541, section 5.2."""
    encoded = huffman_encode(text)
    if len(encoded) < len(text):
        return _integer(len(encoded), 0x7F, 0x80) + encoded
    return _plain_string(text)
