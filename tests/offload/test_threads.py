"""Real threads convert: exactly, whatever becomes of the calls and of the pool."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from gateway.build_info import NATIVE
from gateway.codec.elements.encode import fast_encode_numbers
from gateway.codec.offload_interface import OffloadFuture
from gateway.codec.policies import Nonfinite
from gateway.offload import threads as threads_module
from gateway.offload.threads import OffloadThreads
from gateway.protocol.datatypes import DATATYPES, Datatype
from tests.support.gateway import gateway_client, no_leaks, served, until
from tests.support.inference_messages import binary_response, infer_json
from tests.support.servers.model_scripts import echo_tensors
from tests.support.servers.scripted_server import ScriptedServer, always_respond

if not NATIVE:
    pytest.skip("the C module is not compiled", allow_module_level=True)

FP32 = DATATYPES["FP32"]
DATA = np.random.default_rng(0).normal(size=10_000).astype(np.float32).tobytes()
TEXT = b"[" + bytes(fast_encode_numbers(DATA, FP32) or b"") + b"]"
LARGE = np.random.default_rng(1).normal(size=4_000_000).tobytes()
"""A thread takes some 80 ms for it."""


def _threads() -> set[Path]:
    """Return the threads of pools in this process."""
    found = set()
    for entry in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if (entry / "comm").read_text() == "offload\n":
                found.add(entry)
    return found


@pytest.fixture(autouse=True)
def thread_check() -> Iterator[None]:
    """Check that no thread of a pool is left, once a test has dropped its futures."""
    assert _threads() == set()
    yield
    gc.collect()
    assert _threads() == set()


@asynccontextmanager
async def _offload(count: int = 1) -> AsyncIterator[OffloadThreads]:
    async with no_leaks():
        offload = OffloadThreads(count)
        try:
            yield offload
        finally:
            offload.close()


def _try_encode(
    offload: OffloadThreads, data: bytes | bytearray = DATA, datatype: Datatype = FP32
) -> OffloadFuture | None:
    return offload.encode(memoryview(data), datatype, Nonfinite.ERROR, False)


def _decode(offload: OffloadThreads) -> OffloadFuture | None:
    return offload.decode(memoryview(TEXT), FP32, 0, 0)


async def _submitted(
    offload: OffloadThreads, submit: Callable[[OffloadThreads], OffloadFuture | None] = _try_encode
) -> OffloadFuture:
    """Submit a job as soon as a thread takes it."""
    futures: list[OffloadFuture] = []

    def is_taken() -> bool:
        future = submit(offload)
        futures.extend([] if future is None else [future])
        return bool(futures)

    await until(is_taken, 30)
    return futures[0]


async def _result(future: OffloadFuture) -> bytes | None:
    """Return the result without ``wait``, so that only the threads work on it."""
    await until(lambda: future.done, 30)
    return future.take_result()


async def _keep_busy(offload: OffloadThreads, monkeypatch: pytest.MonkeyPatch) -> OffloadFuture:
    """Give the only thread something to do for a while."""
    monkeypatch.setattr(threads_module, "MAX_JOB_SIZE", len(LARGE))
    future = _try_encode(offload, LARGE, DATATYPES["FP64"])
    assert future is not None
    assert offload._pool is not None
    await until(lambda: offload._pool is not None and offload._pool.queued == 0)
    return future


async def test_threads_start_with_the_first_job() -> None:
    async with _offload(2) as offload:
        assert _try_encode(offload, b"") is None
        assert _threads() == set()
        assert await _result(await _submitted(offload)) == TEXT[1:-1]
        await until(lambda: len(_threads()) == 2)  # a thread takes its name when it first runs


@pytest.mark.parametrize("size", [0, 16 * 1024 - 4, 512 * 1024 + 4])
async def test_small_and_large_jobs_are_not_offloaded(size: int) -> None:
    async with _offload() as offload:
        assert _try_encode(offload, bytes(size)) is None


async def test_threads_have_a_limited_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    async with _offload() as offload:
        offload._on_job = seen.append
        busy = await _keep_busy(offload, monkeypatch)
        futures = [_try_encode(offload) for _ in range(10)]
        assert [future is not None for future in futures] == [True] * 8 + [False] * 2
        assert seen == [True] * 9 + [False] * 2
        assert [await _result(future) for future in futures if future] == [TEXT[1:-1]] * 8
        await busy.wait()


async def test_waiting_call_does_what_no_thread_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _offload() as offload:
        busy = await _keep_busy(offload, monkeypatch)
        first, second = await _submitted(offload), await _submitted(offload, _decode)
        await first.wait()
        assert not busy.done
        assert (first.take_result(), second.take_result()) == (TEXT[1:-1], DATA)
        await busy.wait()
        assert busy.take_result() is not None


async def test_other_tasks_run_between_jobs_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _offload() as offload:
        busy = await _keep_busy(offload, monkeypatch)
        futures = [await _submitted(offload), await _submitted(offload)]
        counts = []
        waiting = asyncio.create_task(futures[0].wait())
        while not waiting.done():
            await asyncio.sleep(0)
            counts.append(sum(future.done for future in futures))
        assert {1, 2} <= set(counts)
        await busy.wait()


async def test_waiting_calls_do_one_job_in_a_turn_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _offload() as offload:
        busy = await _keep_busy(offload, monkeypatch)
        futures = [await _submitted(offload) for _ in range(4)]
        counts = [0]
        waiting = [asyncio.create_task(future.wait()) for future in futures]
        while not all(task.done() for task in waiting):
            await asyncio.sleep(0)
            counts.append(sum(future.done for future in futures))
        assert not busy.done
        assert max(after - before for before, after in itertools.pairwise(counts)) == 1
        await busy.wait()


async def test_wait_may_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _offload() as offload:
        busy = await _keep_busy(offload, monkeypatch)
        waiting = asyncio.create_task(busy.wait())
        await until(lambda: offload._waiters)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not busy.done
        assert offload._waiters == {}
        await busy.wait()


async def test_dropped_jobs_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has begun is waited for; one that waits is forgotten."""
    async with _offload() as offload:
        busy = await _keep_busy(offload, monkeypatch)
        data = bytearray(DATA)
        waiting = _try_encode(offload, data)
        assert offload._pool is not None
        assert offload._pool.queued == 1
        del waiting
        assert offload._pool.queued == 0
        data.clear()  # this takes that no buffer of it is in use
        del busy
        assert await _result(await _submitted(offload)) == TEXT[1:-1]


async def test_jobs_end_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _offload() as offload:
        busy = await _keep_busy(offload, monkeypatch)
        queued = await _submitted(offload)
        waiting = asyncio.create_task(busy.wait())
        await until(lambda: offload._waiters)
        offload.close()
        assert _try_encode(offload) is None
        async with asyncio.timeout(30):
            await asyncio.gather(waiting, queued.wait())
        assert busy.take_result() is not None
        assert queued.take_result() == TEXT[1:-1]


@pytest.mark.parametrize("missing", ["threads", "descriptors"])
async def test_threads_that_cannot_start_are_tried_again(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no more of them")

    async with _offload() as offload:
        with monkeypatch.context() as patched:
            if missing == "threads":
                patched.setattr(threads_module, "ThreadPool", fail)
            else:
                patched.setattr(os, "pipe", fail)
            assert [_try_encode(offload) for _ in range(2)] == [None, None]
        assert caplog.text.count("no threads for large tensors, for 10 s: no more of them") == 1
        assert _try_encode(offload) is None
        offload._next_start = 0.0
        assert await _result(await _submitted(offload)) == TEXT[1:-1]


async def test_threads_leave_signals_to_python() -> None:
    async with _offload() as offload:
        await _result(await _submitted(offload))
        (status,) = [(thread / "status").read_text() for thread in _threads()]
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert blocked & 1 << 14  # SIGTERM is number 15


COUNT = 300_000
VALUES = np.random.default_rng(1).normal(size=COUNT).astype(np.float32)
NUMBERS = bytes(fast_encode_numbers(VALUES.tobytes(), FP32) or b"")


def _request(numbers: bytes) -> bytes:
    fields = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%d],"data":[%b]}]}'
    return infer_json(fields % (COUNT, numbers))


@pytest.mark.parametrize("threads", [1, 4])
async def test_large_bodies_are_converted_exactly(threads: int) -> None:
    async with served(echo_tensors, offload=threads) as (_, _, client):
        for _ in range(3):
            async with asyncio.timeout(30):
                client.send_nowait(_request(NUMBERS))
                reply = await client.read_response()
            assert reply.status == 200
            data = json.loads(reply.body)["outputs"][0]["data"]
            assert np.array_equal(np.array(data, np.float32), VALUES)
        assert len(_threads()) == threads


async def test_invalid_element_is_named() -> None:
    numbers = NUMBERS.split(b",")
    numbers[200_000] = b"true"
    async with served(echo_tensors, offload=2) as (server, _, client):
        for _ in range(4):
            client.send_nowait(_request(b",".join(numbers)))
            reply = await client.read_response()
            assert reply.status == 400
            assert "element 200000" in reply.error
        assert server.requests == []


async def test_calls_that_are_cut_off_leave_no_job() -> None:
    request = _request(NUMBERS)
    async with ScriptedServer(echo_tensors) as server:
        for part in (0.3, 0.6, 0.9, 1.0):
            async with no_leaks(), gateway_client(server.url, offload=2) as client:
                client.send_nowait(request[: int(len(request) * part)])
                await asyncio.sleep(0.005)


async def test_first_invalid_element_of_a_response_is_named() -> None:
    """A later piece is encoded here while the thread is busy: its error is found first."""
    values = VALUES.copy()
    values[[5, *range(16_385, COUNT, 16_384)]] = np.nan
    script, route = always_respond(binary_response(values.tobytes())), {"nonfinite": "error"}
    async with served(script, offload=1, route=route) as (_, _, client):
        for _ in range(5):
            client.send_nowait(_request(NUMBERS))
            reply = await client.read_response()
            assert reply.status == 406
            assert "element 5 is nan" in reply.error
