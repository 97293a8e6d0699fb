"""The gateways of deploy/kubernetes/ run with their settings, and answer their probes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.demo.server.server import DemoServer
from tests.deploy.files import Document, replace_folders
from tests.deploy.manifest import PROBES, Manifest
from tests.deploy.running import run_gateway
from tests.support.addresses import free_address
from tests.support.gateway_process import TENSORGATE, run
from tests.support.raw_client import connect


@dataclass(frozen=True, slots=True)
class Moved:
    """A gateway's command line for this machine, and the URL of its admin address."""

    arguments: list[str]
    admin: str


def moved(manifest: Manifest, folder: Path, url: str) -> Moved:
    """Write the settings for a server and for addresses of this machine."""
    settings, admin = manifest.write_settings(folder), free_address()
    if settings.upstreams["triton"].dns_refresh is not None:
        url = url.replace("127.0.0.1", "localhost")
    for name, text in manifest.settings_text().items():
        here = text.replace(str(settings.listen[0]), "127.0.0.1:0")
        here = here.replace(str(settings.admin.listen), admin)
        for endpoint in settings.upstreams["triton"].endpoints:
            here = here.replace(str(endpoint), url)
        (folder / name).write_text(here)
    arguments = replace_folders(manifest.gateway["args"], {manifest.settings_folder: folder})
    return Moved(arguments, f"http://{admin}")


@asynccontextmanager
async def started(gateway: Moved) -> AsyncIterator[str]:
    """Run a gateway with its admin address; yield the address for clients."""
    async with run_gateway(gateway.arguments) as (process, url):
        await process.wait_for_output(r"listening on \S+ \(admin\)")
        yield url


async def probe(container: Document, name: str, admin: str) -> int:
    """Return the status of the response to a probe."""
    async with connect(admin) as kubelet:
        return (await kubelet.call("GET", container[name]["httpGet"]["path"])).status


async def test_the_gateway_accepts_its_settings(manifest: Manifest, tmp_path: Path) -> None:
    manifest.write_settings(tmp_path)
    file = replace_folders(manifest.gateway["args"], {manifest.settings_folder: tmp_path})[-1]
    status, out, err = await run(TENSORGATE, "check", file)
    assert status == 0, err
    assert "listen on 0.0.0.0:8080" in out


async def test_the_gateway_serves_and_answers_its_probes(
    manifest: Manifest, tmp_path: Path
) -> None:
    async with DemoServer() as server:
        gateway = moved(manifest, tmp_path, server.url)
        async with started(gateway) as url, connect(url) as client:
            for name in PROBES:
                assert await probe(manifest.gateway, name, gateway.admin) == 200
            reply = await client.call("GET", "/v2/models/identity_fp32")
            assert reply.json["name"] == "identity_fp32"


async def test_a_gateway_without_triton_is_alive_and_not_ready(
    manifest: Manifest, tmp_path: Path
) -> None:
    gateway = moved(manifest, tmp_path, "http://127.0.0.1:1")
    async with started(gateway):
        assert await probe(manifest.gateway, "readinessProbe", gateway.admin) == 503
        for name in ("startupProbe", "livenessProbe"):
            assert await probe(manifest.gateway, name, gateway.admin) == 200
