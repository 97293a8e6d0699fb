"""Keys, as an operator has them: in files, and in the environment of the command."""

from __future__ import annotations

import re
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.cli.conftest import Call, Ended
from tests.support.gateway_process import FAST_FILE_WATCH, Process, gateway_process
from tests.support.http_messages import request
from tests.support.raw_client import RawClient, connect
from tests.support.servers.scripted_server import ScriptedServer

CONFIG = """
listen: 127.0.0.1:0
workers: {workers}
upstreams: {{demo: {{endpoints: ["{url}"], dialect: triton}}}}
api_keys:
  people: {{file: {file}}}
  robots: {{environment: TEST_ROBOT_KEYS, header: X-Api-Key}}
routes:
  - {{match: {{operations: [health]}}, upstream: demo}}
  - {{upstream: demo, auth: [people, robots]}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "people"
    path.write_text("# people\nold-key\n")
    path.chmod(0o600)
    return path


def _config(file: Path, url: str = "http://127.0.0.1:1", workers: int = 1) -> str:
    config = file.with_name("gateway.yaml")
    config.write_text(CONFIG.format(file=file, url=url, workers=workers))
    return str(config)


def _write(file: Path, text: str | None) -> None:
    """Write the file of keys, or leave none."""
    file.unlink()
    if text is not None:
        file.write_text(text)
        file.chmod(0o600)


def _serving(config: str) -> AbstractAsyncContextManager[tuple[Process, str]]:
    return gateway_process(config, FAST_FILE_WATCH, TEST_ROBOT_KEYS="robot-key,another-key")


async def _status(client: RawClient, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await client.ask(request("GET", "/v2/models/m", headers=named))).status


def test_check_prints_the_groups_of_keys_of_routes(
    call: Call, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_ROBOT_KEYS", "robot-key")
    status, out, err = call("check", _config(file))
    assert (status, err) == (0, "")
    assert out.splitlines()[1:] == [
        "health → upstream demo (triton): http://127.0.0.1:1",
        "every request, with a key of people or robots → upstream demo (triton): http://127.0.0.1:1",
    ]


@pytest.mark.parametrize(
    ("command", "workers", "text", "fault"),
    [
        ("check", 1, None, "cannot be read: No such file or directory"),
        ("check", 1, "good-key\nsecret key\n", "line 2 is not a key"),
        ("serve", 2, "", "there is no key"),
    ],
)
async def test_an_unusable_file_of_keys_is_an_error(
    ended: Ended,
    file: Path,
    command: str,
    workers: int,
    text: str | None,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_ROBOT_KEYS", "robot-key")
    config = _config(file, workers=workers)
    _write(file, text)
    status, out, err = await ended(command, config)
    assert (status, out) == (1, "")
    # What is not there is told with its line: nothing has to be opened for that.
    place = f"{config}:6" if text is None else "tensorgate"
    assert err.startswith(f"{place}: api_keys.people.file: {file}")
    assert fault in err
    assert err.count("\n") == 1
    assert "secret" not in err


def test_an_unset_variable_of_keys_is_an_error(call: Call, file: Path) -> None:
    config = _config(file)
    _write(file, "key\n")
    why = "api_keys.robots.environment: TEST_ROBOT_KEYS is not set in the environment"
    assert call("check", config) == (1, "", f"{config}:7: {why}\n")


@pytest.mark.parametrize("workers", [1, 2])
async def test_keys_are_reloaded_while_connections_stay_open(file: Path, workers: int) -> None:
    async with ScriptedServer() as server:
        config = _config(file, server.url, workers)
        async with _serving(config) as (process, url):
            async with connect(url) as client, connect(url) as other:
                for each in (client, other):
                    assert await _status(each) == 401
                    assert await _status(each, Authorization="Bearer old-key") == 200
                    assert await _status(each, X_Api_Key="another-key") == 200
                    assert (await each.call("GET", "/v2/health/live")).status == 200
                _write(file, "new-key\n")
                renewed = rf"people\.file: keys loaded from {re.escape(str(file))}: 1"
                # The parent of workers says it too: those to come begin with what it has.
                processes = workers + (workers > 1)
                await process.wait_for_output("(?s)" + ".*".join([renewed] * processes))
                for each in (client, other):
                    assert await _status(each, Authorization="Bearer old-key") == 401
                    assert await _status(each, Authorization="Bearer new-key") == 200
                    assert await _status(each, X_Api_Key="robot-key") == 200
                _write(file, "secret key\n")
                await process.wait_for_output(r"line 1 is not a key.*; keeping the previous keys")
                assert await _status(client, Authorization="Bearer new-key") == 200
            process.signal(signal.SIGTERM)
            status, _, err = await process.end()
    assert status == 0
    for key in ("old-key", "new-key", "robot-key", "another-key", "secret"):
        assert key not in err
