"""Copies of a share of the requests for another upstream, whose answers nobody sees.

A mirrored request is an exchange like any other, but for its client, who is nobody: its body is at
hand, and its answer is dropped. It begins when the client's own request has been read to its end,
and nothing of the client's exchange waits for it or learns of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.protocol.operations import OPERATION_KINDS, Operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.filters.mirror_stats import MirrorStats
from gateway.proxy.filters.nobody import DiscardResponse, answered
from gateway.proxy.interfaces import ClientRequest, ClientResponse, HeaderLines, Route
from gateway.upstream.metadata_cache import UpstreamResponseError

MIRRORED_KINDS = OPERATION_KINDS["infer"] | OPERATION_KINDS["generate"]
"""The kinds of which there are copies: they change nothing at a server."""

_OF_THE_CLIENT = frozenset(
    (ErrorKind.BAD_REQUEST, ErrorKind.TOO_LARGE, ErrorKind.UNSUPPORTED_ENCODING)
)
"""What a request is refused with that no server has seen; its client is told."""

_log = logging.getLogger("tensorgate.mirror")

Dispatch = Callable[[ClientRequest, ClientResponse, Operation, Route, Deadline], Awaitable[None]]


@dataclass(frozen=True, slots=True, eq=False)
class MirroredHead:
    """What is copied of a request but for its body; see ClientRequest."""

    method: str
    target: str
    headers: CIMultiDictProxy[str]
    content_length: int | None
    asked: Operation


class Mirror:
    """Sends copies of requests by way of ``route``, and drops the answers.

    ``share`` of all requests, 0 to 1, is to be copied. ``dispatch`` makes an exchange of a request;
    ``clock`` gives seconds. Copies beyond ``most`` under way at a time are not sent.
    """

    def __init__(
        self,
        route: Route,
        share: float,
        dispatch: Dispatch,
        clock: Callable[[], float] = time.monotonic,
        most: int = 64,
    ) -> None:
        self.route = route
        self.share = share
        self.stats = MirrorStats(route.upstream.name, clock)
        self._dispatch = dispatch
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Give the number of copies under way."""
        return len(self._tasks)

    def admits(self) -> bool:
        """Tell whether one more may be under way; where it may not, that is counted."""
        if self._closed:
            return False
        if self.in_flight >= self._most:
            self.stats.left_out(f"{self._most} are under way (mirror.max_concurrent)")
            return False
        return True

    def send(self, copy: MirroredRequest) -> None:
        """Have a task send a copy; it is dropped where too many are under way."""
        if not self.admits():
            copy.drop()
            return
        task = asyncio.get_running_loop().create_task(self._exchange(copy))
        self._tasks.add(task)
        task.add_done_callback(partial(self._over, copy))

    async def close(self) -> None:
        """Cancel what is under way, and send nothing more."""
        self._closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.stats.tell()

    async def _exchange(self, copy: MirroredRequest) -> None:
        answer = DiscardResponse()
        try:
            with self.route.limits.deadline() as deadline:
                await self._dispatch(copy, answer, copy.asked, self.route, deadline)
            why = answer.failure
        except UpstreamResponseError as refusal:
            strip_tracebacks(refusal)
            why = answered(refusal.status, refusal.body)
        except GatewayError as error:
            strip_tracebacks(error)
            if error.kind in _OF_THE_CLIENT:
                return
            why = error.message
        except Exception:
            # A fault of our own: never a silent one.
            _log.exception("mirroring %s %s failed", copy.method, copy.target)
            why = "the gateway failed"
        self.stats.sent(why)

    def _over(self, copy: MirroredRequest, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        copy.drop()


class MirroredRequest(ClientRequest):
    """A request whose body is taken piece by piece, and which is sent once all of it is there.

    What it holds counts until it is dropped.
    """

    def __init__(self, head: MirroredHead, mirror: Mirror) -> None:
        self.method = head.method
        self.target = head.target
        self.headers = head.headers
        self.content_length = head.content_length
        self.asked = head.asked
        self._mirror = mirror
        self._holding = mirror.route.held.reserve()
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._collecting = True

    def add(self, piece: bytes | memoryview) -> None:
        """Take what came next of the body, none at its end."""
        if not self._collecting:
            return
        self._size += len(piece)
        cap = self._mirror.route.limits.spool_bytes
        if max(self._size, self.content_length or 0) > cap:
            self._give_up(f"its body is larger than {cap} bytes (limits.spool_bytes)")
            return
        try:
            self._holding.resize(self._size)
        except GatewayError as error:
            self._give_up(error.message)
            return
        if piece:
            self._pieces.append(bytes(piece))  # a view may keep much more memory than it shows
        if self._size == self.content_length or not piece:
            self._collecting = False
            self._mirror.send(self)

    async def read(self) -> bytes | memoryview:
        """Give the next piece, none at the end; others get their turn in between."""
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        self._size -= len(piece)
        self._holding.resize(self._size)
        await asyncio.sleep(0)
        return piece

    def drop(self) -> None:
        """Hold nothing any more."""
        self._collecting = False
        self._pieces.clear()
        self._size = 0
        self._holding.resize(0)

    def end(self) -> None:
        """Take it that nothing more comes; what is not whole by now is not sent."""
        if self._collecting:
            self.drop()

    def _give_up(self, why: str) -> None:
        self._mirror.stats.left_out(why)
        self.drop()


class MirrorSampler:
    """Chooses the requests of which there are copies; ``random`` gives numbers in [0, 1)."""

    def __init__(self, mirror: Mirror, random: Callable[[], float]) -> None:
        self._mirror = mirror
        self._random = random

    def sample(self, head: MirroredHead, body: bytes, added_headers: HeaderLines = ()) -> None:
        """Copy a request at hand as a whole, with headers that are added to its own, or not."""
        if self._is_chosen():
            headers = CIMultiDictProxy(CIMultiDict([*head.headers.items(), *added_headers]))
            MirroredRequest(replace(head, headers=headers), self._mirror).add(body)

    @contextmanager
    def tee(self, request: ClientRequest, asked: Operation) -> Iterator[ClientRequest]:
        """Give a request of which there will be a copy if it is read to its end, or not."""
        if not self._is_chosen():
            yield request
            return
        length = request.content_length
        head = MirroredHead(request.method, request.target, request.headers, length, asked)
        copy = MirroredRequest(head, self._mirror)
        if length == 0:
            copy.add(b"")  # nobody reads what is not there
        try:
            yield _Copied(request, copy)
        finally:
            copy.end()

    def _is_chosen(self) -> bool:
        return self._random() < self._mirror.share and self._mirror.admits()


class _Copied(ClientRequest):
    """A client's request; what is read of it goes into the copy too."""

    def __init__(self, request: ClientRequest, copy: MirroredRequest) -> None:
        self.method = request.method
        self.target = request.target
        self.headers = request.headers
        self.content_length = request.content_length
        self._request = request
        self._copy = copy

    async def read(self) -> bytes | memoryview:
        """Give the next piece of the body."""
        piece = await self._request.read()
        self._copy.add(piece)
        return piece
