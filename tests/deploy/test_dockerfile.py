"""The image that deploy/Dockerfile describes, built and run without what builds and runs images."""

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

import pytest

from gateway import __version__
from gateway.demo.server.server import DemoServer
from tests.deploy.dockerfile import Builder, Ignored, Stage, environment, read_stages
from tests.deploy.files import DEPLOY, ROOT, mapped
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
    """An image on this machine: what would be its root is a folder."""

    builder: Builder
    environ: dict[str, str]

    def command(self, instruction: str) -> list[str]:
        """Give a command of the image, its program found as the image finds it."""
        program, *rest = (self.builder.here(word) for word in IMAGE.command(instruction))
        if instruction == "CMD":
            return [program, *rest]
        found = [Path(each) / program for each in self.environ["PATH"].split(":")]
        return [str(next(each for each in found if each.exists())), *rest]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the image; its packages are those that the tests run with, and not fetched."""
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
    """Give the codes of what a linter finds."""
    done = subprocess.run(
        [LINTER, "--no-fail", "--format", "json", str(file)],
        capture_output=True,
        check=True,
        timeout=60,
    )
    return [found["code"] for found in json.loads(done.stdout)]


def test_the_linter_finds_nothing() -> None:
    assert lint(FILE) == []


def test_the_linter_finds_something_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(FILE.read_text().replace("python:3.13-slim-bookworm", "python:latest"))
    assert lint(file) == ["DL3007"]


def test_its_base_is_pinned_and_small_and_one_that_the_project_supports() -> None:
    base = IMAGE.base
    found = re.fullmatch(r"python:3\.(\d+)-slim-\w+", base)
    assert found is not None
    assert int(found[1]) >= int(PROJECT["requires-python"].removeprefix(">=3."))
    assert {stage.base for stage in STAGES[:-1]} == {base.replace("-slim", "")}


def test_its_gateway_is_compiled() -> None:
    (wheel,) = (run for run in STAGES[0].values("RUN") if "pip wheel" in run)
    assert "HATCH_BUILD_HOOKS_ENABLE=1 pip wheel" in wheel


def test_nothing_is_run_in_the_last_stage() -> None:
    """So neither a compiler nor a cache of packages is left in it."""
    assert IMAGE.values("RUN") == []


def test_its_user_is_a_number_and_not_root() -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", IMAGE.value("USER"))


def test_its_labels_are_those_of_the_project() -> None:
    labels = IMAGE.pairs("LABEL")
    begin = "org.opencontainers.image."
    assert labels[f"{begin}version"] == __version__
    assert labels[f"{begin}licenses"] == PROJECT["license"]
    assert PROJECT["description"].startswith(labels[f"{begin}description"])


@pytest.mark.parametrize(
    "file", [FILE, ROOT / "docs" / "guide" / "install.md"], ids=lambda file: file.name
)
def test_it_is_tagged_with_its_version(file: Path) -> None:
    assert set(re.findall(r"tensorgate:(\d[\d.]*)", file.read_text())) == {__version__}


def test_it_listens_where_it_is_reached() -> None:
    assert IMAGE.value("EXPOSE") == str(PORT)
    assert IMAGE.pairs("ENV")["LISTEN"] == f"0.0.0.0:{PORT}"


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        ".cache/triton/x",
        "tests/test_cli.py",
        "deploy/Dockerfile",
        "config/tls.yaml",
        "gateway/__pycache__/cli.pyc",
        "gateway/http1/__pycache__/head.pyc",
        "key.pem",
    ],
)
def test_what_the_builder_does_not_get(path: str) -> None:
    assert path in Ignored(ROOT / ".dockerignore")


@pytest.mark.parametrize(
    "path", ["gateway/cli.py", "gateway/http1/head.py", "config/sidecar.yaml", "pyproject.toml"]
)
def test_what_the_builder_gets(path: str) -> None:
    assert path not in Ignored(ROOT / ".dockerignore")


async def test_the_gateway_in_it_is_its_own(image: Built) -> None:
    root = image.builder.here("/opt/tensorgate")
    program = "import gateway; print(gateway.__file__)"
    status, out, _ = await run(f"{root}/bin/python", "-I", "-c", program, **image.environ)
    assert (status, out.startswith(f"{root}/lib/")) == (0, True)


def infer_body(count: int) -> bytes:
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [count], "data": [0.5] * count}
    return json.dumps({"inputs": [entry]}).encode()


async def health(image: Built, url: str) -> int:
    """Give the status of the image's health check, asked of a gateway that is elsewhere."""
    port = url.rpartition(":")[2]
    command = image.command("HEALTHCHECK")
    assert str(PORT) in command[-1]
    words = [word.replace(str(PORT), port) for word in command]
    return (await run(*words, **image.environ))[0]


async def end(process: Process, stage: Stage) -> str:
    """Stop a process as its image is stopped; give what it said."""
    process.signal(signal.Signals[stage.value("STOPSIGNAL")])
    status, _, err = await process.end()
    assert status == 0, err
    return err


async def test_it_serves_and_changes_no_file(image: Built) -> None:
    command = image.command("ENTRYPOINT") + image.command("CMD")
    async with DemoServer() as server:
        environ = {**image.environ, "LISTEN": "127.0.0.1:0", "TRITON_URL": server.url}
        async with running_process(*command, **environ) as process:
            url = (await process.wait_for_output(r"listening on (\S+)"))[1]
            async with connect(url) as client:
                target = "/v2/models/identity_fp32/infer"
                for count in (1, 200_000):  # of which the latter is worth a helper
                    reply = await client.call("POST", target, infer_body(count))
                    assert reply.json["outputs"][0]["data"] == [0.5] * count
            assert await health(image, url) == 0
            err = await end(process, IMAGE)
    assert "it would change" not in err
    assert "ERROR" not in err


async def test_its_settings_are_those_of_the_sidecar(image: Built) -> None:
    settings = Path(image.builder.here("/etc/tensorgate/gateway.yaml"))
    assert mapped(image.command("CMD"), {}) == ["serve", "--config", str(settings)]
    text = await asyncio.to_thread(settings.read_text)
    assert text == (ROOT / "config" / "sidecar.yaml").read_text()


async def test_it_is_not_healthy_where_nobody_listens(image: Built) -> None:
    async with ScriptedServer() as server:
        url = server.url
    assert await health(image, url) == 1


async def test_it_is_not_healthy_where_it_says_so(image: Built) -> None:
    async with ScriptedServer(
        always_respond(http_response(status="503 Service Unavailable"))
    ) as server:
        assert await health(image, server.url) == 1


async def test_files_that_it_would_change_are_noticed(image: Built) -> None:
    python = image.builder.here("/opt/tensorgate/bin/python")
    status, _, err = await run(python, "-c", "open('x', 'w')", **image.environ)
    assert (status, "it would change" in err) == (1, True)
