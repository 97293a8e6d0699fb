"""Bodies that arrive, for tests of what they may buffer."""

import asyncio
import time

from gateway.system.buffers import BodyProgress, BufferAccount, BufferShare, ReservedBytes


class ArrivingBody:
    """A body whose reader waits for so many seconds already; 0 if it does not wait.

    It is silent for so long. If it ``moves``, its last bytes came just before; if it ``trickles``,
    single ones come all the time. Its call has reserved ``reserves`` bytes, which it gives back
    when the body ends.
    """

    def __init__(
        self,
        share: BufferShare | None = None,
        waits_for: float = 0.0,
        *,
        may_pause: bool = False,
        moves: int = 0,
        trickles: bool = False,
        reserves: int = 0,
    ) -> None:
        now = time.monotonic()
        self.progress = BodyProgress()
        self.reserved = ReservedBytes("" if share is None else share.client)
        if share is not None:
            share.account.reserve(reserves, self.reserved)
        self.reads = True
        if moves:
            self.progress.receive(moves, self.reserved.progress)
        if waits_for:
            self.progress.begin_wait(now - waits_for)
        if trickles:
            self.progress.receive(1)
            self.progress.begin_wait(now)
        self._may_pause = may_pause
        self.error: Exception | None = None
        self._share = share
        if share is not None:
            share.open_stream(self)

    def is_reading(self) -> bool:
        return self.reads

    def may_pause(self) -> bool:
        return self._may_pause

    def fail_body(self, error: Exception) -> None:
        self.error = error
        assert self._share is not None
        self._share.close_stream(self)
        self._share.account.reserve(-self.reserved.size, self.reserved)


def client_share(account: BufferAccount, client: str = "") -> BufferShare:
    share = BufferShare(account)
    share.client = client
    share.stall_error = lambda: TimeoutError("stalled")
    return share


async def turn_of_sockets() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def ended(bodies: list[ArrivingBody]) -> list[int]:
    await turn_of_sockets()
    return [number for number, body in enumerate(bodies) if body.error is not None]
