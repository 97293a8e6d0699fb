"""Attacks on the memory of a gateway, and the gateway under attack."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import HEADER_LENGTH, INFER, binary_response_header, metadata
from tests.support.operator import OperatedGateway, operated_gateway
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer

MIB = 2**20
BUFFERED = 64 * MIB

_NO_PROGRESS = 2.0
"""Seconds without progress after which the gateway has stopped reading."""
_LENGTH = {"Content-Length": "60000000"}


def uploads(size: int, model: str = "m", name: str = "IN") -> dict[str, bytes]:
    """Write a request of some ``size`` bytes in each form, with the name of the model's input."""
    infer = f"/v2/models/{model}/infer"

    def write_json(datatype: str, element: bytes) -> bytes:
        count = size // (len(element) + 1)
        head = f'{{"inputs":[{{"name":"{name}","shape":[{count}],"datatype":"{datatype}","data":['
        return head.encode() + b",".join([element] * count) + b"]}]}"

    floats, strings = write_json("FP32", b"0.12345"), write_json("BYTES", b'"abcdefghij"')
    chunks = chunk(bytes(MIB)) * (size // MIB) + b"0\r\n\r\n"
    chunked = {"Host": "x", "Transfer-Encoding": "chunked", HEADER_LENGTH: "0"}
    instances = b'{"instances":[' + b",".join([b"0.12345"] * (size // 8)) + b"]}"
    return {
        "floats": request("POST", infer, floats),
        "strings": request("POST", infer, strings),
        "V1": request("POST", f"/v1/models/{model}:predict", instances),
        "gzip": request("POST", infer, gzip.compress(strings, 0), {"Content-Encoding": "gzip"}),
        "chunked raw": message(f"POST {infer} HTTP/1.1", chunked, chunks),
        "passed": request("POST", "/v2/x", bytes(size)),
    }


@asynccontextmanager
async def running_gateway(script: Script, folder: Path) -> AsyncIterator[OperatedGateway]:
    """Run a gateway before a server that does as the script says."""
    async with ScriptedServer(script) as server:
        settings = (
            "offload: 0\nlog: {access: false}\n"
            f"upstreams: {{one: {{endpoints: [{server.url}], dialect: triton}}}}\n"
            f"limits: {{max_buffered_bytes: {BUFFERED}, max_buffered_body_bytes: {BUFFERED}}}\n"
        )
        async with operated_gateway(folder, settings) as gateway:
            yield gateway


@asynccontextmanager
async def clients(url: str, count: int, receiving: int = 0) -> AsyncIterator[list[RawClient]]:
    """Open so many connections; ``receiving`` bounds what their kernel takes of a response."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(count):
            sock = socket.socket()
            if receiving:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receiving)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            client = RawClient(*await asyncio.open_connection(sock=sock, limit=4096))
            stack.callback(client.reset)
            opened.append(client)
        yield opened


async def never_reads_inference(connection: Connection) -> None:
    """Answer for the metadata; leave the bodies of other requests where they are."""
    while (await connection.head()).target in ("/v2/models/m", "/v2/models/m/config"):
        await connection.send(http_response(metadata(-1)))
    connection.stop_reading()
    await asyncio.sleep(120)


async def sends_large_responses(connection: Connection) -> None:
    """Answer for the metadata, and other requests with 64 MB."""
    while (await connection.request()).head.target in ("/v2/models/m", "/v2/models/m/config"):
        await connection.send(http_response(metadata(-1)))
    connection.requests.clear()  # they are large
    size = 64_000_000
    header = binary_response_header(size)
    head = {HEADER_LENGTH: str(len(header)), "Content-Length": str(len(header) + size)}
    await connection.send(message("HTTP/1.1 200 OK", head, header))
    for _ in range(64):
        await connection.send(bytes(1_000_000))


async def _send_all(client: RawClient, data: bytes, patience: float = _NO_PROGRESS) -> None:
    """Send data as long as the gateway takes any."""
    with suppress(ConnectionError, TimeoutError):
        for start in range(0, len(data), MIB):
            async with asyncio.timeout(patience):
                await client.send(data[start : start + MIB])


async def abort_uploads(gateway: OperatedGateway, count: int = 12, size: int = 20_000_000) -> None:
    """Send most of a body, or all, and leave before the response: one client after the other."""
    forms = list(uploads(size).values())
    for number in range(count):
        round_, form = divmod(number, len(forms))
        data = forms[form]
        async with clients(gateway.url, 1) as (client,):
            await _send_all(client, data if round_ % 2 else data[:-MIB], _NO_PROGRESS / 4)
        await gateway.until_idle()


async def abort_responses(gateway: OperatedGateway, count: int = 6, size: int = 20_000_000) -> None:
    """Send a body, read some of the response and leave: one client after the other."""
    forms = list(uploads(size).values())
    for number in range(count):
        async with clients(gateway.url, 1) as (client,):
            await _send_all(client, forms[number % len(forms)])
            with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(5):
                    await client.reader.readexactly(MIB)
        await gateway.until_idle()


async def upload_at_once(gateway: OperatedGateway, count: int = 300, size: int = 400_000) -> None:
    """Have many clients upload at a time, to a server that does not read."""
    data = request("POST", "/v2/x", headers=_LENGTH) + bytes(size)
    async with clients(gateway.url, count) as opened:
        await asyncio.gather(*(_send_all(client, data) for client in opened))


async def send_long_ids(gateway: OperatedGateway, count: int = 400) -> None:
    """Have many clients send JSON around the data, and wait; some have to be refused."""
    data = request("POST", INFER, headers=_LENGTH) + b'{"id":"' + b"a" * 900_000
    async with clients(gateway.url, count) as opened:
        await asyncio.gather(*(_send_all(client, data) for client in opened))
        await gateway.until_status(lambda status: 0 < status["requests_in_progress"] < count)


async def send_long_heads(gateway: OperatedGateway, count: int = 1500) -> None:
    """Have many clients send most of a long head."""
    data = b"GET /v2/x HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 60_000
    async with clients(gateway.url, count) as opened:
        await asyncio.gather(*(_send_all(client, data) for client in opened))
        # Heads have an eighth of it.
        await gateway.until_status(lambda status: status["buffered_bytes"] > BUFFERED // 10)


async def never_read_bytes(gateway: OperatedGateway) -> None:
    """Have many clients ask for large responses that pass as they are, and read nothing."""
    await _never_read(gateway, request("GET", "/v2/x"))


async def never_read_json(gateway: OperatedGateway) -> None:
    """Have many clients ask for large responses that become JSON, and read nothing."""
    fields = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":[1]}]}'
    await _never_read(gateway, request("POST", INFER, fields))


async def _never_read(gateway: OperatedGateway, data: bytes, count: int = 150) -> None:
    async with clients(gateway.url, count, receiving=4096) as opened:
        for client in opened:
            client.stop_reading()
        await asyncio.gather(*(_send_all(client, data) for client in opened))
        await gateway.until_status(lambda status: status["requests_in_progress"] == count)
        await asyncio.sleep(3)  # in which the responses come, as far as they may


Attack = Callable[[OperatedGateway], Awaitable[None]]

ATTACKS: dict[Script, Sequence[Attack]] = {
    never_reads_inference: [abort_uploads, upload_at_once, send_long_ids, send_long_heads],
    sends_large_responses: [abort_responses, never_read_bytes, never_read_json],
}
"""What is sent to a gateway, by what the server behind it does."""
