"""HTTP/2 on the port of HTTP/1.1: streams, their ends, and the end of connections."""

import asyncio

import pytest
from multidict import CIMultiDict

from gateway.errors import bad_request
from gateway.http1.head import MAX_CACHED_HEAD
from gateway.http2.errors import ErrorCode
from gateway.http2.flood_limits import MAX_RESETS, TIME_SLICE_WORK
from gateway.http2.frames import HEADERS, PREFACE, encode_data_header, encode_frame_header
from gateway.http2.session import STREAM_WINDOW
from gateway.listener import http2_connection
from gateway.listener.connection_host import IdleTimeouts
from gateway.listener.http2_connection import MAX_STREAMS, Http2ClientConnection
from gateway.observe.call_record import CallRecord
from gateway.observe.failure_log import LimitedLog
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from tests.listener.running_listener import (
    RunningListener,
    echo,
    read_body,
    respond,
    running_listener,
)
from tests.listener.running_listener import scheme as scheme
from tests.support.doubles.iterations import iterations
from tests.support.gateway import until
from tests.support.http2_client import Http2Client, connect_http2, open_http2
from tests.support.raw_client import connect


def connection_of(running: RunningListener) -> Http2ClientConnection:
    (connection,) = running.listener._connections
    assert isinstance(connection, Http2ClientConnection)
    return connection


async def until_ready(running: RunningListener) -> None:
    """Wait until client and gateway know each other's settings."""

    def is_ready() -> bool:
        connections = running.listener._connections
        return any(
            isinstance(each, Http2ClientConnection) and each.http2.settings_acknowledged
            for each in connections
        )

    await until(is_ready)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log refusals as if there was none before."""
    monkeypatch.setattr(http2_connection, "REFUSAL_LOG", LimitedLog("were refused"))


async def wait_forever(_: ClientRequest, __: ClientResponse) -> None:
    await asyncio.Event().wait()


async def test_preface_may_come_in_pieces() -> None:
    async with running_listener(echo) as running, open_http2(running.url) as client:
        client.writes = False  # nothing may come between the pieces
        client.h2.initiate_connection()
        data = client.h2.data_to_send()
        for start in range(50):
            client.write(data[start : start + 1])
            await iterations(5)  # in which it is read
        client.write(data[50:])
        client.writes = True
        assert (await client.call("GET", "/")).status == 200


async def test_preface_is_accepted_only_as_a_whole_and_at_the_start() -> None:
    async with running_listener(echo) as running:
        for start in (b"PRI / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.1\r\n\r\n", PREFACE):
            async with connect(running.url) as client:
                if start == PREFACE:
                    assert (await client.call("GET", "/")).status == 200
                assert (await client.ask(start)).status == 400
        async with open_http2(running.url) as broken:
            broken.write(PREFACE[:-1] + b"x")
            await broken.until_closed()


async def test_body_without_a_length() -> None:
    async with running_listener(echo) as running, connect_http2(running.url) as client:
        # White space around a value is no part of it.
        stream = client.send_headers("POST", "/", [("x", "\t1 \t")], flush=False)
        await client.send_data(stream, b"complete")
        # All of it came at once, so that its length is known.
        assert (await client.response(stream)).body == b"POST / 8 1 complete"
        stream = client.send_headers("POST", "/")
        await until(lambda: running.listener.requests)
        await client.send_data(stream, b"streamed")
        assert (await client.response(stream)).body == b"POST / None None streamed"


async def test_trailers_and_headers_of_connections() -> None:
    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        await response.start(200, "OK", CIMultiDict({"Connection": "close", "X-Name": "value"}))
        if client.target == "/body":
            await response.write(b"some")
        await response.finish(() if client.target == "/none" else (("Grpc-Status", "0"),))

    async with running_listener(handle) as running, connect_http2(running.url) as client:
        for target, body in (("/body", b"some"), ("/empty", b""), ("/none", b"")):
            reply = await client.call("GET", target)
            assert reply.body == body
            assert reply.trailers == [("grpc-status", "0")] * (target != "/none")
            assert reply.headers_ended_it is (target == "/none")
            assert [name for name, _ in reply.headers] == [":status", "x-name", "server", "date"]


async def test_calls_of_a_connection_never_see_headers_of_each_other() -> None:
    async def tell_headers(client: ClientRequest, response: ClientResponse) -> None:
        await read_body(client)
        told = [f"{name.lower()}: {value}" for name, value in client.headers.items()]
        await respond(response, "\n".join(told).encode("latin-1"))

    lists: list[list[tuple[str, str]]] = [
        [],
        [("traceparent", "00-1")],
        [("traceparent", "00-2"), ("x-request-id", "a")],
        [("x-request-id", "b"), ("traceparent", "00-3")],
        [("traceparent", "00-4"), ("traceparent", "00-5")],
        [("traceparent", "x" * 5000)],
        [("traceparent", " 00-6\t"), ("x-own", "1")],
        [("traceparent", "00-7"), ("x-own", "2"), ("cookie", "a"), ("cookie", "b")],
    ]
    bodies = None, b"1", b"22"
    async with running_listener(tell_headers) as running, connect_http2(running.url) as client:
        for _ in range(3):
            for body in bodies:
                for headers in lists:
                    sent = [f"{name}: {value.strip()}" for name, value in headers]
                    length = [f"content-length: {len(body)}"] if body else []
                    told = (await client.call("POST", "/", body, headers)).body.decode().split("\n")
                    if "cookie: a" in sent:
                        sent[-2:] = ["cookie: a; b"]
                    assert told == ["host: localhost", *sent, *length]


async def test_connection_keeps_few_heads_whatever_its_client_sends() -> None:
    async with running_listener(echo) as running, connect_http2(running.url) as client:
        for number in range(100):
            headers = [("x", f"{number}"), ("x-long", "y" * 30 * number), ("traceparent", "00-1")]
            assert (await client.call("GET", "/", None, headers)).status == 200
            heads = connection_of(running)._heads
            assert 0 < len(heads) <= 8
            assert all(len(head.passed) < MAX_CACHED_HEAD for head in heads.values())


async def test_broken_requests_are_refused_between_those_of_a_cached_head() -> None:
    async with running_listener(echo) as running, connect_http2(running.url) as client:
        for _ in range(3):
            assert (await client.call("POST", "/", b"a", [("traceparent", "00-1")])).status == 200
            for headers in (
                [("traceparent", "00-1\0")],
                [("traceparent", "00-1"), ("connection", "close")],
                [("content-length", "2"), ("traceparent", "00-1")],
            ):
                reply = await client.call("POST", "/", b"a", headers)
                assert reply.reset == ErrorCode.PROTOCOL_ERROR


async def test_headers_are_sent_before_the_body_is_known() -> None:
    async def handle(_: ClientRequest, response: ClientResponse) -> None:
        await response.start(200, "OK", CIMultiDict())
        await go_on.wait()
        await response.write(b"late")
        await response.finish()

    go_on = asyncio.Event()
    async with running_listener(handle) as running, connect_http2(running.url) as client:
        stream = await client.start("GET", "/")
        await client.until(lambda: client.replies[stream].status == 200)
        go_on.set()
        assert (await client.response(stream)).body == b"late"


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_head_and_204_have_no_body(method: str) -> None:
    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        status = 200 if client.method == "HEAD" else 204
        await response.send(status, "", CIMultiDict(), b"body")

    async with running_listener(handle) as running, connect_http2(running.url) as client:
        reply = await client.call(method, "/")
        assert reply.status == (200 if method == "HEAD" else 204)
        assert reply.body == b""
        assert reply.get("content-length") == ("4" if method == "HEAD" else None)


async def test_expect_100_continue() -> None:
    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if client.target == "/refused":
            raise bad_request("no")
        await echo(client, response)

    async with running_listener(handle) as running, connect_http2(running.url) as client:
        expect = [("expect", "100-continue"), ("content-length", "2")]
        stream = client.send_headers("POST", "/", expect)
        await client.until(lambda: client.replies[stream].interim == ["100"])
        await client.send_data(stream, b"ab")
        assert (await client.response(stream)).body == b"POST / 2 None ab"
        stream = client.send_headers("POST", "/refused", expect)
        reply = await client.response(stream)
        assert (reply.status, reply.interim) == (400, [])


async def test_reset_cancels_the_call_and_a_lost_connection_all() -> None:
    records: list[CallRecord] = []
    async with (
        running_listener(wait_forever, records.append) as running,
        connect_http2(running.url) as client,
    ):
        streams = [await client.start("GET", f"/{number}") for number in range(3)]
        await until(lambda: running.listener.requests == 3)
        client.reset_stream(streams[1])
        await until(lambda: running.listener.requests == 2)
        (record,) = records
        assert (record.target, record.status) == ("/1", 0)
        assert record.error == "the client reset the stream: CANCEL"
        client.ping()
        await client.until(lambda: client.pings)
        client.reset()
        await until(lambda: not running.listener._connections)
    assert [record.error for record in records[1:]] == ["the client closed the connection"] * 2


async def test_request_that_is_reset_at_once_never_starts() -> None:
    started: list[str] = []
    records: list[CallRecord] = []

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        started.append(client.target)
        await respond(response, b"")

    async with (
        running_listener(handle, records.append) as running,
        connect_http2(running.url) as client,
    ):
        await client.call("GET", "/first")
        stream = client.send_headers("GET", "/reset", end_stream=True, flush=False)
        client.reset_stream(stream)
        await client.call("GET", "/last")
    assert started == ["/first", "/last"]
    assert [record.target for record in records] == ["/first", "/reset", "/last"]
    assert records[1].error


@pytest.mark.parametrize("sent", ["nothing", "a start that waits", "a start", "an end"])
async def test_failing_handler_ends_its_stream_alone(
    sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if client.target == "/ok":
            await respond(response, b"ok")
            return
        if sent != "nothing":
            await response.start(200, "", CIMultiDict())
        if sent in ("a start", "an end"):
            await response.write(b"begun")
        if sent == "an end":
            response.abort()
        else:
            raise ZeroDivisionError

    async with running_listener(handle) as running, connect_http2(running.url) as client:
        reply = await client.call("GET", "/")
        is_reset = sent in ("a start", "an end")
        assert (reply.reset == ErrorCode.INTERNAL_ERROR) if is_reset else (reply.status == 500)
        assert (await client.call("GET", "/ok")).body == b"ok"
    assert ("failed" in caplog.text) is (sent != "an end")


async def test_body_that_does_not_have_its_length_ends_the_call() -> None:
    records: list[CallRecord] = []

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        await read_body(client)
        await respond(response, b"")

    async with (
        running_listener(handle, records.append) as running,
        connect_http2(running.url) as client,
    ):
        # The h2 package checks it, too.
        stream = client.send_headers("POST", "/", [("content-length", "3")])
        await until(lambda: running.listener.requests)
        client.write(encode_frame_header(0, 1, stream, 2) + b"ab")
        assert (await client.response(stream)).reset == ErrorCode.PROTOCOL_ERROR
        await until(lambda: records)
        assert "the body does not have its Content-Length" in records[0].error
        assert (await client.call("GET", "/")).status == 200


async def test_malformed_requests_get_400_and_too_large_ones_431() -> None:
    records: list[CallRecord] = []
    async with (
        running_listener(echo, records.append) as running,
        connect_http2(running.url) as client,
    ):
        many = [("x", "y")] * 200
        reply = await client.call("GET", "/", None, many)
        assert reply.status == 400
        assert reply.json == {"error": "malformed HTTP request: more than 128 headers"}
        reply = await client.call("HEAD", "/", None, many)
        assert (reply.status, reply.body) == (400, b"")
        assert (await client.call("NONE", "/")).status == 400
        for count, status in ((18, 431), (10, 200)):  # 64 KiB are between them
            reply = await client.call("GET", "/", None, [("x", "x" * 3900)] * count)
            assert reply.status == status
    assert [(record.method, record.status) for record in records[:3]] == [("-", 400)] * 3


async def test_errors_of_streams_and_connections_are_logged_and_recorded(
    caplog: pytest.LogCaptureFixture, refusals: None
) -> None:
    records: list[CallRecord] = []
    async with running_listener(wait_forever, records.append) as running:
        async with connect_http2(running.url) as client:
            malformed = client.send_headers("GET", "/", [("x-a", "a\0b")], end_stream=True)
            assert (await client.response(malformed)).reset == ErrorCode.PROTOCOL_ERROR
            await client.start("GET", "/")
            await until(lambda: running.listener.requests)
            client.write(encode_frame_header(6, 0, 0, 3) + b"abc")  # a PING of 3 bytes
            await client.until_closed()
            ((_, code, reason),) = client.goaways
            assert code == ErrorCode.FRAME_SIZE_ERROR
            assert b"PING of 3 bytes" in reason
        await until(lambda: not running.listener._connections)
    (record,) = records
    assert record.error == "the client broke HTTP/2: PING of 3 bytes (FRAME_SIZE_ERROR)"
    of_stream, of_connection = caplog.messages
    assert of_stream.startswith("HTTP/2 stream of 127.0.0.1 closed: malformed headers: ")
    assert of_stream.endswith("(PROTOCOL_ERROR)")
    assert of_connection.endswith("closed: PING of 3 bytes (FRAME_SIZE_ERROR)")


# Slow readers and writers


async def test_response_waits_for_a_client_that_does_not_read() -> None:
    sent: list[int] = []

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        await response.start(200, "", CIMultiDict())
        if client.target == "/small":
            await response.write(bytes(9))
            await response.finish()
            return
        for _number in range(100):
            await response.write(bytes(10_000))
            sent.append(10_000)
        await response.finish()

    async with running_listener(handle) as running, connect_http2(running.url) as client:
        client.reads = False
        stream = await client.start("GET", "/")
        await client.until(lambda: len(client.replies[stream].body) == 65_535)
        assert sum(sent) < 70_000
        client.open_window(100)  # others need not wait for it
        assert len((await client.call("GET", "/small")).body) == 9
        client.open_window(2_000_000)
        client.open_window(2_000_000, stream)
        assert len((await client.response(stream)).body) == 1_000_000


async def test_responses_that_clients_do_not_read_count_as_buffered() -> None:
    """Each of hundreds of streams can hold a piece of its response."""
    size = 50_000

    async def handle(_: ClientRequest, response: ClientResponse) -> None:
        await response.start(200, "", CIMultiDict({"Content-Length": str(size)}))
        await response.write(bytes(size))
        await response.finish()

    async with (
        running_listener(handle) as running,
        connect_http2(running.url, initial_window_size=0) as client,
    ):
        buffers = running.listener.buffers
        streams = [await client.start("GET", "/") for _ in range(3)]
        await until(lambda: buffers.buffered >= 3 * size)
        client.open_window(size, streams[0])
        assert len((await client.response(streams[0])).body) == size
        assert buffers.buffered == 2 * size
        client.reset_stream(streams[1])
        await until(lambda: buffers.buffered == size)
        await client.close()
        await until(lambda: not running.listener.requests)
        assert buffers.buffered == 0


async def test_unread_body_is_limited_by_its_window() -> None:
    async with running_listener(wait_forever) as running, connect_http2(running.url) as client:
        await until_ready(running)
        stream = client.send_headers("POST", "/")
        sending = asyncio.create_task(client.send_data(stream, bytes(1_000_000)))
        await until(lambda: running.listener.buffers.buffered >= STREAM_WINDOW)
        await iterations(20)
        assert running.listener.buffers.buffered < STREAM_WINDOW + 4096  # tiny pieces count more
        client.reset_stream(stream)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: not running.listener.requests)
        assert running.listener.buffers.buffered == 0
        assert running.listener.buffers.streams == 0


# The end of connections


async def test_drain_announces_itself_and_finishes_calls() -> None:
    go_on = asyncio.Event()

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        await go_on.wait()
        await echo(client, response)

    async with running_listener(handle) as running, connect_http2(running.url) as client:
        first = await client.start("GET", "/first")
        await until(lambda: running.listener.requests == 1)
        drain = asyncio.create_task(running.listener.drain(5, 0.1))
        await client.until(lambda: client.goaways)
        assert client.goaways == [(2**31 - 1, 0, b"")]
        # The client did not know yet.
        second = await client.start("GET", "/second")
        await until(lambda: running.listener.requests == 2)
        await until(lambda: connection_of(running)._shut_down)
        go_on.set()
        assert (await client.response(first)).status == 200
        assert (await client.response(second)).status == 200
        await client.until_closed()
        assert client.goaways[1] == (second, 0, b"")
        assert await drain == 0


@pytest.mark.parametrize("has_started", [False, True])
async def test_drain_ends_calls_that_take_too_long_and_those_of_grpc_with_unavailable(
    has_started: bool,
) -> None:
    records: list[CallRecord] = []

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if has_started:
            await response.start(200, "", CIMultiDict({"Content-Type": "application/grpc"}))
            await response.write(b"\0\0\0\0\1a")
        await asyncio.Event().wait()

    async with (
        running_listener(handle, records.append) as running,
        connect_http2(running.url) as client,
    ):
        headers = [("content-type", "application/grpc"), ("te", "trailers")]
        streams = [client.send_headers("POST", "/a.b/c", headers, end_stream=True)]
        streams.append(client.send_headers("POST", "/a.b/c", headers))  # it may send more
        await until(lambda: running.listener.requests == 2)
        plain = await client.start("GET", "/")
        await until(lambda: running.listener.requests == 3)
        if has_started:
            await client.until(lambda: all(each.body for each in client.replies.values()))
        assert await running.listener.drain(0.02, 0) == 3
        await client.until_closed()
        for each in streams:
            reply = client.replies[each]
            fields = dict(reply.trailers if has_started else reply.headers)
            assert fields["grpc-status"] == "14"
            assert fields["grpc-message"] == records[0].error
            assert reply.headers[0] == (":status", "200")
            assert reply.ended
            assert reply.headers_ended_it is not has_started
            assert reply.reset in (None, ErrorCode.NO_ERROR)
        assert client.replies[plain].reset == ErrorCode.INTERNAL_ERROR
    reason = "the gateway stopped before the call ended (limits.drain_timeout)"
    assert {each.error for each in records} == {reason}
    assert [(each.status, each.grpc_status) for each in records[:2]] == [(503, 14)] * 2


@pytest.mark.parametrize("is_known", [False, True])
async def test_settings_and_header_blocks_must_arrive_in_time(is_known: bool) -> None:
    async with running_listener(echo) as running:
        running.listener.idle_timeouts = IdleTimeouts(request_header_timeout=0.05)
        async with open_http2(running.url) as client:
            client.h2.initiate_connection()
            if is_known:
                client.flush()
                await until_ready(running)
                client.write(encode_frame_header(6, 0, 0, 8) + b"1234")
                connection = connection_of(running)
                await until(lambda: connection._partial_since)
                client.write(b"5678")
                await until(lambda: not connection._partial_since)  # it is waited for no more
                client.write(encode_frame_header(HEADERS, 0, 1, 1) + b"\x82")
            else:
                client.write(PREFACE + encode_frame_header(4, 0, 0, 0))
                client.writes = False
            await client.until_closed()
            ((_, code, _),) = client.goaways
            wanted = ErrorCode.ENHANCE_YOUR_CALM if is_known else ErrorCode.SETTINGS_TIMEOUT
            assert code == wanted


# Attacks


async def test_rapid_reset_ends_the_connection() -> None:
    records: list[CallRecord] = []
    async with (
        running_listener(wait_forever, records.append) as running,
        connect_http2(running.url) as client,
    ):
        await until_ready(running)
        # The time since the connection began allows up to as many again, once.
        for _ in range(3 * MAX_RESETS):
            stream = client.send_headers("GET", "/", end_stream=True, flush=False)
            client.h2.reset_stream(stream, 8)
        client.flush()
        await client.until_closed()
        assert client.goaways[0][1] == ErrorCode.ENHANCE_YOUR_CALM
        await until(lambda: not running.listener.requests)
    assert MAX_RESETS <= len(records) < 3 * MAX_RESETS


async def test_innocent_client_is_served_before_a_flood_is_through() -> None:
    """Tiny frames for 24 turns, of a request that ends with the last of them."""
    flood = encode_data_header(1, 1, False) + b"x"
    count = 24 * TIME_SLICE_WORK
    ended: list[str] = []
    began = asyncio.Event()

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if client.target == "/flood":
            began.set()
        await echo(client, response)

    async with running_listener(handle) as running:
        async with connect_http2(running.url) as hostile, connect_http2(running.url) as innocent:
            assert (await innocent.call("GET", "/")).status == 200
            stream = hostile.send_headers("POST", "/flood")
            await began.wait()
            hostile.write(flood * count + encode_data_header(1, 0, True))

            async def wait(client: Http2Client, stream_id: int, name: str) -> bytes:
                body = (await client.response(stream_id)).body
                ended.append(name)
                return body

            waiting = asyncio.create_task(wait(hostile, stream, "flood"))
            for _ in range(2):
                await wait(innocent, innocent.send_headers("GET", "/", end_stream=True), "innocent")
            assert await waiting == b"POST /flood None None " + b"x" * count
        assert ended == ["innocent", "innocent", "flood"]
        await until(lambda: not running.listener._connections)
        assert running.listener.buffers.total == 0


async def test_peer_that_never_reads_is_closed_and_memory_stays_bounded() -> None:
    async def handle(_: ClientRequest, response: ClientResponse) -> None:
        await response.start(200, "", CIMultiDict())
        for _number in range(1000):
            await response.write(bytes(60_000))
        await response.finish()

    async with running_listener(handle) as running:
        running.listener.idle_timeouts = IdleTimeouts(idle_timeout=0.2)
        async with connect_http2(running.url, initial_window_size=2**31 - 1) as client:
            client.open_window(2**31 - 1 - 65_535)
            await until_ready(running)
            client.stop_reading()
            for _ in range(MAX_STREAMS):
                client.send_headers("GET", "/", end_stream=True)
            await until(lambda: running.listener.requests == MAX_STREAMS)
            connection = connection_of(running)
            most = 0
            async with asyncio.timeout(5):
                while running.listener._connections:
                    most = max(most, connection.transport.get_write_buffer_size())
                    await iterations(1)
        assert most < 1_000_000
        assert not running.listener.requests
