"""How the servers of an upstream speak: as the settings say, or as they tell when asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gateway.errors import ErrorKind, GatewayError, bad_response, strip_tracebacks
from gateway.protocol.dialect_detection import DetectedDialect, parse_server_metadata
from gateway.protocol.dialects import Dialect, common_dialect
from gateway.sizes import MAX_SERVER_DOCUMENT
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.member import Member, MemberTask
from gateway.upstream.transport import UpstreamEndpoint

_SERVER_METADATA = "/v2"

_TIME = 5.0
"""Seconds within which the answer must be there."""

_SELDOM = 10
"""How many times as long it is until one is asked again that has shown what it is."""

# Answers that tell of the moment, not of the server.
_PASSING = frozenset((408, 425, 429))

_log = logging.getLogger("tensorgate.upstream")


class DialectState:
    """How the servers of an upstream speak: ``dialect``, None while that is not known."""

    def __init__(self, dialect: Dialect | None, reason: str) -> None:
        self.dialect = dialect
        self.reason = reason
        """What tells it, or why it is not known."""

    async def known(self) -> None:
        """Wait until it is known."""


def fixed_dialect_state(dialect: Dialect) -> DialectState:
    """Give what the settings say."""
    return DialectState(dialect, "the settings say so")


class DialectDetector(DialectState, MemberTask):
    """Asks each endpoint of an upstream for what it says of itself, ``GET /v2``.

    That is done at the start, again once an endpoint may be another server (``doubt``), every
    ``every`` seconds while it has not shown what it is, and seldom afterwards, as another may take
    its place behind a load balancer without a failure. One that does not answer is asked
    again after ``again`` seconds, then after twice as many each time, up to ``every``. Where
    endpoints differ, the dialect is what all of them understand. What is known stays so until
    another answer comes. Without ``tells``, others log what is found at first, which is alike for
    all, and this does so at DEBUG alone.
    """

    def __init__(self, upstream: str, every: float, again: float, tells: bool = True) -> None:
        super().__init__(None, "its servers were not asked yet")
        self._upstream = upstream
        self._every = every
        self._again = again
        self._tells = tells
        self._wishes: dict[Member, asyncio.Event] = {}
        self._asking: set[Member] = set()
        self._lost: set[Member] = set()
        self._news = asyncio.Event()
        self._fault = GatewayError(
            ErrorKind.UNREACHABLE, f"no server of upstream '{upstream}' is asked how it speaks"
        )

    def take_in(self, member: Member) -> None:
        """Count an endpoint, which is about to be asked."""
        self._wishes[member] = asyncio.Event()
        self._asking.add(member)

    def let_go(self, member: Member) -> None:
        """Count an endpoint no more."""
        self._wishes.pop(member, None)
        self._asking.discard(member)
        self._lost.discard(member)
        self.look()
        self._tell_waiters()

    async def attend(self, member: Member, changed: Callable[[], None]) -> None:
        """Keep up with what an endpoint is, until cancelled."""
        wish = self._wishes[member]
        later = self._again
        try:
            while True:
                self._asking.add(member)
                wish.clear()  # what is wished for from now on may need another answer
                try:
                    member.finding = await _learn_in_time(member.endpoint)
                except GatewayError as error:
                    self._note_fault(member, error)
                    pause, later = later, min(2 * later, self._every)
                else:
                    self._note_answer(member)
                    self.look()
                    often = _SELDOM if member.finding.certain else 1
                    pause, later = often * self._every, self._again
                self._asking.discard(member)
                self._tell_waiters()
                await self._rest(wish, pause)
        finally:
            self._asking.discard(member)
            self._tell_waiters()

    async def _rest(self, wish: asyncio.Event, pause: float) -> None:
        try:
            async with asyncio.timeout(pause):
                await wish.wait()
        except TimeoutError:
            return
        if self.dialect is not None:
            # Nobody waits for it; a server that fails all the time is not asked all the time.
            await asyncio.sleep(self._again)

    async def known(self) -> None:
        """Wait until the dialect is known; who is not being asked is asked at once.

        Raises GatewayError (502, 503, 504) as the last of the endpoints does, if none tells it.
        """
        if self.dialect is not None:
            return
        for member, wish in self._wishes.items():
            if member not in self._asking:
                self._asking.add(member)
                wish.set()
        while self.dialect is None:
            if not self._asking:
                fault = self._fault
                raise GatewayError(fault.kind, fault.message, fault.retry_after)
            await self._news.wait()

    def doubt(self, member: Member) -> None:
        """Ask an endpoint again before long: it failed, and may be another server by now."""
        if (wish := self._wishes.get(member)) is not None:
            wish.set()

    def look(self) -> None:
        """Take the dialect from what is known of the endpoints."""
        found = [
            (member.endpoint.url, member.finding)
            for member in self._wishes
            if member.finding is not None
        ]
        if not found:
            return
        dialect = common_dialect([finding.dialect for _, finding in found])
        reason, differ = _reason(found)
        changed = dialect != self.dialect
        self.reason = reason
        if not changed:
            return  # the object stays as well: what is remembered for it goes by that
        before, self.dialect = self.dialect, dialect
        unsure = differ or not all(finding.certain for _, finding in found)
        level = logging.WARNING if unsure else logging.INFO
        if before is None:
            level = self._at_first(level)
        _log.log(level, "upstream %s: dialect %s: %s", self._upstream, dialect.name, reason)

    def _at_first(self, level: int) -> int:
        """Give the level at which is logged what all find out alike when they begin."""
        return level if self._tells else logging.DEBUG

    def _note_fault(self, member: Member, error: GatewayError) -> None:
        self._fault = strip_tracebacks(error)
        if self.dialect is not None:
            self._note_loss(member, self.dialect, error)
        elif error.message != self.reason:
            self.reason = error.message
            level = self._at_first(logging.WARNING)
            _log.log(level, "upstream %s: dialect not known yet: %s", self._upstream, self.reason)

    def _note_loss(self, member: Member, dialect: Dialect, error: GatewayError) -> None:
        """Log once that the only endpoint is gone; probes tell it too, and ejection of several."""
        is_told = len(self._wishes) > 1 or member.probed.healthy is not None
        if member.finding is None or member in self._lost or is_told:
            return
        self._lost.add(member)
        still = f"its dialect is still taken for {dialect.name}"
        _log.warning("upstream %s: %s; %s", self._upstream, error.message, still)

    def _note_answer(self, member: Member) -> None:
        if member in self._lost:
            self._lost.discard(member)
            _log.info("upstream %s: %s answers again", self._upstream, member.endpoint.url)

    def _tell_waiters(self) -> None:
        self._news.set()
        self._news.clear()


def _reason(found: list[tuple[str, DetectedDialect]]) -> tuple[str, bool]:
    """Tell why the dialect is what it is, and whether endpoints differ in theirs."""
    of_dialect: dict[Dialect, str] = {}
    for url, finding in found:
        of_dialect.setdefault(finding.dialect, f"{url} {finding.reason}")
    if len(of_dialect) == 1:
        return next(iter(of_dialect.values())), False
    each = "; ".join(f"{dialect.name}: {why}" for dialect, why in of_dialect.items())
    return f"its endpoints differ, and this is what all of them understand ({each})", True


async def detect_dialect(endpoint: UpstreamEndpoint) -> DetectedDialect:
    """Ask a server what it is; raises GatewayError (502, 503) where it does not tell."""
    answer = await send_control_request(endpoint, "GET", _SERVER_METADATA, MAX_SERVER_DOCUMENT)
    passing = answer.status >= 500 and answer.status != 501
    if passing or answer.status in _PASSING:
        url = endpoint.url + _SERVER_METADATA
        raise bad_response(f"{url}, which tells how it speaks, answered {answer.status}")
    return parse_server_metadata(answer.status, answer.body)


async def _learn_in_time(endpoint: UpstreamEndpoint) -> DetectedDialect:
    """Ask a server what it is; raises GatewayError, a 504 where it does not answer in time too."""
    try:
        async with asyncio.timeout(_TIME):
            return await detect_dialect(endpoint)
    except TimeoutError:
        url = endpoint.url + _SERVER_METADATA
        raise GatewayError(
            ErrorKind.SERVER_TIMEOUT, f"{url} did not answer within {_TIME:g} s"
        ) from None
