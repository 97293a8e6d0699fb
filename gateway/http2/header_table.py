"""The tables of HPACK: header fields by index (RFC 7541, section 2.3 and appendix A)."""

from __future__ import annotations

from typing import Final

Header = tuple[bytes, bytes]
"""The name, in lower case, and the value of a header field."""

DEFAULT_TABLE_SIZE: Final = 4096
"""SETTINGS_HEADER_TABLE_SIZE unless a peer says otherwise: RFC 9113, section 6.5.2."""

FIELD_OVERHEAD: Final = 32
"""Bytes that each field counts beside its name and value: RFC 7541, section 4.1."""

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
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
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
        self._fields: list[Header] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._fields)

    def get(self, index: int) -> Header | None:
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
            self.size -= field_size(fields[count])
            count += 1
        evicted = fields[:count]
        del fields[:count]
        return evicted
