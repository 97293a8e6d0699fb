"""A transport without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class FakeTransport(asyncio.Transport):
    """Records the calls to it; the test is the peer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.writes: list[bytes] = []
        """The data of each system call."""
        self.closing = False
        self.unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.writes.append(b"".join(list_of_data))

    def abort(self) -> None:
        self.closing = True
        self.calls.append("abort")
