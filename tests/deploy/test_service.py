"""The service of deploy/tensorgate.service, mostly without systemd."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from gateway.demo.server.server import DemoServer
from gateway.settings.schema import Settings
from tests.deploy.files import DEPLOY, ROOT, Unit, replace_folders, run_gateway
from tests.support.gateway_process import TENSORGATE, run, write_settings
from tests.support.raw_client import connect

FILE = DEPLOY / "tensorgate.service"
UNIT = Unit(FILE)
PROGRAM = "/opt/tensorgate/bin/tensorgate"
SETTINGS = "/etc/tensorgate/gateway.yaml"
LAST_MOMENT = 5
"""Seconds that workers have beyond limits.drain_timeout."""
MOST_EXPOSED = 2.0
"""Highest exposure level by systemd-analyze, of 10; a service without protection has 9.6."""

ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def command(key: str, config: str) -> list[str]:
    """Return the arguments of a command of the unit, for a settings file of this machine."""
    program, *arguments = UNIT.command(key)
    assert program == PROGRAM
    return replace_folders(arguments, {SETTINGS: Path(config)})


async def test_the_service_checks_its_settings_first(tmp_path: Path) -> None:
    config = write_settings(tmp_path / "gateway.yaml", "http://127.0.0.1:1")
    status, out, _ = await run(TENSORGATE, *command("ExecStartPre", config))
    assert (status, "http://127.0.0.1:1" in out) == (0, True)


async def test_the_service_serves_also_after_a_reload(tmp_path: Path) -> None:
    _, option, process_id = UNIT.command("ExecReload")
    assert process_id == "$MAINPID"
    async with DemoServer() as server:
        config = write_settings(tmp_path / "gateway.yaml", server.url)
        async with run_gateway(command("ExecStart", config)) as (process, url):
            for reload in (None, signal.Signals[f"SIG{option.removeprefix('-')}"]):
                if reload is not None:
                    process.signal(reload)
                async with connect(url) as client:
                    assert (await client.call("GET", "/v2/health/ready")).status == 200


def test_running_calls_may_finish() -> None:
    drain_timeout = Settings.model_fields["limits"].get_default().drain_timeout
    assert int(UNIT.value("Service", "TimeoutStopSec")) >= drain_timeout + LAST_MOMENT
    # Else the workers would be told to end too.
    assert UNIT.value("Service", "KillMode") == "mixed"


def test_the_service_has_no_unneeded_rights() -> None:
    said = {
        "CapabilityBoundingSet": "",
        "DynamicUser": "yes",
        "LogsDirectory": "tensorgate",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "Restart": "on-failure",
    }
    assert {key: UNIT.value("Service", key) for key in said} == said


def test_the_service_has_the_shared_memory_of_the_machine() -> None:
    hiding = ("InaccessiblePaths", "ReadOnlyPaths", "RootDirectory", "RootImage")
    assert not any(UNIT.values("Service", each) for each in (*hiding, "TemporaryFileSystem"))


def instructions() -> list[list[str]]:
    """Return the commands of the unit's comment that install it."""
    comment = FILE.read_text().partition("[Unit]")[0]
    return [shlex.split(line.removeprefix("#   ")) for line in re.findall("^#   .*", comment, re.M)]


def assert_done(command: list[str], environ: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout


async def test_the_commands_of_the_comment_install_the_service(tmp_path: Path) -> None:
    site = sysconfig.get_path("purelib")
    environ = {
        # What pip would fetch is that of the tests.
        "PYTHONPATH": site,
        "PIP_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which is how pip is told that there is none
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_IGNORE_INSTALLED": "1",
        "HATCH_BUILD_NO_HOOKS": "1",
    }
    here = {folder: tmp_path / folder[1:] for folder in ("/opt", "/etc")}
    for program, *arguments in instructions():
        if program == "systemctl":
            continue
        found = sys.executable if program == "python3" else program
        assert_done(replace_folders([found, *arguments], here), environ)
    assert (tmp_path / "etc/systemd/system/tensorgate.service").read_text() == FILE.read_text()
    command = replace_folders(UNIT.command("ExecStartPre"), here)
    status, out, _ = await run(*command, PYTHONPATH=site)
    assert (status, out.splitlines()[0]) == (0, "listen on 127.0.0.1:8080")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with programs of this machine."""
    file = tmp_path / FILE.name
    file.write_text(FILE.read_text().replace(PROGRAM, TENSORGATE))
    return file


def analyze(*arguments: str) -> tuple[int, str]:
    """Run systemd-analyze, which needs no running systemd."""
    assert ANALYZE is not None
    done = subprocess.run(
        [ANALYZE, "--no-pager", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


@needs_systemd
def test_systemd_verifies_the_unit(unit: Path) -> None:
    status, said = analyze("verify", str(unit))
    assert [line for line in said.splitlines() if unit.name in line] == []
    assert status == 0


@needs_systemd
def test_systemd_rates_the_unit_as_little_exposed(unit: Path) -> None:
    _, said = analyze("security", "--offline=yes", str(unit))
    if "--offline" in said:
        pytest.skip("this systemd-analyze, older than 250, rates services that are loaded alone")
    found = re.search(rf"exposure level for {unit.name}: ([\d.]+)", said)
    assert found is not None, said
    assert float(found[1]) <= MOST_EXPOSED
