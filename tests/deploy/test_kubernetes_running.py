"""The gateways of deploy/kubernetes/ run with their settings, and answer their probes."""

from pathlib import Path

import pytest

from gateway.demo.server.server import DemoServer
from tests.deploy.files import Document, replace_folders
from tests.deploy.manifest import PROBES, Manifest
from tests.deploy.running import run_gateway
from tests.support.raw_client import connect


def moved(manifest: Manifest, folder: Path, url: str) -> list[str]:
    """Write the settings for a server of this machine; return the command line."""
    settings = manifest.write_settings(folder)
    if settings.upstreams["triton"].dns_refresh is not None:
        url = url.replace("127.0.0.1", "localhost")
    for name, text in manifest.settings_text().items():
        here = text.replace(str(settings.listen[0]), "127.0.0.1:0")
        for endpoint in settings.upstreams["triton"].endpoints:
            here = here.replace(endpoint, url)
        (folder / name).write_text(here)
    return replace_folders(manifest.gateway["args"], {manifest.settings_folder: folder})


def asked(container: Document, probe: str) -> str:
    return str(container[probe]["httpGet"]["path"])


async def test_the_gateway_serves_and_answers_its_probes(
    manifest: Manifest, tmp_path: Path
) -> None:
    async with DemoServer() as server:
        arguments = moved(manifest, tmp_path, server.url)
        async with run_gateway(arguments) as (_, url), connect(url) as client:
            for probe in PROBES:
                assert (await client.call("GET", asked(manifest.gateway, probe))).status == 200
            reply = await client.call("GET", "/v2/models/identity_fp32")
            assert reply.json["name"] == "identity_fp32"


async def test_a_gateway_without_triton_is_not_ready(manifest: Manifest, tmp_path: Path) -> None:
    arguments = moved(manifest, tmp_path, "http://127.0.0.1:1")
    async with run_gateway(arguments) as (_, url), connect(url) as client:
        reply = await client.call("GET", asked(manifest.gateway, "readinessProbe"))
        assert reply.status in (502, 503)


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe"])
async def test_a_gateway_without_triton_is_alive(
    manifest: Manifest, tmp_path: Path, probe: str
) -> None:
    arguments = moved(manifest, tmp_path, "http://127.0.0.1:1")
    async with run_gateway(arguments) as (_, url), connect(url) as client:
        assert (await client.call("GET", asked(manifest.gateway, probe))).status == 200
