"""A fake DNS resolver."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

Answer = Sequence[str] | Exception
UNKNOWN_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class NameService:
    """Answers look-ups, each with what is there for the host then, once it is ``ready``."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.ready = asyncio.Event()
        self.ready.set()
        self.asked = 0
        self.under_way = 0

    async def __call__(self, host: str) -> Sequence[str]:
        """Look a host up."""
        self.asked += 1
        self.under_way += 1
        try:
            await asyncio.sleep(0)
            await self.ready.wait()
        finally:
            self.under_way -= 1
        answer = self.answers.get(host, UNKNOWN_NAME)
        if isinstance(answer, Exception):
            raise answer
        return answer
