"""Generates load of gRPC calls and streams."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from functools import partial

import uvloop

from benchmarks.harness.client import HOST, BenchmarkError
from benchmarks.harness.grpc_messages import INFER, STREAM_INFER
from benchmarks.harness.http2_frames import (
    END_HEADERS,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    FrameProtocol,
    data_head,
    frame,
    header_block,
    opening,
)
from benchmarks.harness.load import LoadGenerator, LoadResult
from benchmarks.harness.processes import Cores, run
from benchmarks.harness.requests import Request
from benchmarks.servers.proxies import installed

STREAMS = 4
"""Concurrent calls of each connection."""

_RATE = re.compile(r"^finished in [^,]+, ([0-9.]+) req/s", re.MULTILINE)
_REQUESTS = re.compile(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout")
_DATA = re.compile(r"\((\d+)\) data$", re.MULTILINE)
_OPTIONS = ("--header=content-type: application/grpc", "--header=te: trailers")


def h2load_load(cores: Cores, tensor_size: int) -> LoadGenerator:
    """Return a load generator that runs h2load on these cores, for unary calls.

    h2load does not read trailers, where errors are. So responses must have at least the bytes of
    their tensors. Raises NotInstalledError.
    """
    program = installed("h2load", "apt install nghttp2-client")

    def load(port: int, request: Request, connections: int, seconds: int) -> LoadResult:
        with tempfile.NamedTemporaryFile(prefix="tensorgate-bench-") as file:
            file.write(request.body)
            file.flush()
            command = [program, f"--clients={connections}", f"--max-concurrent-streams={STREAMS}"]
            command += [f"--duration={seconds}", f"--data={file.name}", *_OPTIONS]
            done = run([*command, f"http://{HOST}:{port}{INFER}"], cores)
        rate, counts = _RATE.search(done.output), _REQUESTS.search(done.output)
        data = _DATA.search(done.output)
        if rate is None or counts is None or data is None:
            raise BenchmarkError(f"h2load reported nothing:\n{done.output}")
        succeeded, *others = map(int, counts.groups())
        if any(others) or int(data[1]) < succeeded * tensor_size:
            raise BenchmarkError(f"h2load did not get its responses:\n{done.output}")
        return LoadResult(float(rate[1]), done.cpu_time / seconds)

    return load


def stream_load(response_size: int) -> LoadGenerator:
    """Return a load generator of messages on streams that stay open, one at a time on each.

    It runs in this process.
    """

    def load(port: int, request: Request, connections: int, seconds: int) -> LoadResult:
        async def run_all() -> int:
            loop = asyncio.get_running_loop()
            clients = [_StreamClient(request.body, response_size) for _ in range(connections)]
            for client in clients:
                await loop.create_connection(partial(_itself, client), HOST, port)
            done, _ = await asyncio.wait([each.failed for each in clients], timeout=seconds)
            for client in clients:
                client.close()
            for failed in done:
                failed.result()
            return sum(each.responses for each in clients)

        cpu_time, began = time.process_time(), time.perf_counter()
        count = uvloop.run(run_all())
        took = time.perf_counter() - began
        return LoadResult(count / took, (time.process_time() - cpu_time) / took)

    return load


def _itself(client: _StreamClient) -> _StreamClient:
    return client


class _StreamClient(FrameProtocol):
    """Sends the next message on each stream once the response to the last one is there.

    It ignores the other side's windows: messages are small, and their windows open again long
    before the responses to so many could be missing.
    """

    def __init__(self, message: bytes, response_size: int) -> None:
        super().__init__()
        self._message = message
        self._response_size = response_size
        self._missing = dict.fromkeys(range(1, 2 * STREAMS, 2), response_size)
        self._closing = False
        self.responses = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        fields = (":method", "POST"), (":scheme", "http"), (":path", STREAM_INFER)
        others = (":authority", HOST), ("content-type", "application/grpc"), ("te", "trailers")
        block = header_block((*fields, *others))
        self.output += [PREFACE, opening()]
        for stream in self._missing:
            self.output.append(frame(HEADERS, END_HEADERS, stream, block))
            self._send(stream)
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closing:
            self._fail("the connection was closed")

    def close(self) -> None:
        """Close the connection, and with it all streams."""
        self._closing = True
        self._transport.abort()
        self.failed.cancel()

    def receive_data(self, stream: int, data: bytes, start: int, end: int, ended: bool) -> None:
        self._missing[stream] -= end - start
        if not self._missing[stream]:
            self._missing[stream] = self._response_size
            self.responses += 1
            self._send(stream)

    def receive_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & 1):
            self._fail(f"frame {kind} instead of the next response: {payload!r}")

    def _send(self, stream: int) -> None:
        self.output += [data_head(len(self._message), stream), self._message]

    def _fail(self, what: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(BenchmarkError(what))
