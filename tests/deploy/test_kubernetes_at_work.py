"""The gateways of deploy/kubernetes/, run as it is said there, and asked what Kubernetes asks."""

from pathlib import Path

import pytest

from gateway.demo.server.server import DemoServer
from tests.deploy.at_work import at_work
from tests.deploy.files import Document, mapped
from tests.deploy.manifest import PROBES, Manifest
from tests.support.raw_client import connect


def moved(manifest: Manifest, folder: Path, url: str) -> list[str]:
    """Write the settings for a server that is here; give the command line that takes them."""
    settings = manifest.write_settings(folder)
    if settings.upstreams["triton"].dns_refresh is not None:
        url = url.replace("127.0.0.1", "localhost")
    for name, text in manifest.settings_text().items():
        here = text.replace(str(settings.listen[0]), "127.0.0.1:0")
        for endpoint in settings.upstreams["triton"].endpoints:
            here = here.replace(endpoint, url)
        (folder / name).write_text(here)
    return mapped(manifest.gateway["args"], {manifest.settings_folder: folder})


def asked(container: Document, probe: str) -> str:
    return str(container[probe]["httpGet"]["path"])


async def test_the_gateway_serves_and_answers_its_probes(
    manifest: Manifest, tmp_path: Path
) -> None:
    async with DemoServer() as server:
        arguments = moved(manifest, tmp_path, server.url)
        async with at_work(arguments) as (_, url), connect(url) as client:
            for probe in PROBES:
                assert (await client.call("GET", asked(manifest.gateway, probe))).status == 200
            reply = await client.call("GET", "/v2/models/identity_fp32")
            assert reply.json["name"] == "identity_fp32"


async def test_a_gateway_without_triton_is_not_ready(manifest: Manifest, tmp_path: Path) -> None:
    arguments = moved(manifest, tmp_path, "http://127.0.0.1:1")
    async with at_work(arguments) as (_, url), connect(url) as client:
        reply = await client.call("GET", asked(manifest.gateway, "readinessProbe"))
        assert reply.status in (502, 503)


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe"])
async def test_a_gateway_without_triton_is_alive(
    manifest: Manifest, tmp_path: Path, probe: str
) -> None:
    arguments = moved(manifest, tmp_path, "http://127.0.0.1:1")
    async with at_work(arguments) as (_, url), connect(url) as client:
        assert (await client.call("GET", asked(manifest.gateway, probe))).status == 200
