"""What the C module does, in Python, for a gateway that is not compiled."""

from __future__ import annotations


def cut_head(data: bytes | memoryview, most: int) -> tuple[bytes, bytes | memoryview] | None:
    """Return a head at the start of data, and the rest: a view if the data have more than ``most``.

    None if it does not end within ``most`` bytes, or if the data begin with the end of a line.
    """
    is_small = len(data) <= most
    start = bytes(data if is_small else data[:most])
    end = start.find(b"\r\n\r\n") + 4
    if end < 4 or start[0] in b"\r\n":
        return None
    return start[:end], start[end:] if is_small else memoryview(data)[end:]


def split_head(
    head: bytes | memoryview, names: tuple[bytes, ...]
) -> tuple[bytes, bytes, list[str | bytes]] | None:
    """Split no head: in Python, that takes longer than to parse its lines."""
    return None
