"""The admin process: what it tells of workers that run, hang or have died."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from gateway.admin.own_calls import make_captured_call
from gateway.admin.status import merge_statuses
from gateway.app import admin_source
from gateway.app.admin_source import AdminSource
from gateway.app.loaded_resources import load_resources
from gateway.app.shared_memory import SharedMemory
from gateway.upstream.transport import UpstreamRequest
from gateway.workers.control import ControlClient, ControlServer, Question, Responder
from tests.admin.site import make_settings, worker_status
from tests.support.addresses import free_address
from tests.support.gateway import no_leaks, running_gateway, until
from tests.support.gateway_process import (
    FAST_FILE_WATCH,
    TIMEOUT,
    Process,
    gateway_process,
    write_settings,
)
from tests.support.http_messages import http_response, request
from tests.support.operator import Operator
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond

LOCAL = {"Host": "localhost"}
CALL = request("GET", "/v2/models/m/ready")
in_processes = pytest.mark.asyncio(loop_factories=["uvloop"])  # the test's own, not theirs
DEAD = 2**22 + 1
"""No process has this id."""


def _says(reason: str) -> Responder:
    async def respond(question: Question, connection: object) -> str:
        return reason

    return respond


async def _hang(question: Question, connection: object) -> str:
    await asyncio.Event().wait()
    raise AssertionError


@asynccontextmanager
async def _admin(*responders: Responder, alive: int | None = None) -> AsyncIterator[AdminSource]:
    """Return what an admin process reads; the workers are of this process, so that they live."""
    shared = SharedMemory.for_workers(len(responders))
    for slot in range(len(responders) if alive is None else alive):
        shared.worker_pids[slot][0] = os.getpid()
    assert shared.control is not None
    async with no_leaks():
        with ExitStack() as stack:
            for slot, responder in enumerate(responders):
                stack.enter_context(ControlServer(shared.control, slot, responder))
            resources = load_resources(make_settings())
            workers = stack.enter_context(ControlClient(shared.control))
            yield AdminSource(resources, shared, shared.admin_journal, workers.ask)


async def test_workers_that_hang_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe waits as long for eight workers as for one."""
    monkeypatch.setattr(admin_source, "NEXT_WORKER_DELAY", 0.001)
    monkeypatch.setattr(admin_source, "READY_TIMEOUT", 0.5)
    asked: list[Question] = []

    async def hang(question: Question, connection: object) -> str:
        asked.append(question)
        return await _hang(question, connection)

    async with _admin(*[hang] * 8) as admin:
        waiting = asyncio.create_task(admin.not_ready_reason())
        await until(lambda: len(asked) == 8)
        assert not waiting.done()
        assert await waiting == "no worker responds"


async def test_gateway_without_workers_is_not_ready() -> None:
    async with _admin(_hang, _hang, alive=0) as admin:
        assert await admin.not_ready_reason() == "no worker responds"
        assert admin.requests_in_progress() == 0
        assert not admin.hangs


async def test_each_worker_is_asked_in_turn_and_alone_if_it_replies_at_once() -> None:
    asked: list[str] = []

    def says(name: str) -> Responder:
        async def respond(question: Question, connection: object) -> str:
            asked.append(name)
            return name

        return respond

    async with _admin(*map(says, "abc")) as admin:
        said = [await admin.not_ready_reason() for _ in range(6)]
    assert sorted(asked) == sorted(said) == ["a", "a", "b", "b", "c", "c"]


def _publish(admin: AdminSource, slot: int, **fields: Any) -> None:
    status = worker_status(**fields)
    encoded = json.dumps({**status, "model_lists": []}).encode()
    assert admin.shared.statuses.publish(slot, encoded)


async def test_statuses_are_those_of_living_workers_that_were_just_asked() -> None:
    asked: list[Question] = []

    async def respond(question: Question, connection: object) -> str:
        asked.append(question)
        _publish(admin, 0, connections=len(asked))
        return ""

    async with _admin(respond, _hang, alive=1) as admin:
        _publish(admin, 1, pid=DEAD)
        for number in (1, 2, 3):
            (status,) = await admin.worker_statuses()
            assert status["connections"] == number
        assert asked == [Question.PUBLISH] * 3


async def test_statuses_of_before_are_shown_once_all_workers_have_died() -> None:
    async with _admin(_says(""), alive=0) as admin:
        _publish(admin, 0, pid=DEAD, connections=7)
        for _ in range(2):  # also if they died before they were first asked
            statuses = await admin.worker_statuses()
            assert merge_statuses(statuses, admin.metric_store)["connections"] == 7
        admin.draining = True
        assert [each["draining"] for each in await admin.worker_statuses()] == [True]


async def test_captured_call_goes_to_the_next_worker_if_one_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker that hangs has a duplicate of the socket for what is captured."""
    monkeypatch.setattr(admin_source, "CONNECT_TIMEOUT", 0.05)
    taken: list[socket.socket] = []

    async def hang(question: Question, connection: socket.socket | None) -> str:
        assert connection is not None
        taken.append(connection)
        return await _hang(question, connection)

    async with (
        ScriptedServer(always_respond(http_response(b"[]"))) as server,
        running_gateway(server.url) as gateway,
        _admin(hang, gateway.gateway.reply) as admin,
    ):
        call = UpstreamRequest("GET", "/v2/models/m/ready", CIMultiDict())
        made = await make_captured_call(admin, call, 100)
        assert (made.reply.status, made.reply.body) == (200, b"[]")
        assert [each["endpoint"] for each in made.attempts] == [server.url]
        # The one that hung goes on: the call is not its own any more.
        (late,) = taken
        await gateway.gateway.reply(Question.CAPTURE, late)
        assert late.fileno() == -1


async def test_captured_call_without_a_worker_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin_source, "CONNECT_TIMEOUT", 0.02)
    async with _admin(_says(""), alive=0) as admin:
        with pytest.raises(TimeoutError):
            await admin.connect_captured(skips_conversion=False)


@asynccontextmanager
async def _gateway(
    tmp_path: Path, more: str = "", fast: bool = False, workers: int = 2, of_admin: str = ""
) -> AsyncIterator[tuple[Process, str, str, Path]]:
    """Run a gateway of some workers; yield it, where it listens, its admin address and file."""
    admin, file = free_address(), tmp_path / "gateway.yaml"
    async with ScriptedServer() as server:
        text = f"workers: {workers}\nadmin: {{listen: {admin}{of_admin}}}\n{more}"
        config = write_settings(file, server.url, more=text)
        command = {"command": FAST_FILE_WATCH} if fast else {}
        async with gateway_process(config, **command) as (process, url):  # type: ignore[arg-type]
            await process.wait_for_output(r"listening on http://\S+ \(admin\)")
            yield process, url, admin, file


async def _admin_pid(process: Process, admin: str) -> int:
    workers = {each["pid"] for each in (await Operator(admin).status())["workers"]}
    (pid,) = set(process.children) - workers
    return pid


async def _until_served(admin: str) -> None:
    async with asyncio.timeout(TIMEOUT):
        while True:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                async with connect(f"http://{admin}") as client:
                    if (await client.call("GET", "/ready")).status == 200:
                        return
            await asyncio.sleep(0.02)


async def _until_recent(admin: str) -> None:
    """Wait until calls are shown: workers describe them once a second."""
    async with connect(f"http://{admin}") as client, asyncio.timeout(TIMEOUT):
        while True:
            response = await client.call("GET", "/api/calls?limit=1", headers=LOCAL)
            if response.json["calls"]:
                return
            await asyncio.sleep(0.05)


@in_processes
async def test_killed_admin_process_is_replaced_and_no_call_is_lost(tmp_path: Path) -> None:
    async with _gateway(tmp_path) as (process, url, admin, _):
        async with connect(url) as caller:
            calls = 0
            for _ in range(2):
                async with connect(f"http://{admin}") as client:
                    await client.send(request("GET", "/api/events", headers=LOCAL))
                    await client.head()
                    os.kill(await _admin_pid(process, admin), signal.SIGKILL)
                    with suppress(ConnectionResetError, asyncio.IncompleteReadError):
                        while await client.chunk():
                            pass
                served = asyncio.create_task(_until_served(admin))
                while not served.done():
                    assert (await caller.ask(CALL)).status == 200
                    calls += 1
                await served
                await Operator(admin).until_counted(calls)
                await _until_recent(admin)
        async with connect(f"http://{admin}") as client:
            events = (await client.call("GET", "/api/journal", headers=LOCAL)).json["events"]
            metrics = (await client.call("GET", "/metrics")).body.decode()
        kinds = [each["kind"] for each in events]
        assert kinds.count("worker_ended") == kinds.count("worker_restarted") == 2
        assert kinds[-1] == "gateway_started"
        assert "tensorgate_worker_restarts_total 0.0" in metrics  # it is no worker
        process.signal(signal.SIGTERM)
        await process.wait_for_output("stopping")


@in_processes
async def test_killed_workers_are_replaced_while_the_pages_are_served(tmp_path: Path) -> None:
    async with _gateway(tmp_path) as (process, url, admin, _):
        operator = Operator(admin)
        pid = await _admin_pid(process, admin)
        async with connect(f"http://{admin}") as client, connect(url) as caller:
            assert (await caller.ask(CALL)).status == 200
            killed = {each["pid"] for each in (await operator.status())["workers"]}
            for worker in killed:
                os.kill(worker, signal.SIGKILL)
            for path in ("/status", "/metrics", "/live", "/api/overview", "/api/calls"):
                response = await client.call("GET", path, headers=LOCAL)
                assert response.status == 200
            assert (await client.call("GET", "/ready")).status in (200, 503)
            await operator.until_status(
                lambda status: (
                    len(status["workers"]) == 2
                    and killed.isdisjoint(each["pid"] for each in status["workers"])
                )
            )
        await _until_served(admin)
        assert await _admin_pid(process, admin) == pid
        async with connect(url) as caller:
            assert (await caller.ask(CALL)).status == 200
        await operator.until_counted(2)


@in_processes
async def test_worker_that_hangs_is_told_of_and_pages_are_served(tmp_path: Path) -> None:
    async with _gateway(tmp_path) as (_, _, admin, _):
        operator = Operator(admin)
        one, other = [each["pid"] for each in (await operator.status())["workers"]]
        os.kill(one, signal.SIGSTOP)
        try:
            for _ in range(4):
                async with connect(f"http://{admin}") as client:
                    assert (await client.call("GET", "/ready")).status == 200
            await operator.until_status(
                lambda status: (
                    {each["pid"]: each["seconds_since_update"] > 2 for each in status["workers"]}
                    == {one: True, other: False}
                )
            )
            os.kill(other, signal.SIGSTOP)
            async with connect(f"http://{admin}") as client:
                response = await client.call("GET", "/ready")
                assert (response.status, response.error) == (503, "not ready: no worker responds")
                assert (await client.call("GET", "/metrics")).status == 200
        finally:
            os.kill(one, signal.SIGCONT)
            os.kill(other, signal.SIGCONT)
        await _until_served(admin)
        await operator.until_status(
            lambda status: all(each["seconds_since_update"] < 2 for each in status["workers"])
        )


@in_processes
async def test_operator_tries_calls_at_any_worker(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("token-of-operators-0123456789abcdef\n")
    more = f"api_keys: {{operators: {{file: {keys}}}}}\n"
    of_admin = ", keys: operators, payloads: true"
    headers = {
        **LOCAL,
        "Authorization": "Bearer token-of-operators-0123456789abcdef",
        "Content-Type": "application/json",
    }
    tensor = {"name": "x", "datatype": "FP32", "shape": [4], "fill": "ones"}
    body = json.dumps({"model": "m", "form": "binary", "inputs": [tensor]}).encode()
    async with _gateway(tmp_path, more, of_admin=of_admin) as (_, _, admin, _):
        operator = Operator(admin)
        for each in [worker["pid"] for worker in (await operator.status())["workers"]]:
            os.kill(each, signal.SIGSTOP)
            try:
                async with connect(f"http://{admin}") as client:
                    response = await client.call("POST", "/api/try", body, headers)
            finally:
                os.kill(each, signal.SIGCONT)
            assert response.status == 200
            (attempt,) = response.json["attempts"]
            assert attempt["upstream"] == "demo"
            assert attempt["request"]["size"] > 16
        await operator.until_counted(2)


@in_processes
async def test_reload_adds_moves_and_removes_the_admin_address(tmp_path: Path) -> None:
    async with _gateway(tmp_path, fast=True) as (process, _, admin, file):
        text = file.read_text()
        moved = free_address()
        for address in (moved, None, admin):
            process.said = ""
            line = f"admin: {address}\n" if address else ""
            file.write_text(text.replace(f"admin: {{listen: {admin}}}\n", line))
            await process.wait_for_output("settings reloaded")
            if address:
                await _until_served(address)
                assert len((await Operator(address).status())["workers"]) == 2
            for other in {admin, moved} - {address}:
                await _until_refused(other)
            if not address:
                await until(lambda: len(process.children) == 2, TIMEOUT)


async def _until_refused(address: str) -> None:
    async with asyncio.timeout(TIMEOUT):
        while True:
            try:
                async with connect(f"http://{address}"):
                    await asyncio.sleep(0.02)
            except ConnectionRefusedError:
                return
