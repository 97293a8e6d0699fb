"""The service that deploy/tensorgate.service describes, without systemd where it can be."""

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from gateway.demo.server import DemoServer
from gateway.settings.schema import Settings
from tests.deploy.at_work import at_work
from tests.deploy.files import DEPLOY, Unit, mapped
from tests.servers.command import SCRIPT, run, settings_in
from tests.servers.raw_client import connect

FILE = DEPLOY / "tensorgate.service"
UNIT = Unit(FILE)
PROGRAM = "/opt/tensorgate/bin/tensorgate"
SETTINGS = "/etc/tensorgate/gateway.yaml"
LAST_MOMENT = 5
"""Seconds that workers have beyond the time to drain."""
MOST_EXPOSED = 2.0
"""Of 10, as systemd-analyze reckons; a service without any protection has 9.6."""

ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def command(key: str, config: str) -> list[str]:
    """Give the arguments of a command of the unit, for settings that are here."""
    program, *arguments = UNIT.command(key)
    assert program == PROGRAM
    return mapped(arguments, {SETTINGS: Path(config)})


async def test_the_settings_are_checked_first(tmp_path: Path) -> None:
    config = settings_in(tmp_path / "gateway.yaml", "http://127.0.0.1:1")
    status, out, _ = await run(SCRIPT, *command("ExecStartPre", config))
    assert (status, "http://127.0.0.1:1" in out) == (0, True)


async def test_it_serves(tmp_path: Path) -> None:
    async with DemoServer() as server:
        config = settings_in(tmp_path / "gateway.yaml", server.url)
        async with at_work(command("ExecStart", config)) as (_, url), connect(url) as client:
            assert (await client.call("GET", "/v2/health/ready")).status == 200


async def test_a_reload_does_not_end_it(tmp_path: Path) -> None:
    _, option, process_id = UNIT.command("ExecReload")
    assert process_id == "$MAINPID"
    async with DemoServer() as server:
        config = settings_in(tmp_path / "gateway.yaml", server.url)
        async with at_work(command("ExecStart", config)) as (process, url):
            process.signal(signal.Signals[f"SIG{option.removeprefix('-')}"])
            async with connect(url) as client:
                assert (await client.call("GET", "/v2/health/ready")).status == 200


def test_what_runs_may_finish() -> None:
    drain_time = Settings.model_fields["limits"].get_default().drain_time
    assert int(UNIT.value("Service", "TimeoutStopSec")) >= drain_time + LAST_MOMENT
    # Else the helper would be told to end too.
    assert UNIT.value("Service", "KillMode") == "mixed"


def test_it_has_no_rights_to_speak_of() -> None:
    said = {
        "CapabilityBoundingSet": "",
        "DynamicUser": "yes",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "Restart": "on-failure",
    }
    assert {key: UNIT.value("Service", key) for key in said} == said


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with programs that are there."""
    file = tmp_path / FILE.name
    file.write_text(FILE.read_text().replace(PROGRAM, SCRIPT))
    return file


def analyze(*arguments: str) -> tuple[int, str]:
    """Ask systemd of units, of which none has to run."""
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
def test_systemd_understands_all_of_it(unit: Path) -> None:
    status, said = analyze("verify", str(unit))
    assert [line for line in said.splitlines() if unit.name in line] == []
    assert status == 0


@needs_systemd
@pytest.mark.parametrize(
    ("line", "other"),
    [("NoNewPrivileges=yes", "NoNewPriveleges=yes"), ("TimeoutStopSec=40", "TimeoutStopSec=x")],
)
def test_what_systemd_does_not_understand(unit: Path, line: str, other: str) -> None:
    text = unit.read_text()
    assert line in text
    unit.write_text(text.replace(line, other))
    _, said = analyze("verify", str(unit))
    assert f"{unit.name}:{text[: text.index(line)].count(chr(10)) + 1}: " in said


@needs_systemd
def test_it_is_little_exposed(unit: Path) -> None:
    _, said = analyze("security", "--offline=yes", str(unit))
    if "--offline" in said:
        pytest.skip("this systemd-analyze, older than 250, rates services that are loaded alone")
    found = re.search(rf"exposure level for {unit.name}: ([\d.]+)", said)
    assert found is not None, said
    assert float(found[1]) <= MOST_EXPOSED
