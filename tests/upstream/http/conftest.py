"""Servers for each transport that carries HTTP/1.1."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from tests.support.certificates import server_context
from tests.support.servers.scripted_server import Script, ScriptedServer
from tests.upstream.endpoints import Serve


@pytest.fixture(params=["http", "https", "https 1.2", "unix"])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Serve:
    """Make servers for each transport."""

    def serve(*scripts: Script) -> ScriptedServer:
        match request.param:
            case "http":
                return ScriptedServer(*scripts)
            case "unix":
                return ScriptedServer(*scripts, path=str(tmp_path / "server"))
            case _:
                return ScriptedServer(*scripts, ssl=_context(request.param))

    return serve


def _context(kind: str) -> ssl.SSLContext:
    context = server_context()
    if kind == "https 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context
