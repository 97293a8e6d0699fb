"""Writes and reads HTTP messages as bytes, without any library."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class Head:
    """The first line of a message, and its headers in order, with names in lower case."""

    first: str
    headers: tuple[tuple[str, str], ...]

    def all(self, name: str) -> list[str]:
        """Return every value of a header."""
        return [value for key, value in self.headers if key == name.lower()]

    def get(self, name: str) -> str | None:
        """Return the value of a header; it must not be there more than once."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} is there {len(values)} times"
        return values[0] if values else None

    @property
    def status(self) -> int:
        """Return the status of a response."""
        assert self.first.startswith("HTTP/")
        return int(self.first.split(" ")[1])

    @property
    def target(self) -> str:
        """Return the target of a request."""
        return self.first.split(" ")[1]


def message(first: str, headers: dict[str, str] | None = None, body: bytes = b"") -> bytes:
    """Write a message with exactly these headers."""
    lines = [first, *(f"{name}: {value}" for name, value in (headers or {}).items()), "", ""]
    return "\r\n".join(lines).encode() + body


def request(
    method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> bytes:
    """Write a request that is well-formed; ``headers`` go before those made here."""
    made = {"Host": "localhost"}
    if body is not None:
        made["Content-Length"] = str(len(body))
    return message(f"{method} {target} HTTP/1.1", {**made, **(headers or {})}, body or b"")


def http_response(
    body: bytes = b"", headers: dict[str, str] | None = None, status: str = "200 OK"
) -> bytes:
    """Write a response that is well-formed; ``headers`` go before those made here."""
    made = {"Content-Length": str(len(body)), "Content-Type": "application/json"}
    return message(f"HTTP/1.1 {status}", {**made, **(headers or {})}, body)


def chunk(data: bytes) -> bytes:
    """Write a chunk of a chunked body; that of no data ends the body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def with_long_head(data: bytes) -> bytes:
    """Lengthen the head of a request, so that the request takes the streaming path."""
    first, end, rest = data.partition(b"\r\n")
    return first + end + b"X-Long: " + b"x" * 2048 + end + rest


def chunked(*parts: bytes) -> bytes:
    """Write a chunked body."""
    return b"".join(map(chunk, parts)) + chunk(b"")


async def read_head(reader: asyncio.StreamReader) -> Head:
    """Read a message up to its body; raises IncompleteReadError where there is none."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines[1:-2])
    return Head(lines[0], tuple((name.lower(), value.strip(" ")) for name, value in pairs))


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """Read one chunk of a chunked body, none at its end."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    data = await reader.readexactly(size)
    assert await reader.readexactly(2) == b"\r\n"
    return data


async def read_body(reader: asyncio.StreamReader, head: Head) -> bytes:
    """Read the body of a message that says how long it is; raises IncompleteReadError."""
    length = head.get("Content-Length")
    if head.get("Transfer-Encoding") == "chunked":
        assert length is None, "both Content-Length and Transfer-Encoding"
        parts = []
        while part := await read_chunk(reader):
            parts.append(part)
        return b"".join(parts)
    return await reader.readexactly(int(length or 0))
