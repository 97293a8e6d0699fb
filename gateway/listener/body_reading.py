"""Reads a large JSON body while it arrives, before its call begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from gateway.codec.v2.request import InferRequestReader
from gateway.errors import GatewayError
from gateway.http1.connection import BodyBuffer
from gateway.protocol.messages import InferRequest
from gateway.proxy.admission.memory_budget import Reservation
from gateway.system.time_slices import time_slice_queue

_FED_AT_ONCE: Final = 256 * 1024
"""Bytes that a reader gets at once: as many as it converts in one step."""
_SLICE: Final = 0.0001
"""Seconds of a time slice after which no further step begins."""

_log = logging.getLogger("tensorgate.listener")


class BodyReading:
    """Has a ``reader`` read what arrives in ``memory``, a time slice for each step.

    What the reader buffers is reserved until the end. Then ``on_end`` gets the request: None if it
    is invalid, so that the streaming path reads it anew, and sends the error.
    """

    def __init__(
        self,
        reader: InferRequestReader,
        reservation: Reservation,
        memory: BodyBuffer,
        client: str,
        on_end: Callable[[InferRequest | None], None],
    ) -> None:
        self._reader = reader
        self._memory: BodyBuffer | None = memory
        self._reservation = reservation
        self._client = client
        self._on_end: Callable[[InferRequest | None], None] | None = on_end
        self._size = len(memory.view)
        self._received = self._fed = 0
        self._is_last_fed = self._is_read = False
        self._is_scheduled = False

    def arrive(self, size: int) -> None:
        """Read on, as ``size`` bytes more have come."""
        self._received += size
        if self._is_enough():
            self._schedule()

    def stop(self) -> None:
        """Read no more, and give back what is reserved; ``on_end`` gets nothing."""
        self._on_end = self._memory = None
        self._reservation.resize_unchecked(0)

    def _is_enough(self) -> bool:
        return self._received - self._fed >= _FED_AT_ONCE or self._received == self._size

    def _schedule(self) -> None:
        if not self._is_scheduled and self._on_end is not None:
            self._is_scheduled = True
            time_slice_queue().add(self._take_slice, self._client)

    def _take_slice(self) -> None:
        self._is_scheduled = False
        if self._on_end is None:
            return
        request: InferRequest | None = None
        try:
            until = time.perf_counter() + _SLICE
            while self._step():
                if time.perf_counter() >= until:
                    self._schedule()
                    break
            self._reservation.resize_unchecked(self._reader.buffered_bytes)
            if not self._is_read:
                return
            request = self._reader.finish()
            if request.missing_size:
                request = None  # the streaming path tells what is wrong
        except GatewayError:
            pass
        except Exception:
            # A bug of the gateway: log it; the streaming path serves the call.
            _log.exception("reading a body failed")
        on_end = self._on_end
        self.stop()
        on_end(request)

    def _step(self) -> bool:
        """Do a step; return whether more can be done now."""
        reader, memory = self._reader, self._memory
        assert memory is not None
        if reader.step():
            return True
        if self._fed < self._size:
            if not self._is_enough():
                return False
            end = min(self._received, self._fed + _FED_AT_ONCE)
            reader.feed(memory.view[self._fed : end], whole=memory.view)
            self._fed = end
            return True
        if not self._is_last_fed:
            self._is_last_fed = True
            reader.feed(b"", last=True)
            return True
        future = reader.future
        if future is not None and not future.help():
            future.call_when_done(self._schedule)
            return False
        self._is_read = future is None
        return future is not None
