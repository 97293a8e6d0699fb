"""Who may do what at the admin address, and the calls that it makes to the gateway itself."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from multidict import CIMultiDict

from gateway.admin import own_calls, security
from gateway.admin.own_calls import (
    CapturedCall,
    OwnCallError,
    call_for_document,
    make_captured_call,
)
from gateway.settings.sections import Admin
from gateway.upstream.transport import UpstreamRequest
from tests.admin.site import KEY, URL, ChosenSource, RunningSite, running_site
from tests.support.gateway import no_leaks, until
from tests.support.http_messages import http_response, request
from tests.support.raw_client import RawClient, ReceivedResponse
from tests.support.servers.scripted_server import (
    Connection,
    ReceivedRequest,
    Script,
    never_respond,
    respond_in_turn,
)

ENDPOINT = {"upstream": "u", "endpoint": URL}
PATHS = {
    "/api/endpoints/drain": ENDPOINT,
    "/api/endpoints/restore": ENDPOINT,
    "/api/model/trace": {"name": "m", "settings": {"trace_rate": "1"}},
}
HEADERS = {
    "Host": "localhost",
    "Content-Type": "application/json",
    "Authorization": f"Bearer {KEY}",
}


def _source() -> ChosenSource:
    source = ChosenSource()
    source.settings = source.settings.model_copy(
        update={"admin": Admin(actions=True, keys="operators")}
    )
    return source


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningSite]:
    monkeypatch.setattr(security, "WRONG_KEY_DELAY", 0.001)
    async with no_leaks(), running_site(_source()) as running:
        yield running


@pytest.fixture
async def client(site: RunningSite) -> AsyncIterator[RawClient]:
    async with site.client() as client:
        yield client


async def _post(
    client: RawClient, path: str, body: object, headers: dict[str, str] | None = None
) -> ReceivedResponse:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await client.call("POST", path, data, HEADERS if headers is None else headers)


async def test_endpoint_is_drained_and_restored(
    site: RunningSite, client: RawClient, caplog: pytest.LogCaptureFixture
) -> None:
    response = await _post(client, "/api/endpoints/drain", ENDPOINT)
    assert (response.status, response.json) == (200, {"ok": True})
    assert site.source.drained == {("u", URL)}
    assert (await _post(client, "/api/endpoints/restore", ENDPOINT)).status == 200
    assert site.source.drained == set()
    assert [each.split(" ", 3)[3] for each in caplog.messages] == [
        f"drained {URL} of u",
        f"restored {URL} of u",
    ]


@pytest.mark.parametrize(("upstream", "url"), [("u", "http://other:1"), ("none", URL)])
async def test_unknown_endpoint_is_not_drained(
    site: RunningSite, client: RawClient, upstream: str, url: str
) -> None:
    body = {"upstream": upstream, "endpoint": url}
    response = await _post(client, "/api/endpoints/drain", body)
    assert (response.status, response.error) == (404, f"{upstream} has no endpoint {url}")
    assert site.source.drained == set()
    # It may be gone since, and is restored all the same.
    assert (await _post(client, "/api/endpoints/restore", body)).status == 200


@pytest.mark.parametrize("path", PATHS)
async def test_actions_need_the_key(site: RunningSite, client: RawClient, path: str) -> None:
    for key in (None, "Bearer wrong", KEY, ""):
        headers = {name: value for name, value in HEADERS.items() if name != "Authorization"}
        if key is not None:
            headers["Authorization"] = key
        response = await _post(client, path, PATHS[path], headers)
        assert response.status == 401
    assert site.source.drained == set()


@pytest.mark.parametrize("path", PATHS)
async def test_actions_have_to_be_allowed(path: str) -> None:
    async with running_site() as site, site.client() as client:
        response = await _post(client, path, PATHS[path])
        assert response.status == 403
        assert response.error == "actions are not allowed here (admin.actions)"
        assert site.source.drained == set()


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Origin": "http://localhost"}, 200),
    ],
)
async def test_pages_of_others_cannot_act(
    site: RunningSite, client: RawClient, more: dict[str, str], status: int
) -> None:
    response = await _post(client, "/api/endpoints/drain", ENDPOINT, {**HEADERS, **more})
    assert response.status == status
    assert bool(site.source.drained) == (status == 200)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "the body: Invalid JSON"),
        (b"\xff", "the body: Invalid JSON"),
        (b"[" * 2000, "the body: Invalid JSON: recursion limit exceeded"),
        ([], "the body: Input should be an object"),
        ({"upstream": "u"}, "endpoint: Field required"),
        ({"upstream": 1, "endpoint": URL}, "upstream: Input should be a valid string"),
    ],
    ids=range(6),
)
async def test_body_that_cannot_be_read_is_refused(
    client: RawClient, body: object, error: str
) -> None:
    response = await _post(client, "/api/endpoints/drain", body)
    assert response.status == 400
    assert response.error.startswith(error)


async def test_body_that_is_too_large_is_refused(client: RawClient) -> None:
    response = await _post(client, "/api/endpoints/drain", b" " * (64 * 1024 + 1))
    assert response.status == 413


@pytest.mark.parametrize(
    "coding", [{"Content-Encoding": "gzip"}, {"Transfer-Encoding": "chunked"}], ids=str
)
async def test_body_that_cannot_be_decoded_is_no_error_of_ours(
    client: RawClient, coding: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    path = "/api/endpoints/drain"
    await client.send(request("POST", path, b"zz\r\n", HEADERS | coding))
    assert (await client.head()).status == 400
    assert [each for each in caplog.records if each.exc_info] == []


async def test_names_in_the_log_cannot_write_lines(
    site: RunningSite, client: RawClient, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"upstream": "u\nERROR", "endpoint": "x\r\x1b[31m"}
    assert (await _post(client, "/api/endpoints/restore", body)).status == 200
    (message,) = caplog.messages
    assert message.isprintable()


async def test_trace_settings_that_cannot_be_changed_say_why(client: RawClient) -> None:
    response = await _post(client, "/api/model/trace", PATHS["/api/model/trace"])
    assert (response.status, response.error) == (502, "no worker responds")
    response = await _post(client, "/api/model/trace", {"name": "", "settings": {}})
    assert (response.status, response.error[:6]) == (400, "name: ")


async def test_action_is_logged_though_its_operator_has_left(
    site: RunningSite, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    theirs.setblocking(False)

    async def connect() -> socket.socket:
        return ours

    monkeypatch.setattr(site.source, "connect", connect)
    with theirs:
        async with site.client() as client:
            path = "/api/model/trace"
            await client.send(request("POST", path, json.dumps(PATHS[path]).encode(), HEADERS))
            assert await loop.sock_recv(theirs, 4) == b"POST"
        await until(lambda: not len(site.site._connections))
        await loop.sock_sendall(theirs, http_response(b"{}"))
        await until(lambda: caplog.messages)
    assert "changed the trace settings of m" in caplog.text


@pytest.mark.parametrize("settings", [[], "a", {"trace_rate": {}}, {"trace_level": [["x"]]}])
async def test_trace_settings_that_no_server_has_are_refused(
    client: RawClient, settings: object
) -> None:
    response = await _post(client, "/api/model/trace", {"name": "m", "settings": settings})
    assert (response.status, response.error[:8]) == (400, "settings")


REQUEST = UpstreamRequest("POST", "/x", CIMultiDict(A="b"), [b"some", memoryview(b"body")])
GRPC = UpstreamRequest("POST", "/s/M", CIMultiDict(), [b"body"], is_grpc=True)
OK = http_response(b"[]")
ATTEMPTS = [{"upstream": "u"}]

Sink = Callable[[socket.socket], Awaitable[None]]


async def _deliver(sink: socket.socket) -> None:
    sink.sendall(json.dumps(ATTEMPTS).encode())
    sink.close()


class _Source(ChosenSource):
    """A gateway that plays a script, and does something with the socket for what is captured."""

    def __init__(self, script: Script, deliver: Sink = _deliver) -> None:
        super().__init__()
        self._script = script
        self._deliver = deliver
        self.tasks: list[asyncio.Task[None]] = []

    async def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.tasks.append(asyncio.create_task(self._serve(theirs, None)))
        return ours

    async def connect_captured(self, skips_conversion: bool) -> tuple[socket.socket, socket.socket]:
        (ours, theirs), (source, sink) = socket.socketpair(), socket.socketpair()
        self.tasks.append(asyncio.create_task(self._serve(theirs, sink)))
        return ours, source

    async def _serve(self, theirs: socket.socket, sink: socket.socket | None) -> None:
        connection = Connection(*await asyncio.open_connection(sock=theirs))
        try:
            await self._script(connection)
            if sink is not None:
                await self._deliver(sink)
            await connection.wait_for_close()
        except ConnectionError:
            pass
        finally:
            await connection.close()
            if sink is not None:
                sink.close()


async def _make(
    script: Script, deliver: Sink = _deliver, request: UpstreamRequest = REQUEST, most: int = 100
) -> CapturedCall:
    source = _Source(script, deliver)
    async with no_leaks():
        try:
            return await make_captured_call(source, request, most)
        finally:
            await asyncio.gather(*source.tasks)


async def test_call_has_the_response_and_what_was_captured() -> None:
    call = await _make(respond_in_turn(OK))
    assert (call.reply.status, call.reply.body, call.attempts) == (200, b"[]", ATTEMPTS)
    described = call.reply.captured.describe()
    assert described["start"] == "HTTP/1.1 200 OK"
    assert ("Content-Type", "application/json") in described["headers"]
    assert described["size"] == 2


@pytest.mark.parametrize("request_", [REQUEST, GRPC], ids=["HTTP", "gRPC"])
async def test_call_that_gets_no_response_in_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch, request_: UpstreamRequest
) -> None:
    monkeypatch.setattr(own_calls, "CAPTURED_TIMEOUT", 0.05)
    with pytest.raises(OwnCallError, match=r"no response within 0\.05 s"):
        await _make(never_respond, request=request_)


async def test_response_that_is_too_large_is_refused() -> None:
    with pytest.raises(OwnCallError, match="the response has more than 1 bytes"):
        await _make(respond_in_turn(OK), most=1)


async def test_gateway_without_workers_is_told() -> None:
    with pytest.raises(OwnCallError, match="no worker responds"):
        await make_captured_call(ChosenSource(), REQUEST, 100)


async def test_call_that_is_cancelled_leaves_nothing_behind() -> None:
    arrived = asyncio.Event()

    async def hang(connection: Connection) -> None:
        await connection.request()
        arrived.set()
        await connection.wait_for_close()

    task = asyncio.create_task(_make(hang))
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("captured", "late"),
    [(b"[1", 0.0), (b"[1" + b" " * 100_000 + b"]", 0.0), (json.dumps(ATTEMPTS).encode(), 0.2)],
    ids=["no JSON", "too much", "late"],
)
async def test_response_counts_even_if_nothing_was_captured(
    monkeypatch: pytest.MonkeyPatch, captured: bytes, late: float
) -> None:
    monkeypatch.setattr(own_calls, "CAPTURE_TIMEOUT", 0.05 if late else 5.0)
    monkeypatch.setattr(own_calls, "MAX_CAPTURE", 50_000)

    async def deliver_late(sink: socket.socket) -> None:
        sink.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(sink, captured)
        await asyncio.sleep(late)
        sink.close()

    call = await _make(respond_in_turn(OK), deliver_late)
    assert (call.reply.status, call.attempts) == (200, [])


async def _ask(script: Script, method: str = "GET", document: object = None) -> Any:
    source = _Source(script)
    async with no_leaks():
        try:
            return await call_for_document(source, method, "/x", document)
        finally:
            await asyncio.gather(*source.tasks)


async def test_own_call_sends_a_document_and_returns_that_of_the_gateway() -> None:
    asked: list[ReceivedRequest] = []

    async def respond(connection: Connection) -> None:
        asked.append(await connection.request())
        await connection.send(http_response(b'{"a": 1}'))

    assert await _ask(respond) == await _ask(respond, "POST", {"b": 2}) == {"a": 1}
    got, posted = asked
    assert (got.head.first, got.body) == ("GET /x HTTP/1.1", b"")
    assert (posted.head.first, posted.body) == ("POST /x HTTP/1.1", b'{"b":2}')
    assert posted.head.get("Content-Type") == "application/json"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (http_response(b'{"error": "no such model"}', status="404 Not Found"), "no such model"),
        (http_response(b"[]", status="503 No"), "the response has the status 503"),
        (http_response(b"{", status="500 No"), "the response has the status 500"),
        (http_response(b"{"), "the response is not JSON"),
        (b"nonsense\r\n\r\n", "no response: "),
        (http_response(b"[]")[:-1], "no response: "),
        (http_response(b" " * (4 * 2**20 + 1)), "the response has more than 4194304 bytes"),
    ],
    ids=range(7),
)
async def test_own_call_that_fails_says_why(data: bytes, error: str) -> None:
    async def respond(connection: Connection) -> None:
        await connection.request()
        await connection.send(data)
        await connection.close()

    with pytest.raises(OwnCallError) as caught:
        await _ask(respond)
    assert str(caught.value).startswith(error)
