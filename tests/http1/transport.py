"""A transport without a socket."""

from __future__ import annotations

import asyncio


class TransportDouble(asyncio.Transport):
    """Notes what is asked of it; the test is the other end."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def abort(self) -> None:
        self.closing = True
        self.calls.append("abort")
