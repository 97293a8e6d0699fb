"""A real offload process: used, killed, stopped, closed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from gateway.codec.elements.run_job import run_job
from gateway.codec.offload_interface import ConversionJob, OffloadFuture
from gateway.offload import process, slots
from gateway.offload.__main__ import serve
from gateway.offload.process import OffloadProcess
from gateway.protocol.datatypes import DATATYPES
from tests.support.gateway import gateway_client, no_leaks, until
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import Connection, ScriptedServer

TO_JSON = ConversionJob(True, DATATYPES["FP32"])
TO_BINARY = ConversionJob(False, DATATYPES["FP32"])
NUMBERS = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
DATA = NUMBERS.tobytes()
TEXT = b"[" + bytes(run_job(TO_JSON, DATA) or b"") + b"]"


@asynccontextmanager
async def _offload_process() -> AsyncIterator[OffloadProcess]:
    async with no_leaks():
        offload = OffloadProcess()
        try:
            yield offload
        finally:
            await offload.close()
    assert _children() == set()


def _children() -> set[int]:
    children = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if parent == os.getpid() and b"gateway.offload" in words:
                children.add(int(entry.name))
    return children


async def _submit(
    offload: OffloadProcess, work: ConversionJob = TO_JSON, data: bytes = DATA
) -> OffloadFuture:
    """Submit a job as soon as the process takes it."""
    futures: list[OffloadFuture] = []

    def submit() -> bool:
        future = offload.submit(work, data)
        futures.extend([future] if future is not None else [])
        return bool(futures)

    await until(submit, 30)
    return futures[0]


async def _result(future: OffloadFuture) -> bytes | memoryview | None:
    """Return the result without ``wait``, so that only the offload process works on it."""
    await until(lambda: future.done, 30)
    return future.result


@asynccontextmanager
async def _three_jobs_at_a_stopped_process() -> AsyncIterator[tuple[int, list[OffloadFuture]]]:
    """Yield the process id, and the futures of the jobs."""
    async with _offload_process() as offload:
        await _result(await _submit(offload))
        (pid,) = _children()
        os.kill(pid, signal.SIGSTOP)
        jobs = [(TO_JSON, DATA), (TO_BINARY, TEXT), (TO_BINARY, b"[1," * 9000)]
        futures = [offload.submit(work, data) for work, data in jobs]
        yield pid, [future for future in futures if future is not None]


async def test_process_starts_with_the_first_job() -> None:
    async with _offload_process() as offload:
        await asyncio.sleep(0.01)
        assert _children() == set()
        assert offload.submit(TO_JSON, DATA) is None
        assert await _result(await _submit(offload)) == TEXT[1:-1]
        assert len(_children()) == 1


async def test_jobs_do_not_wait_for_the_start() -> None:
    async with _offload_process() as offload:
        assert offload.submit(TO_JSON, DATA) is None
        await until(lambda: offload._connection is not None)
        assert offload.submit(TO_JSON, DATA) is None
        await _submit(offload)


async def test_process_converts_in_both_directions() -> None:
    async with _offload_process() as offload:
        assert await _result(await _submit(offload, TO_BINARY, TEXT)) == DATA
        assert await _result(await _submit(offload, TO_JSON, DATA)) == TEXT[1:-1]
        assert await _result(await _submit(offload, TO_BINARY, b"[1," * 9000)) is None
        assert await _result(await _submit(offload, TO_BINARY, TEXT)) == DATA


@pytest.mark.parametrize("size", [0, 64, slots.MAX_JOB_SIZE + 4])
async def test_small_and_large_jobs_are_not_offloaded(size: int) -> None:
    async with _offload_process() as offload:
        await _result(await _submit(offload))
        assert offload.submit(TO_JSON, bytes(size)) is None


async def test_job_may_come_in_pieces() -> None:
    async with _offload_process() as offload:
        await _result(await _submit(offload))
        future = offload.submit(TO_BINARY, TEXT[:1], memoryview(TEXT)[1:-1], TEXT[-1:])
        assert future is not None
        assert await _result(future) == DATA


async def test_result_that_does_not_fit_its_slot_is_not_done() -> None:
    async with _offload_process() as offload:
        await _result(await _submit(offload))
        for element, text in ((b"\x80", None), (b"\1", b"1," * (slots.MAX_JOB_SIZE - 1) + b"1")):
            future = offload.submit(
                ConversionJob(True, DATATYPES["INT8"]), element * slots.MAX_JOB_SIZE
            )
            assert future is not None
            assert await _result(future) == text


async def test_process_has_a_limited_number_of_jobs() -> None:
    async with _offload_process() as offload:
        await _result(await _submit(offload))
        futures = [offload.submit(TO_JSON, DATA) for _ in range(slots.SLOT_COUNT + 2)]
        assert [future is not None for future in futures] == [True] * slots.SLOT_COUNT + [False] * 2
        assert [await _result(future) for future in futures if future] == [
            TEXT[1:-1]
        ] * slots.SLOT_COUNT
        assert offload.submit(TO_JSON, DATA) is not None


async def test_jobs_of_a_process_that_dies_are_not_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _offload_process() as offload:
        await _result(await _submit(offload))
        (pid,) = _children()
        os.kill(pid, signal.SIGSTOP)
        futures = [offload.submit(TO_JSON, DATA) for _ in range(2)]
        os.kill(pid, signal.SIGKILL)
        assert [await _result(future) for future in futures if future] == [None, None]
        await until(lambda: offload._connection is None)
        assert offload.submit(TO_JSON, DATA) is None
    assert f"the offload process {pid} ended" in caplog.text


async def test_waiting_call_does_the_last_jobs_first() -> None:
    async with _three_jobs_at_a_stopped_process() as (_, futures):
        await futures[2].wait()
        assert [future.done for future in futures] == [False, False, True]
        await futures[0].wait()
        assert [future.result for future in futures] == [TEXT[1:-1], DATA, None]
        await futures[1].wait()


async def test_other_tasks_run_between_jobs_done_here() -> None:
    async with _three_jobs_at_a_stopped_process() as (_, futures):
        done_counts = []
        waiting = asyncio.create_task(futures[0].wait())
        while not waiting.done():
            await asyncio.sleep(0)
            done_counts.append(sum(future.done for future in futures))
        assert [done_counts.count(done) > 0 for done in (1, 2, 3)] == [True] * 3


async def test_two_calls_may_wait() -> None:
    async with _three_jobs_at_a_stopped_process() as (_, futures):
        async with asyncio.timeout(30):
            await asyncio.gather(futures[0].wait(), futures[1].wait())
        assert [future.result for future in futures] == [TEXT[1:-1], DATA, None]


async def test_wait_may_be_cancelled() -> None:
    async with _three_jobs_at_a_stopped_process() as (pid, futures):
        waiting = asyncio.create_task(futures[0].wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert [future.done for future in futures] == [False, False, True]
        os.kill(pid, signal.SIGCONT)
        assert [await _result(future) for future in futures] == [TEXT[1:-1], DATA, None]


async def test_process_that_continues_takes_new_jobs() -> None:
    async with _offload_process() as offload:
        await _result(await _submit(offload))
        (pid,) = _children()
        for _ in range(3):
            os.kill(pid, signal.SIGSTOP)
            futures = [offload.submit(TO_JSON, DATA) for _ in range(slots.SLOT_COUNT)]
            (first, *_) = [future for future in futures if future]
            await first.wait()
            assert offload.submit(TO_BINARY, TEXT) is None
            os.kill(pid, signal.SIGCONT)
            assert await _result(await _submit(offload, TO_BINARY, TEXT)) == DATA
            assert [future.result for future in futures if future] == [
                TEXT[1:-1]
            ] * slots.SLOT_COUNT


async def test_stopped_process_is_killed_though_its_jobs_are_done_here() -> None:
    with mock.patch.object(process, "_JOB_TIMEOUT", 0.2):
        async with _three_jobs_at_a_stopped_process() as (_, futures):
            await futures[0].wait()
            await until(lambda: _children() == set())


def test_cancelled_job_is_not_begun() -> None:
    ours, theirs = socket.socketpair()
    memory = slots.create_memory()
    shared = slots.SharedSlots(memory)
    os.close(memory)
    sizes = [shared.write_job(slot, (DATA[: 4 * (slot + 1)],)) for slot in range(2)]
    shared.cancel(0)
    code = slots.encode_job(TO_JSON)
    ours.sendall(b"".join(slots.MESSAGE.pack(code, slot, size) for slot, size in enumerate(sizes)))
    ours.shutdown(socket.SHUT_WR)
    with ours, theirs:
        serve(theirs, shared)
        replies = slots.MessageReader().feed(ours.recv(1000))
    assert [(code, slot) for code, slot, _ in replies[1:]] == [(slots.NOT_DONE, 0), (slots.DONE, 1)]


async def test_process_that_died_is_restarted_after_a_delay() -> None:
    with mock.patch.object(process, "_RESTART_DELAY", 0.01):
        async with _offload_process() as offload:
            await _result(await _submit(offload))
            (pid,) = _children()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: offload._connection is None)
            assert await _result(await _submit(offload)) == TEXT[1:-1]


async def test_stopped_process_is_killed() -> None:
    with mock.patch.object(process, "_JOB_TIMEOUT", 2.0):
        async with _offload_process() as offload:
            await _result(await _submit(offload))
            (pid,) = _children()
            os.kill(pid, signal.SIGSTOP)
            future = offload.submit(TO_JSON, DATA)
            assert future is not None
            assert await _result(future) is None
            await until(lambda: offload._connection is None)


async def test_close_finishes_running_jobs() -> None:
    async with _offload_process() as offload:
        await _result(await _submit(offload))
        future = offload.submit(TO_JSON, DATA)
        assert future is not None
        await offload.close()
        assert _children() == set()
        assert future.done
        assert offload.submit(TO_JSON, DATA) is None


async def test_close_while_the_process_starts() -> None:
    async with _offload_process() as offload:
        assert offload.submit(TO_JSON, DATA) is None
        await asyncio.sleep(0)


async def test_process_ignores_ctrl_c() -> None:
    async with _offload_process() as offload:
        await _result(await _submit(offload))
        (pid,) = _children()
        os.kill(pid, signal.SIGINT)
        assert await _result(await _submit(offload)) == TEXT[1:-1]


SLOT_COUNT = 300_000
LARGE = np.random.default_rng(1).normal(size=SLOT_COUNT).astype(np.float32)


def _request(numbers: bytes) -> bytes:
    fields = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%d],"data":[%b]}]}'
    body = fields % (SLOT_COUNT, numbers)
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


async def _echo(connection: Connection) -> None:
    """Answer each request with its tensor."""
    while True:
        received = await connection.request()
        size = int(received.head.get("Inference-Header-Content-Length") or 0)
        tensor = received.body[size:]
        shown = {"name": "y", "datatype": "FP32", "shape": [SLOT_COUNT]}
        sized = shown | {"parameters": {"binary_data_size": len(tensor)}}
        header = json.dumps({"model_name": "m", "outputs": [sized]}).encode()
        length = {"Inference-Header-Content-Length": str(len(header))}
        await connection.send(http_response(header + tensor, length))


async def _send_tensors(disturb: Callable[[int], None]) -> None:
    """Send large tensors through a gateway; disturb its offload process before each."""
    numbers = bytes(run_job(TO_JSON, LARGE.tobytes()) or b"")
    async with (
        ScriptedServer(_echo) as server,
        gateway_client(server.url, helper="always") as client,
    ):
        for number in range(6):
            disturb(number)
            async with asyncio.timeout(30):
                client.send_nowait(_request(numbers))
                reply = await client.read_response()
            assert reply.status == 200
            data = json.loads(reply.body)["outputs"][0]["data"]
            assert np.array_equal(np.array(data, np.float32), LARGE)
            await asyncio.sleep(0.1)
    await until(lambda: _children() == set())


async def test_large_bodies_are_converted_exactly() -> None:
    seen: set[int] = set()
    await _send_tensors(lambda _: seen.update(_children()))
    assert len(seen) == 1


async def test_large_bodies_are_converted_exactly_though_the_process_dies() -> None:
    def kill(number: int) -> None:
        loop = asyncio.get_running_loop()
        for pid in _children():
            loop.call_later(0.002 * number, os.kill, pid, signal.SIGKILL)

    with mock.patch.object(process, "_RESTART_DELAY", 0.01):
        await _send_tensors(kill)


async def test_invalid_element_is_named() -> None:
    numbers = (bytes(run_job(TO_JSON, LARGE.tobytes()) or b"")).split(b",")
    numbers[200_000] = b"true"
    async with (
        ScriptedServer(_echo) as server,
        gateway_client(server.url, helper="always") as client,
    ):
        for _ in range(4):
            client.send_nowait(_request(b",".join(numbers)))
            reply = await client.read_response()
            assert reply.status == 400
            assert "element 200000" in reply.error
            await asyncio.sleep(0.2)
        assert server.requests == []
