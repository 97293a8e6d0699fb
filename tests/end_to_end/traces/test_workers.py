"""All workers are one for operators: spans and counts survive one that is killed."""

from __future__ import annotations

import os
import re
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.addresses import free_address
from tests.support.gateway import until
from tests.support.gateway_process import gateway_process, write_settings
from tests.support.http_messages import http_response, request
from tests.support.operator import Operator
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.support.servers.trace_receiver import SERVER, trace_receiver

CALL = request("GET", "/v2/models/m/ready")
CONNECTIONS, CALLS = 8, 5
ONCE = CONNECTIONS * CALLS


async def _call_all(url: str) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(url)) for _ in range(CONNECTIONS)]
        for _ in range(CALLS):
            for client in clients:
                assert (await client.ask(CALL)).status == 200


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_spans_and_counts_are_those_of_all_workers(protocol: str, tmp_path: Path) -> None:
    admin = free_address()
    with trace_receiver(protocol) as receiver:
        async with ScriptedServer(always_respond(http_response())) as server:
            tracing = f"{{endpoint: '{receiver.endpoint}', protocol: {protocol}}}"
            more = f"admin: {admin}\nworkers: 2\ntracing: {tracing}\n"
            config = write_settings(tmp_path / "gateway.yaml", server.url, more=more)
            async with gateway_process(config) as (process, url):
                await process.wait_for_output(r"listening on http://\S+ \(admin\)")
                await _call_all(url)
                await until(lambda: len(receiver.spans) == 2 * ONCE)
                operator = Operator(admin)
                await operator.until_counted(ONCE)
                victim = await operator.worker()
                os.kill(victim, signal.SIGKILL)
                await process.wait_for_output(f"worker {victim} was killed by SIGKILL")
                await process.wait_for_output(r"worker \d+ is up")
                await operator.until_counted(ONCE)
                await _call_all(url)
                await operator.until_counted(2 * ONCE)
                async with connect(f"http://{admin}") as client:
                    page = (await client.call("GET", "/metrics")).body.decode()
                process.process.send_signal(signal.SIGTERM)
                status, _, err = await process.end()
    assert status == 0
    assert "Traceback" not in err
    assert len([each for each in receiver.spans if each.kind == SERVER]) == 2 * ONCE
    assert len({each.resource["service.instance.id"] for each in receiver.spans}) == 3
    exported = re.search(r"^tensorgate_trace_spans_exported_total (\d+)", page, re.MULTILINE)
    assert exported is not None
    assert int(exported[1]) >= 2 * ONCE
