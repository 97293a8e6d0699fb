"""The parts of deploy/compose.yaml fit together, and the gateway runs with them."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gateway import __version__
from gateway.demo.server.server import DemoServer
from gateway.settings.load import load
from gateway.settings.values.addresses import TcpAddress
from gateway.settings.values.units import parse_duration
from tests.deploy.dockerfile import read_stages
from tests.deploy.files import DEPLOY, Document, documents, replace_folders
from tests.deploy.running import run_gateway
from tests.support.addresses import free_address
from tests.support.raw_client import connect

FILE = DEPLOY / "compose.yaml"
CHECKER = str(Path(sys.executable).with_name("check-jsonschema"))


@pytest.fixture
def services() -> dict[str, Document]:
    """The services, by name."""
    (compose,) = documents(FILE)
    services: dict[str, Document] = compose["services"]
    return services


def environment(service: Document) -> dict[str, str]:
    return {name: str(value) for name, value in service["environment"].items()}


def volume(service: Document) -> tuple[Path, str]:
    """Return the gateway's only volume: its folder here, and in the container."""
    (text,) = service["volumes"]
    here, there, mode = text.split(":")
    assert mode == "ro"
    return (DEPLOY / here).resolve(), there


def settings_file(service: Document) -> Path:
    """Return the settings file of the gateway's command, on this machine."""
    here, there = volume(service)
    return Path(replace_folders(service["command"], {there: here})[-1])


def check(file: Path) -> tuple[int, str]:
    """Check a file by the schema of the Compose specification."""
    done = subprocess.run(
        [CHECKER, "--builtin-schema", "vendor.compose-spec", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def test_the_compose_file_fits_the_schema() -> None:
    assert check(FILE)[0] == 0


def test_only_the_gateway_publishes_a_port(services: dict[str, Document]) -> None:
    assert [name for name, service in services.items() if "ports" in service] == ["gateway"]
    assert not any("network_mode" in service for service in services.values())
    (ports,) = services["gateway"]["ports"]
    port = environment(services["gateway"])["LISTEN"].rpartition(":")[2]
    assert ports.rpartition(":")[2] == port
    # There, its image's health check asks.
    assert read_stages(DEPLOY / "Dockerfile")[-1].value("EXPOSE") == port
    assert "healthcheck" not in services["gateway"]


def test_prometheus_reaches_the_gateway_in_the_network(services: dict[str, Document]) -> None:
    gateway = services["gateway"]
    admin = load(settings_file(gateway), environment(gateway)).admin.listen
    assert admin == TcpAddress("0.0.0.0", 9080)
    assert not any("9080" in port for port in gateway["ports"])


def test_the_gateway_sends_requests_to_triton(services: dict[str, Document]) -> None:
    url = urlsplit(environment(services["gateway"])["TRITON_URL"])
    assert url.hostname == "triton"
    # Its health check asks at the same port.
    (asked,) = re.findall(
        r"http://127.0.0.1:(\d+)/v2", " ".join(services["triton"]["healthcheck"]["test"])
    )
    assert str(url.port) == asked


def test_images_are_pinned(services: dict[str, Document]) -> None:
    assert services["gateway"]["image"] == f"tensorgate:{__version__}"
    assert re.fullmatch(r"nvcr\.io/nvidia/tritonserver:\d\d\.\d\d-py3", services["triton"]["image"])


def test_triton_finds_its_models_and_the_gateway_waits_for_it(
    services: dict[str, Document],
) -> None:
    assert services["gateway"]["depends_on"] == {"triton": {"condition": "service_healthy"}}
    (models,) = services["triton"]["volumes"]
    assert f"--model-repository={models['target']}" in services["triton"]["command"]
    assert models["source"].startswith("${MODEL_REPOSITORY:?")


def test_the_settings_use_each_variable(services: dict[str, Document]) -> None:
    text = settings_file(services["gateway"]).read_text()
    for name in environment(services["gateway"]):
        assert f"${{{name}:-" in text


def test_running_calls_may_finish(services: dict[str, Document]) -> None:
    gateway, triton = services["gateway"], services["triton"]
    settings = load(settings_file(gateway), environment(gateway))
    assert parse_duration(gateway["stop_grace_period"]) > settings.limits.drain_timeout
    (exit_time,) = re.findall(r"--exit-timeout-secs=(\d+)", " ".join(triton["command"]))
    assert parse_duration(triton["stop_grace_period"]) > int(exit_time)


def test_containers_have_no_unneeded_rights(services: dict[str, Document]) -> None:
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert services["gateway"]["read_only"] is True


async def test_the_gateway_serves_with_these_settings(services: dict[str, Document]) -> None:
    gateway = services["gateway"]
    here, there = volume(gateway)
    async with DemoServer() as server:
        environ = {
            **environment(gateway),
            "LISTEN": "127.0.0.1:0",
            "ADMIN": free_address(),
            "TRITON_URL": server.url,
        }
        arguments = replace_folders(gateway["command"], {there: here})
        async with run_gateway(arguments, **environ) as (_, url), connect(url) as client:
            assert (await client.call("GET", "/v2/health/ready")).status == 200
