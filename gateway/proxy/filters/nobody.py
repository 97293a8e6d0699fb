"""A client that is nobody: what it gets is dropped."""

from __future__ import annotations

from multidict import CIMultiDict

from gateway.proxy.interfaces import ClientResponse
from gateway.sizes import QUOTED_TEXT


class DiscardResponse(ClientResponse):
    """Drops an answer, but for what it says of a failure."""

    def __init__(self) -> None:
        self._status = 0
        self._said = b""

    @property
    def failure(self) -> str:
        """Say what is wrong with the answer; nothing, if all is well."""
        return answered(self._status, self._said) if self._status >= 400 else ""

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Keep the status."""
        self.started = True
        self._status = status

    async def write(self, data: bytes | memoryview) -> None:
        """Drop a part of the body, but for what a failure begins with."""
        self._said += data[: QUOTED_TEXT - len(self._said)]

    async def finish(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing: nobody is cut off."""


def answered(status: int, body: bytes) -> str:
    """Say what an answer was."""
    return f"the answer was {status}: {body[:QUOTED_TEXT].decode(errors='replace')!r}"
