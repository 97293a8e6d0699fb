"""Clients over HTTP/2 read an error that comes before they have sent the whole body."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.interop.programs import built_go_program, installed_folder, program
from tests.support.certificates import ca_file, certificate_files, server_certificate
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.gateway_process import run
from tests.support.http_messages import http_response
from tests.support.scale import scaled
from tests.support.servers.scripted_server import Connection, ScriptedServer

FOLDER = Path(__file__).parent
ROUNDS = 24
"""For each error and size, in a full run."""
SIZES = (75, 15_000_000)

Command = tuple[Sequence[str], dict[str, str]]
"""A command to which URL, authority, size and rounds are added, and its environment."""


def curl() -> Command:
    return (sys.executable, str(FOLDER / "curl.py"), program("curl")), {}


def httpx() -> Command:
    packages = {"PYTHONPATH": str(installed_folder("httpx"))}
    return (sys.executable, str(FOLDER / "httpx_client.py")), packages


def node() -> Command:
    return (program("node"), str(FOLDER / "client.js")), {}


def go() -> Command:
    return (built_go_program(FOLDER / "client.go"),), {}


async def refuse(connection: Connection) -> None:
    """Respond to the head of a request, and read no further."""
    await connection.head()
    body = b'{"error":"the server refused it"}'
    await connection.send(http_response(body, {"Connection": "close"}, "409 Conflict"))
    await connection.wait_for_close()


ERRORS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "no key": (401, "key", {"auth": "clients"}),
    "too large": (413, "max_request_bytes", {"limits": {"max_request_bytes": 1024}}),
    "of the server": (409, "the server refused it", {}),
}
"""Status, a part of the text, and the settings of the route."""


@asynccontextmanager
async def refusing_gateway(route: dict[str, Any], folder: Path) -> AsyncIterator[RunningGateway]:
    """Run a gateway over TLS, whose every response is an error."""
    certificate, key = certificate_files(folder, server_certificate())
    keys = folder / "keys"
    keys.write_text("0123456789abcdef0123456789abcdef\n")
    async with (
        ScriptedServer(refuse) as server,
        running_gateway(
            server.url,
            route=route,
            tls={"certificate": certificate, "key": key},
            general={"api_keys": {"clients": {"file": str(keys)}}} if "auth" in route else None,
        ) as gateway,
    ):
        yield gateway


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("client", [curl, httpx, node, go])
async def test_client_reads_an_error_that_comes_early(
    client: Callable[[], Command], error: str, tmp_path: Path
) -> None:
    command, environ = client()
    expected, text, route = ERRORS[error]
    rounds = scaled(ROUNDS)
    target = "/other" if error == "of the server" else "/v2/models/m/infer"
    async with refusing_gateway(route, tmp_path) as gateway:
        for size in SIZES[error == "too large" :]:
            arguments = (gateway.url + target, ca_file(tmp_path), str(size), str(rounds))
            _, out, err = await run(*command, *arguments, **environ)
            results = [json.loads(line) for line in out.splitlines()]
            assert len(results) == rounds, err
            lost = Counter(
                f"{status} {body.strip()}"
                for status, body in results
                if status != expected or text not in body
            )
            assert not lost, f"{lost.total()} of {rounds} with {size} bytes"
