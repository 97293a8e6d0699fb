"""Failing endpoints in the status, the metrics and the log."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.app import gateway as gateway_module
from gateway.observe.failure_log import FailureLog
from gateway.proxy import errors
from gateway.settings.schema import Settings
from tests.support.addresses import free_address, free_port
from tests.support.gateway import LIMITS, gateway_of, no_leaks, until
from tests.support.http_messages import http_response
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import ScriptedServer, respond_in_turn


@pytest.fixture(autouse=True)
def failure_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with a log of failures that has said nothing: it is one for the process."""
    log = FailureLog()
    for module in (errors, gateway_module):
        monkeypatch.setattr(module, "FAILURE_LOG", log)


BROKEN = http_response(b'{"error": "out of memory"}', status="500 Internal Server Error")


@asynccontextmanager
async def _serving(*urls: str, **upstream: Any) -> AsyncIterator[tuple[RawClient, RawClient]]:
    """Yield a client and an operator of a gateway in front of these servers."""
    settings = Settings.model_validate(
        {
            "listen": "127.0.0.1:0",
            "admin": free_address(),
            "upstreams": {"u": {"endpoints": list(urls), "dialect": "triton"} | upstream},
            "limits": LIMITS,
        }
    )
    async with (
        no_leaks(),
        gateway_of(settings) as gateway,
        connect(gateway.addresses[0]) as client,
        connect(f"http://{settings.admin.listen}") as operator,
    ):
        yield client, operator


async def _status_of(operator: RawClient, number: int = 0) -> dict[str, Any]:
    status = (await operator.call("GET", "/status")).json
    endpoint = status["upstreams"]["u"]["endpoints"][number]
    assert isinstance(endpoint, dict)
    return endpoint


async def _metric(operator: RawClient, name: str) -> list[float]:
    text = (await operator.call("GET", "/metrics")).body.decode()
    families = text_string_to_metric_families(text)
    return [sample.value for each in families for sample in each.samples if sample.name == name]


async def test_status_shows_an_unreachable_endpoint_that_is_the_only_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    why = f"cannot connect to {url}: Connection refused"
    async with _serving(url) as (client, operator):
        for _ in range(4):
            assert (await client.call("GET", "/v2/x")).status == 503
        endpoint = await _status_of(operator)
        assert (endpoint["consecutive_failures"], endpoint["failures_total"]) == (4, 4)
        assert (endpoint["failures"], endpoint["last_error"]) == ({"unreachable": 4}, why)
        assert endpoint["last_error_at"]
        upstream = (await operator.call("GET", "/status")).json["upstreams"]["u"]
        assert (upstream["healthy"], upstream["unreachable_reason"]) == (False, why)
        assert await _metric(operator, "tensorgate_endpoint_failures_total") == [4]
        reply = await operator.call("GET", "/ready")
        assert (reply.status, reply.error) == (503, f"not ready: upstream u ({why})")
        reply = await client.call("GET", "/v2/health/ready")
        assert (reply.status, reply.error) == (503, "not ready: upstream u")
    assert sum("failed with 503" in message for message in caplog.messages) == 1
    assert sum("upstream u is not ready: 3 calls" in message for message in caplog.messages) == 1
    assert [each.levelname for each in caplog.records if why in each.message] == ["WARNING"] * 2


@pytest.mark.parametrize("is_over", [True, False], ids=["ten seconds later", "at the stop"])
async def test_number_of_failures_that_are_not_logged_is_written_without_another_one(
    is_over: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    log = FailureLog(lambda: now[0])
    for module in (errors, gateway_module):
        monkeypatch.setattr(module, "FAILURE_LOG", log)
    said = "3 more calls failed within 10 s"
    async with _serving(f"http://127.0.0.1:{free_port()}") as (client, _):
        for _ in range(4):
            assert (await client.call("GET", "/v2/x")).status == 503
        assert said not in caplog.messages
        if is_over:
            now[0] += 10
            await until(lambda: said in caplog.messages)
    assert caplog.messages.count(said) == 1


async def test_responses_with_500_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        ScriptedServer(respond_in_turn(*(BROKEN,) * 4, http_response(), http_response())) as server,
        _serving(server.url) as (client, operator),
    ):
        for _ in range(4):
            assert (await client.call("GET", "/v2/models/m/ready")).status == 500
        endpoint = await _status_of(operator)
        assert (endpoint["consecutive_failures"], endpoint["failures_total"]) == (4, 4)
        assert (endpoint["failures"], endpoint["last_error"]) == (
            {"5xx": 4},
            "it returned 500: out of memory",
        )
        assert endpoint["calls_total"] == 4
        assert endpoint["state"] == "failing"
        assert await _metric(operator, "tensorgate_endpoint_failures_total") == [4]
        assert (await client.call("GET", "/v2/models/m/ready")).status == 200
        endpoint = await _status_of(operator)
        assert (endpoint["consecutive_failures"], endpoint["failures_total"]) == (0, 4)
    warnings = [each for each in caplog.records if each.levelname == "WARNING"]
    # The state of the endpoint may have its line already.
    (said,) = [each.message for each in warnings if "failed with 500" in each.message]
    assert f"failed with 500: {server.url} returned 500: out of memory" in said
