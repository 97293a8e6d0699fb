"""The curl command of "Try it", run by a shell: it makes the same call, and nothing else."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from gateway.admin.try_it.requests import FORMS
from gateway.demo.server.server import DemoServer
from tests.admin.try_it.trying import CLIENT_KEY, Trial, trying, wanted
from tests.interop.programs import program
from tests.support.addresses import free_address
from tests.support.gateway_process import run

LARGE = {"name": "INPUT0", "datatype": "FP32", "shape": [5000], "fill": "random"}


async def _response(done: dict[str, Any], folder: Path) -> bytes:
    """Run the command of a call in a folder, with the file that the page offers."""
    program("curl")
    _prepare(folder, base64.b64decode(done["client"]["request"]["body"]))
    status, out, err = await run("env", "-C", str(folder), "sh", "-c", done["curl"])
    assert status == 0, err
    return _read(folder, out)


def _prepare(folder: Path, body: bytes) -> None:
    folder.mkdir()
    (folder / "body.bin").write_bytes(body)


def _read(folder: Path, out: str) -> bytes:
    """Return the response; no other file was made."""
    files = {each.name: each.read_bytes() for each in folder.iterdir()}
    assert files.keys() <= {"body.bin", "response.bin"}
    return files.get("response.bin", out.encode())


async def _check(trial: Trial, document: dict[str, Any], folder: Path) -> None:
    done = await trial.done(document)
    assert done["status"] == 200, done["error"]
    received = base64.b64decode(done["client"]["response"]["body"])
    assert await _response(done, folder) == received


@pytest.mark.parametrize("where", ["tcp", "unix"])
async def test_curl_gets_the_same_response(tmp_path: Path, where: str) -> None:
    listen = free_address() if where == "tcp" else f"unix:{tmp_path}/it's"
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    route = {"auth": "clients"}
    async with (
        DemoServer() as server,
        trying(tmp_path, server.url, general={"listen": listen}, route=route) as trial,
    ):
        for form in FORMS:
            await _check(trial, wanted(form, headers=headers), tmp_path / form)
            large = wanted(form, inputs=[LARGE], headers=headers)
            await _check(trial, large, tmp_path / f"large-{form}")


HOSTILE = [
    "$(touch evil)",
    "`touch evil`",
    "'; touch evil; '",
    '"; touch evil; "',
    "a\ntouch evil\n",
    "a \\\ntouch evil #",
    "a && touch evil || touch evil",
    "-o evil",
    "{evil,evil2}[1-3]",
    "../../evil",
    "..",
    "m" * 3000,
]


async def test_hostile_names_run_no_commands(tmp_path: Path) -> None:
    async with (
        DemoServer() as server,
        trying(tmp_path, server.url, general={"listen": free_address()}) as trial,
    ):
        for index, name in enumerate(HOSTILE):
            for form in ("json", "v1"):
                tensor = {"name": name, "datatype": "BYTES", "shape": [1], "values": [name]}
                headers = {"X-Name": name.replace("\n", " ")[:100].strip()}
                document = wanted(form, name, version=name, inputs=[tensor], headers=headers)
                done = await trial.done(document)
                response = await _response(done, tmp_path / f"{form}-{index}")
                assert response == base64.b64decode(done["client"]["response"]["body"])
