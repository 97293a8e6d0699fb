"""The image of deploy/Dockerfile, without a container runtime, and deploy/compose.yaml."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gateway import __version__
from gateway.demo.server.server import DemoServer
from gateway.settings.load import load
from gateway.settings.values.addresses import TcpAddress
from gateway.settings.values.units import parse_duration, parse_size
from tests.deploy.dockerfile import Builder, Ignored, Stage, environment, read_stages
from tests.deploy.files import (
    DEPLOY,
    ROOT,
    Document,
    documents,
    replace_folders,
    run_gateway,
    shared_memory_size,
)
from tests.support.addresses import free_address
from tests.support.gateway_process import Process, run, running_process
from tests.support.http_messages import http_response
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond

FILE = DEPLOY / "Dockerfile"
STAGES = read_stages(FILE)
IMAGE = STAGES[-1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PORT = 8080
BIN = Path(sys.executable).parent
LINTER = str(BIN / "hadolint")

# A container's root is read-only; devices and memory lie elsewhere.
READ_ONLY = """
import os, sys

CHANGES = ("os.mkdir", "os.remove", "os.rename")

def refuse(event, args):
    writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (writes and not str(args[0]).startswith("/dev/")) or event in CHANGES:
        print("it would change", args, file=sys.stderr, flush=True)
        raise OSError(30, "Read-only file system", str(args[0]))

sys.addaudithook(refuse)
"""


@dataclass(frozen=True, slots=True)
class Built:
    """An image whose root is a folder of this machine."""

    builder: Builder
    environ: dict[str, str]

    def command(self, instruction: str) -> list[str]:
        """Return a command of the image with the path of its program."""
        program, *rest = (self.builder.here(word) for word in IMAGE.command(instruction))
        if instruction == "CMD":
            return [program, *rest]
        found = [Path(each) / program for each in self.environ["PATH"].split(":")]
        return [str(next(each for each in found if each.exists())), *rest]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the image with the packages of the tests, without a download."""
    root = tmp_path_factory.mktemp("image")
    path = {"PATH": f"{BIN}:{os.environ['PATH']}"}
    pip = {
        "PIP_CACHE_DIR": str(root / "cache"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which is how pip is told that there is none
        "PIP_NO_DEPS": "1",
        # Compiling takes a minute and a compiler; `make test-compiled` sees to what comes of it.
        "HATCH_BUILD_NO_HOOKS": "1",
    }
    builder = Builder(root, ROOT, {**path, **pip})
    for stage in STAGES:
        builder.build(stage)
    (packages,) = root.glob("opt/tensorgate/lib/python3*/site-packages")
    (packages / "read_only.py").write_text(READ_ONLY)
    (packages / "here.pth").write_text(f"{sysconfig.get_path('purelib')}\nimport read_only\n")
    environ = {name: builder.here(value) for name, value in environment(IMAGE, path).items()}
    return Built(builder, {**environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"})


def lint(file: Path) -> list[str]:
    """Return the codes of the linter's findings."""
    done = subprocess.run(
        [LINTER, "--no-fail", "--format", "json", str(file)],
        capture_output=True,
        check=True,
        timeout=60,
    )
    return [found["code"] for found in json.loads(done.stdout)]


def test_hadolint_finds_nothing() -> None:
    assert lint(FILE) == []


def test_the_base_image_is_pinned_slim_and_supported() -> None:
    base = IMAGE.base
    found = re.fullmatch(r"python:3\.(\d+)-slim-\w+", base)
    assert found is not None
    assert int(found[1]) >= int(PROJECT["requires-python"].removeprefix(">=3."))
    assert {stage.base for stage in STAGES[:-1]} == {base.replace("-slim", "")}


def test_the_image_has_a_compiled_gateway() -> None:
    (wheel,) = (run for run in STAGES[0].values("RUN") if "pip wheel" in run)
    assert "TENSORGATE_PURE=0 pip wheel" in wheel


def test_the_user_is_a_number_and_not_root() -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", IMAGE.value("USER"))


def test_the_labels_are_those_of_the_project() -> None:
    labels = IMAGE.pairs("LABEL")
    begin = "org.opencontainers.image."
    assert labels[f"{begin}version"] == __version__
    assert labels[f"{begin}licenses"] == PROJECT["license"]
    assert PROJECT["description"].startswith(labels[f"{begin}description"])


@pytest.mark.parametrize(
    "file", [FILE, ROOT / "docs" / "guide" / "install.md"], ids=lambda file: file.name
)
def test_the_image_is_tagged_with_the_version(file: Path) -> None:
    assert set(re.findall(r"tensorgate:(\d[\d.]*)", file.read_text())) == {__version__}


def test_the_gateway_listens_at_the_exposed_port() -> None:
    assert IMAGE.value("EXPOSE") == str(PORT)
    assert IMAGE.pairs("ENV")["LISTEN"] == f"0.0.0.0:{PORT}"
    # Where Prometheus asks.
    assert IMAGE.pairs("ENV")["ADMIN"] == "0.0.0.0:9080"


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        "tests/cli/test_cli.py",
        "deploy/Dockerfile",
        "config/tls.yaml",
        "gateway/__pycache__/cli.pyc",
        "key.pem",
    ],
)
def test_the_build_context_leaves_files_out(path: str) -> None:
    assert path in Ignored(ROOT / ".dockerignore")


def infer_body(count: int) -> bytes:
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [count], "data": [0.5] * count}
    return json.dumps({"inputs": [entry]}).encode()


async def health(image: Built, url: str) -> int:
    """Return the status of the image's health check for another gateway."""
    port = url.rpartition(":")[2]
    command = image.command("HEALTHCHECK")
    assert str(PORT) in command[-1]
    words = [word.replace(str(PORT), port) for word in command]
    return (await run(*words, **image.environ))[0]


async def end(process: Process, stage: Stage) -> str:
    """Stop a process by the image's signal; return its output."""
    process.signal(signal.Signals[stage.value("STOPSIGNAL")])
    status, _, err = await process.end()
    assert status == 0, err
    return err


async def test_the_image_serves_and_changes_no_file(image: Built) -> None:
    command = image.command("ENTRYPOINT") + image.command("CMD")
    async with DemoServer() as server:
        addresses = {"LISTEN": "127.0.0.1:0", "ADMIN": free_address()}
        environ = {**image.environ, **addresses, "TRITON_URL": server.url}
        async with running_process(*command, **environ) as process:
            url = (await process.wait_for_output(r"listening on (\S+)"))[1]
            async with connect(url) as client:
                target = "/v2/models/identity_fp32/infer"
                for count in (1, 200_000):  # of which the latter is worth other threads
                    reply = await client.call("POST", target, infer_body(count))
                    assert reply.json["outputs"][0]["data"] == [0.5] * count
            assert await health(image, url) == 0
            err = await end(process, IMAGE)
    assert "it would change" not in err
    assert "ERROR" not in err


async def test_the_settings_of_the_image_are_the_sidecar_sample(image: Built) -> None:
    settings = Path(image.builder.here("/etc/tensorgate/gateway.yaml"))
    assert replace_folders(image.command("CMD"), {}) == ["serve", str(settings)]
    text = await asyncio.to_thread(settings.read_text)
    assert text == (ROOT / "config" / "sidecar.yaml").read_text()


async def test_the_health_check_fails_if_the_gateway_is_not_live(image: Built) -> None:
    unavailable = always_respond(http_response(status="503 Service Unavailable"))
    async with ScriptedServer(unavailable) as server:
        assert await health(image, server.url) == 1
    # Nothing listens any more.
    assert await health(image, server.url) == 1


COMPOSE = DEPLOY / "compose.yaml"
SHARED_MEMORY = DEPLOY / "compose.shared-memory.yaml"
CHECKER = str(Path(sys.executable).with_name("check-jsonschema"))


@pytest.fixture
def services() -> dict[str, Document]:
    """The services, by name."""
    (compose,) = documents(COMPOSE)
    services: dict[str, Document] = compose["services"]
    return services


def variables(service: Document) -> dict[str, str]:
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
    assert check(COMPOSE)[0] == 0


def test_only_the_gateway_publishes_a_port(services: dict[str, Document]) -> None:
    assert [name for name, service in services.items() if "ports" in service] == ["gateway"]
    assert not any("network_mode" in service for service in services.values())
    (ports,) = services["gateway"]["ports"]
    port = variables(services["gateway"])["LISTEN"].rpartition(":")[2]
    assert ports.rpartition(":")[2] == port
    # There, its image's health check asks.
    assert read_stages(DEPLOY / "Dockerfile")[-1].value("EXPOSE") == port
    assert "healthcheck" not in services["gateway"]


def test_prometheus_reaches_the_gateway_in_the_network(services: dict[str, Document]) -> None:
    gateway = services["gateway"]
    admin = load(settings_file(gateway), variables(gateway)).admin.listen
    assert admin == TcpAddress("0.0.0.0", 9080)
    assert not any("9080" in port for port in gateway["ports"])


def test_the_gateway_sends_requests_to_triton(services: dict[str, Document]) -> None:
    url = urlsplit(variables(services["gateway"])["TRITON_URL"])
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
    for name in variables(services["gateway"]):
        assert f"${{{name}:-" in text


@pytest.fixture
def shared_memory() -> dict[str, Document]:
    """What compose.shared-memory.yaml adds to the services, by name."""
    (compose,) = documents(SHARED_MEMORY)
    added: dict[str, Document] = compose["services"]
    return added


def test_shared_memory_of_compose_fits_the_schema(tmp_path: Path) -> None:
    """Apart from a tag of Compose, which the checker does not know."""
    file = tmp_path / SHARED_MEMORY.name
    file.write_text(SHARED_MEMORY.read_text().replace("!reset ", ""))
    assert check(file)[0] == 0


def test_shared_memory_of_compose_is_that_of_triton(
    services: dict[str, Document], shared_memory: dict[str, Document], tmp_path: Path
) -> None:
    assert shared_memory["triton"]["ipc"] == "shareable"
    gateway = shared_memory["gateway"]
    assert gateway["ipc"] == gateway["network_mode"] == "service:triton"
    # As its comment says to do.
    file = tmp_path / "sidecar.yaml"
    text = settings_file(services["gateway"]).read_text()
    file.write_text(text.replace("#shared_memory: auto", "shared_memory: auto"))
    settings = load(file, variables(services["gateway"]) | variables(gateway))
    (url,) = settings.upstreams["triton"].endpoints
    assert urlsplit(str(url)).hostname == "127.0.0.1"
    # With room for a second gateway: the memory of a killed one is freed after its start.
    size = parse_size(services["triton"]["shm_size"].upper())
    assert 0 < 2 * shared_memory_size(settings) < size


def test_triton_publishes_the_port_of_a_gateway_in_its_network(
    services: dict[str, Document], shared_memory: dict[str, Document]
) -> None:
    assert shared_memory["triton"]["ports"] == services["gateway"]["ports"]
    # Compose refuses ports beside network_mode.
    assert shared_memory["gateway"]["ports"] is None
    assert "ports: !reset" in SHARED_MEMORY.read_text()


def test_running_calls_may_finish(services: dict[str, Document]) -> None:
    gateway, triton = services["gateway"], services["triton"]
    settings = load(settings_file(gateway), variables(gateway))
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
            **variables(gateway),
            "LISTEN": "127.0.0.1:0",
            "ADMIN": free_address(),
            "TRITON_URL": server.url,
        }
        arguments = replace_folders(gateway["command"], {there: here})
        async with run_gateway(arguments, **environ) as (_, url), connect(url) as client:
            assert (await client.call("GET", "/v2/health/ready")).status == 200
