"""A real helper process: used, killed, stopped, closed."""

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

from gateway.codec.elements.offloaded_work import run_job
from gateway.codec.offload import ConversionJob, OffloadFuture
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
async def _helper() -> AsyncIterator[OffloadProcess]:
    async with no_leaks():
        helper = OffloadProcess()
        try:
            yield helper
        finally:
            await helper.close()
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


async def _lend(
    helper: OffloadProcess, work: ConversionJob = TO_JSON, data: bytes = DATA
) -> OffloadFuture:
    """Lend as soon as the helper takes it."""
    loans: list[OffloadFuture] = []

    def submit() -> bool:
        loan = helper.submit(work, data)
        loans.extend([loan] if loan is not None else [])
        return bool(loans)

    await until(submit, 30)
    return loans[0]


async def _result(loan: OffloadFuture) -> bytes | memoryview | None:
    """Give what the helper makes of it: nobody waits for it, and so nobody helps."""
    await until(lambda: loan.done, 30)
    return loan.result


@asynccontextmanager
async def _three_lent_to_one_who_stands_still() -> AsyncIterator[tuple[int, list[OffloadFuture]]]:
    """Give the helper's process id, and the loans."""
    async with _helper() as helper:
        await _result(await _lend(helper))
        (pid,) = _children()
        os.kill(pid, signal.SIGSTOP)
        works = [(TO_JSON, DATA), (TO_BINARY, TEXT), (TO_BINARY, b"[1," * 9000)]
        loans = [helper.submit(work, data) for work, data in works]
        yield pid, [loan for loan in loans if loan is not None]


async def test_it_starts_when_there_is_work() -> None:
    async with _helper() as helper:
        await asyncio.sleep(0.01)
        assert _children() == set()
        assert helper.submit(TO_JSON, DATA) is None
        assert await _result(await _lend(helper)) == TEXT[1:-1]
        assert len(_children()) == 1


async def test_nothing_waits_for_it_to_start() -> None:
    async with _helper() as helper:
        assert helper.submit(TO_JSON, DATA) is None
        await until(lambda: helper._link is not None)
        assert helper.submit(TO_JSON, DATA) is None
        await _lend(helper)


async def test_it_does_both_kinds_of_work() -> None:
    async with _helper() as helper:
        assert await _result(await _lend(helper, TO_BINARY, TEXT)) == DATA
        assert await _result(await _lend(helper, TO_JSON, DATA)) == TEXT[1:-1]
        assert await _result(await _lend(helper, TO_BINARY, b"[1," * 9000)) is None
        assert await _result(await _lend(helper, TO_BINARY, TEXT)) == DATA


@pytest.mark.parametrize("size", [0, 64, slots.MAX_WORK_SIZE + 4])
async def test_too_little_and_too_much_is_done_here(size: int) -> None:
    async with _helper() as helper:
        await _result(await _lend(helper))
        assert helper.submit(TO_JSON, bytes(size)) is None


async def test_work_may_come_in_pieces() -> None:
    async with _helper() as helper:
        await _result(await _lend(helper))
        loan = helper.submit(TO_BINARY, TEXT[:1], memoryview(TEXT)[1:-1], TEXT[-1:])
        assert loan is not None
        assert await _result(loan) == DATA


async def test_what_does_not_fit_into_its_slot_is_not_done() -> None:
    async with _helper() as helper:
        await _result(await _lend(helper))
        for element, text in ((b"\x80", None), (b"\1", b"1," * (slots.MAX_WORK_SIZE - 1) + b"1")):
            loan = helper.submit(
                ConversionJob(True, DATATYPES["INT8"]), element * slots.MAX_WORK_SIZE
            )
            assert loan is not None
            assert await _result(loan) == text


async def test_it_has_so_many_things_to_do_at_most() -> None:
    async with _helper() as helper:
        await _result(await _lend(helper))
        loans = [helper.submit(TO_JSON, DATA) for _ in range(slots.SLOT_COUNT + 2)]
        assert [loan is not None for loan in loans] == [True] * slots.SLOT_COUNT + [False] * 2
        assert [await _result(loan) for loan in loans if loan] == [TEXT[1:-1]] * slots.SLOT_COUNT
        assert helper.submit(TO_JSON, DATA) is not None


async def test_what_it_has_not_done_when_it_dies_is_not_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _helper() as helper:
        await _result(await _lend(helper))
        (pid,) = _children()
        os.kill(pid, signal.SIGSTOP)
        loans = [helper.submit(TO_JSON, DATA) for _ in range(2)]
        os.kill(pid, signal.SIGKILL)
        assert [await _result(loan) for loan in loans if loan] == [None, None]
        await until(lambda: helper._link is None)
        assert helper.submit(TO_JSON, DATA) is None
    assert f"the helper process {pid} ended" in caplog.text


async def test_who_waits_does_it_here_the_last_first() -> None:
    async with _three_lent_to_one_who_stands_still() as (_, loans):
        await loans[2].wait()
        assert [loan.done for loan in loans] == [False, False, True]
        await loans[0].wait()
        assert [loan.result for loan in loans] == [TEXT[1:-1], DATA, None]
        await loans[1].wait()


async def test_others_have_their_turn_meanwhile() -> None:
    async with _three_lent_to_one_who_stands_still() as (_, loans):
        turns = []
        waiting = asyncio.create_task(loans[0].wait())
        while not waiting.done():
            await asyncio.sleep(0)
            turns.append(sum(loan.done for loan in loans))
        assert [turns.count(done) > 0 for done in (1, 2, 3)] == [True] * 3


async def test_two_may_wait() -> None:
    async with _three_lent_to_one_who_stands_still() as (_, loans):
        async with asyncio.timeout(30):
            await asyncio.gather(loans[0].wait(), loans[1].wait())
        assert [loan.result for loan in loans] == [TEXT[1:-1], DATA, None]


async def test_a_wait_may_be_cancelled() -> None:
    async with _three_lent_to_one_who_stands_still() as (pid, loans):
        waiting = asyncio.create_task(loans[0].wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert [loan.done for loan in loans] == [False, False, True]
        os.kill(pid, signal.SIGCONT)
        assert [await _result(loan) for loan in loans] == [TEXT[1:-1], DATA, None]


async def test_a_helper_that_goes_on_goes_on_with_what_comes() -> None:
    async with _helper() as helper:
        await _result(await _lend(helper))
        (pid,) = _children()
        for _ in range(3):
            os.kill(pid, signal.SIGSTOP)
            loans = [helper.submit(TO_JSON, DATA) for _ in range(slots.SLOT_COUNT)]
            (first, *_) = [loan for loan in loans if loan]
            await first.wait()
            assert helper.submit(TO_BINARY, TEXT) is None
            os.kill(pid, signal.SIGCONT)
            assert await _result(await _lend(helper, TO_BINARY, TEXT)) == DATA
            assert [loan.result for loan in loans if loan] == [TEXT[1:-1]] * slots.SLOT_COUNT


async def test_one_that_does_nothing_is_given_up_though_its_work_is_done_here() -> None:
    with mock.patch.object(process, "_PATIENCE", 0.2):
        async with _three_lent_to_one_who_stands_still() as (_, loans):
            await loans[0].wait()
            await until(lambda: _children() == set())


def test_what_was_withdrawn_is_not_begun() -> None:
    ours, its = socket.socketpair()
    file = slots.create_memory()
    shared = slots.SharedSlots(file)
    os.close(file)
    sizes = [shared.put_work(slot, (DATA[: 4 * (slot + 1)],)) for slot in range(2)]
    shared.cancel(0)
    mark = slots.work_code(TO_JSON)
    ours.sendall(b"".join(slots.MESSAGE.pack(mark, slot, size) for slot, size in enumerate(sizes)))
    ours.shutdown(socket.SHUT_WR)
    with ours, its:
        serve(its, shared)
        replies = slots.MessageReader().feed(ours.recv(1000))
    assert [(mark, slot) for mark, slot, _ in replies[1:]] == [(slots.NOT_DONE, 0), (slots.DONE, 1)]


async def test_another_one_is_started_after_a_pause() -> None:
    with mock.patch.object(process, "_PAUSE", 0.01):
        async with _helper() as helper:
            await _result(await _lend(helper))
            (pid,) = _children()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: helper._link is None)
            assert await _result(await _lend(helper)) == TEXT[1:-1]


async def test_one_that_does_nothing_is_given_up() -> None:
    with mock.patch.object(process, "_PATIENCE", 2.0):
        async with _helper() as helper:
            await _result(await _lend(helper))
            (pid,) = _children()
            os.kill(pid, signal.SIGSTOP)
            loan = helper.submit(TO_JSON, DATA)
            assert loan is not None
            assert await _result(loan) is None
            await until(lambda: helper._link is None)


async def test_closing_ends_what_is_under_way() -> None:
    async with _helper() as helper:
        await _result(await _lend(helper))
        loan = helper.submit(TO_JSON, DATA)
        assert loan is not None
        await helper.close()
        assert _children() == set()
        assert loan.done
        assert helper.submit(TO_JSON, DATA) is None


async def test_closing_while_it_starts() -> None:
    async with _helper() as helper:
        assert helper.submit(TO_JSON, DATA) is None
        await asyncio.sleep(0)


async def test_a_ctrl_c_is_not_for_the_helper() -> None:
    async with _helper() as helper:
        await _result(await _lend(helper))
        (pid,) = _children()
        os.kill(pid, signal.SIGINT)
        assert await _result(await _lend(helper)) == TEXT[1:-1]


SLOT_COUNT = 300_000
LARGE = np.random.default_rng(1).normal(size=SLOT_COUNT).astype(np.float32)


def _request(numbers: bytes) -> bytes:
    fields = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%d],"data":[%b]}]}'
    body = fields % (SLOT_COUNT, numbers)
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


async def _echo(connection: Connection) -> None:
    """Answer each request with the tensor that came."""
    while True:
        received = await connection.request()
        size = int(received.head.get("Inference-Header-Content-Length") or 0)
        tensor = received.body[size:]
        shown = {"name": "y", "datatype": "FP32", "shape": [SLOT_COUNT]}
        sized = shown | {"parameters": {"binary_data_size": len(tensor)}}
        header = json.dumps({"model_name": "m", "outputs": [sized]}).encode()
        length = {"Inference-Header-Content-Length": str(len(header))}
        await connection.send(http_response(header + tensor, length))


async def _ask(disturb: Callable[[int], None]) -> None:
    """Send large tensors through a gateway with a helper, which is disturbed before each."""
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


async def test_large_bodies_are_right_with_a_helper() -> None:
    seen: set[int] = set()
    await _ask(lambda _: seen.update(_children()))
    assert len(seen) == 1


async def test_large_bodies_are_right_when_the_helper_dies() -> None:
    def kill(number: int) -> None:
        loop = asyncio.get_running_loop()
        for pid in _children():
            loop.call_later(0.002 * number, os.kill, pid, signal.SIGKILL)

    with mock.patch.object(process, "_PAUSE", 0.01):
        await _ask(kill)


async def test_a_fault_is_named_with_a_helper() -> None:
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
