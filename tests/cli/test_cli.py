"""The command line as its user has it: processes, signals, exit statuses, and what is printed."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from gateway import __version__
from gateway.build_info import NATIVE, describe_build
from tests.cli.conftest import Call, Ended
from tests.support.addresses import HOST, free_address, free_port
from tests.support.certificates import ca_file, certificate_files, server_certificate
from tests.support.gateway_process import (
    FAST_FILE_WATCH,
    TENSORGATE,
    TIMEOUT,
    Process,
    gateway_process,
    run,
    running_process,
    write_settings,
)
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.raw_client import RawClient, connect
from tests.support.servers.gated_response import GatedResponse
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

MODULE = (sys.executable, "-m", "gateway")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file that is yet to be written."""
    return tmp_path / "gateway.yaml"


async def test_version_prints_the_version_and_the_form() -> None:
    out = f"tensorgate, version {__version__} ({describe_build()})\n"
    assert await run(TENSORGATE, "--version") == (0, out, "")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_the_commands(call: Call, option: str) -> None:
    status, out, err = call(option)
    assert (status, err) == (0, "")
    for name in ("serve", "check", "demo", "top"):
        assert re.search(rf"^  {name} ", out, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve",),
        ("check",),
        ("serve", "a.yaml", "--config", "b.yaml"),
        ("demo", "--port", "65536"),
        ("top", "localhost"),
        ("top", "--interval", "1ms"),
    ],
)
def test_wrong_arguments_give_status_2(call: Call, arguments: tuple[str, ...]) -> None:
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert re.search(r"^(Usage|Error): ", err, re.MULTILINE)
    assert "Traceback" not in err


ROUTES = """
upstreams:
  blue: {endpoints: [http://a:1, http://b:2]}
  green: {endpoints: [http://c:3]}
routes:
  - match: {model: alias, version: 2, headers: {x-a: b*}, operations: [infer, health]}
    upstream: green
    rewrite: {model: m, version: 7}
  - match: {model: m}
    upstream: [{name: blue, weight: 9}, {name: green, weight: 1}]
    rewrite: {model: n}
    mirror: {upstream: blue, percent: 7%}
    compression: [deflate, gzip]
    server_timing: true
    deny_operations: [trace, other]
  - upstream: green
"""
CARE = "model_discovery: true, health_check: {interval: 1m}, dns_refresh: 500ms"
ITSELF = """upstreams:
  a:
    endpoints:
      - http://127.0.0.1:1
      - http://localhost:8080
listen: [127.0.0.1:9, 0.0.0.0:8080]
"""
GLOBS = """upstreams: {triton: {endpoints: ['http://127.0.0.1:1']}}
routes:
  - {match: {model: '^resnet.*$', headers: {X-Tenant: '(a|b)'}}, upstream: triton}
  - {match: {model: 're:^resnet.*$', version: '[1-9]*'}, upstream: triton}
"""
_LOOKS = "looks like a regular expression, but it is a glob"


@pytest.mark.parametrize(
    ("text", "lines", "warnings"),
    [
        (
            "listen: '[::1]:8080'\nupstreams: {u: {endpoints: ['http://h:1'], dialect: triton}}",
            ["listen on [::1]:8080", "every request → upstream u (triton): http://h:1"],
            [],
        ),
        (
            ROUTES,
            [
                "listen on 127.0.0.1:8080",
                "model alias, version 2, x-a: b*, infer or health → upstream green (auto):"
                " http://c:3; as model m, version 7",
                "model m → upstream blue (auto) × 9: http://a:1, http://b:2; "
                "upstream green (auto) × 1: http://c:3; as model n; 7% copied to upstream blue"
                "; responses compressed with deflate or gzip; with Server-Timing"
                "; but not trace, other",
                "every request → upstream green (auto): http://c:3",
            ],
            [],
        ),
        (
            f"workers: 3\nupstreams: {{u: {{endpoints: ['http://triton:8000'], {CARE}}}}}",
            [
                "listen on 127.0.0.1:8080",
                "3 workers",
                "every request → upstream u (auto): http://triton:8000"
                " (looked up every 0.5 s, checked every 60 s, model discovery)",
            ],
            [],
        ),
        (
            ITSELF,
            [],
            [
                ":5: upstreams.a.endpoints[1]: warning: http://localhost:8080 is the gateway itself"
                " (listen: 0.0.0.0:8080); requests come back and are answered with 508"
            ],
        ),
        (
            GLOBS,
            [],
            [
                f":3: routes[0].match.model: warning: '^resnet.*$' {_LOOKS}",
                f":3: routes[0].match.headers.X-Tenant: warning: '(a|b)' {_LOOKS}",
            ],
        ),
    ],
    ids=["one upstream", "routes", "workers and checks", "itself", "globs"],
)
def test_check_prints_what_would_be_served_and_warnings(
    call: Call, file: Path, text: str, lines: list[str], warnings: list[str]
) -> None:
    file.write_text(text)
    status, out, err = call("check", str(file))
    assert status == 0
    assert not lines or out.splitlines() == lines
    assert [each.split(", where")[0] for each in err.splitlines()] == [
        f"{file}{each}" for each in warnings
    ]


async def _probed(call: Call, config: str) -> tuple[int, list[str]]:
    """Ask servers; give the status, and what is printed beyond what would be served."""
    _, summary, _ = call("check", config)
    status, out, err = await asyncio.to_thread(call, "check", "--probe", config)
    assert isinstance(status, int)
    assert err == ""
    assert out.startswith(summary)
    return status, out.removeprefix(summary).splitlines()


async def test_check_with_probe_prints_what_servers_are(call: Call, file: Path) -> None:
    async with ScriptedServer(
        always_respond(http_response(b'{"name":"kserve","version":"0.15.0"}'))
    ) as server:
        url, itself = server.url, "it names itself 'kserve', version '0.15.0'"
        config = write_settings(file, url)
        assert call("check", config)[0] == 0
        assert not server.requests
        said = f"  {url}: ready; dialect kserve, but triton is declared: {itself}"
        assert await _probed(call, config) == (3, ["upstream demo:", said])
        text = await asyncio.to_thread(file.read_text)
        await asyncio.to_thread(file.write_text, text.replace("triton", "auto"))
        said = f"  {url}: ready; dialect kserve: {itself}"
        assert await _probed(call, config) == (0, ["upstream demo:", said])
    said = f"  {url}: cannot connect to {url}: Connection refused"
    assert await _probed(call, config) == (4, ["upstream demo:", said])


@pytest.mark.parametrize("command", ["check", "serve"])
async def test_invalid_settings_are_printed_with_file_and_line(
    ended: Ended, file: Path, command: str
) -> None:
    config = write_settings(file, "ftp://127.0.0.1", more="limits:\n  idle_tiem: 3\n")
    status, out, err = await ended(command, config)
    assert (status, out) == (2, "")
    lines = err.splitlines()
    assert lines[0].startswith(f"{file}:4: limits.idle_tiem: unknown key")
    assert lines[1].startswith(f"{file}:2: upstreams.demo.endpoints[0]: ")
    assert len(lines) == 2


@pytest.mark.parametrize("command", [("check",), ("serve", "--config")], ids=" ".join)
async def test_a_missing_settings_file_is_an_error(
    ended: Ended, tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "none.yaml"
    status, _, err = await ended(*command, str(path))
    assert (status, err) == (2, f"{path}: cannot be read: No such file or directory\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_a_signal_ends_the_gateway_after_its_calls(file: Path, number: int) -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        head = {"Transfer-Encoding": "chunked"}
        await connection.send(message("HTTP/1.1 200 OK", head, chunk(b"one ")))
        await go_on.wait()
        await connection.send(chunk(b"two"), chunk(b""))

    grace = "limits: {drain_grace: 100ms}\n"
    async with (
        ScriptedServer(script) as server,
        gateway_process(write_settings(file, server.url, more=grace)) as (process, url),
    ):
        async with connect(url) as busy, connect(url) as idle:
            await busy.send(request("GET", "/v2/x"))
            assert (await busy.head()).status == 200
            process.signal(number)
            await process.wait_for_output("stopping")
            assert await idle.rest() == b""
            with pytest.raises(ConnectionRefusedError):
                async with connect(url):
                    pass
            assert process.running
            go_on.set()
            assert [await busy.chunk() for _ in range(3)] == [b"one ", b"two", b""]
        status, out, err = await process.end()
    assert (status, out) == (0, "")
    assert '"GET /v2/x" 200 7 ' in err
    assert err.splitlines()[-1].endswith("stopped")
    assert "were aborted" not in err


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [(("schema",), ()), (("serve", "x"), (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2))],
    ids=["any command", "serve"],
)
async def test_ctrl_c_during_the_imports_ends_it_with_one_line_and_no_other_signal_does(
    tmp_path: Path, arguments: tuple[str, ...], numbers: tuple[signal.Signals, ...]
) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    slow = "import sys, time; print('imports', file=sys.stderr, flush=True); time.sleep(60)"
    (folder / "click.py").write_text(slow)
    async with running_process(*MODULE, *arguments, PYTHONPATH=str(folder)) as process:
        await process.wait_for_output("imports")
        for number in (*numbers, signal.SIGINT):
            process.signal(number)
        assert await process.end() == (130, "", "imports\ntensorgate: interrupted\n")


@pytest.mark.skipif(not NATIVE, reason="without the C module, numpy scans texts")
async def test_check_takes_no_module_of_the_data_path(file: Path, tmp_path: Path) -> None:
    """They would take twice as long as the rest of the command."""
    settings = write_settings(file, "http://127.0.0.1:8000")
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in ("numpy", "prometheus_client", "aiohttp"):
        (modules / f"{name}.py").write_text("raise ImportError(f'{__name__} is imported')")
    path = os.pathsep.join((str(modules), os.environ.get("PYTHONPATH", "")))
    status, out, err = await run(*MODULE, "check", settings, PYTHONPATH=path)
    assert (status, err) == (0, "")
    assert "every request → upstream demo" in out


@pytest.mark.parametrize("command", [(TENSORGATE,), FAST_FILE_WATCH], ids=["command", "import"])
async def test_ctrl_c_while_settings_are_read_ends_it_with_one_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    pipe = tmp_path / "gateway.yaml"
    os.mkfifo(pipe)
    async with running_process(*command, "serve", str(pipe)) as process:
        with await asyncio.to_thread(pipe.open, "w"):  # it reads
            process.signal(signal.SIGINT)
            assert await process.end() == (130, "", "tensorgate: interrupted\n")


_STARTS_AS_LONG_AS_IT_LISTENS = """
import asyncio, os
from pathlib import Path
from gateway.app.process import MallocTrim

async def wait(self):
    os.write(2, b"starts\\n")
    while f"{int(os.environ['PORT']):04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text():
        await asyncio.sleep(0.01)
    return await begin(self)

begin = MallocTrim.__aenter__
MallocTrim.__aenter__ = wait
from gateway.__main__ import main
main()
"""


@pytest.mark.parametrize("workers", [1, 2])
async def test_ctrl_c_before_it_serves_ends_it_with_one_line(file: Path, workers: int) -> None:
    port = free_port()
    more = f"workers: {workers}\n"
    config = write_settings(file, "http://127.0.0.1:1", f"{HOST}:{port}", more)
    command = (sys.executable, "-c", _STARTS_AS_LONG_AS_IT_LISTENS, "serve", config)
    async with running_process(*command, PORT=str(port)) as process:
        await process.wait_for_output("(?s)" + "starts.*" * workers)
        process.signal(signal.SIGINT)
        status, out, err = await process.end()
    assert (status, out) == (130, "")
    said = [line for line in err.splitlines() if line != "starts" and "dialect unknown" not in line]
    assert said == ["tensorgate: interrupted"]


def _children_of(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.parametrize("workers", [1, 2])
async def test_signals_that_other_servers_know_change_nothing(file: Path, workers: int) -> None:
    gated = GatedResponse()
    more = f"workers: {workers}\nadmin: {HOST}:{free_port()}\n"
    async with (
        ScriptedServer(gated) as server,
        gateway_process(write_settings(file, server.url, more=more)) as (process, url),
        connect(url) as client,
    ):
        await client.send(request("GET", "/v2/x"))
        await server.connection()
        children = _children_of(process.pid)
        assert len(children) == (0 if workers == 1 else 3)
        for pid in (process.pid, *children):
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                os.kill(pid, number)
                by = rf"\[{pid}\]" if children else ""
                line = (
                    rf"WARNING tensorgate{by}: {number.name} is ignored: SIGHUP reads the settings"
                )
                await process.wait_for_output(line)
        gated.may_respond.set()
        assert (await client.read_response()).status == 200


async def test_the_gateway_raises_its_limit_of_open_files(file: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    config = write_settings(file, f"http://{free_address()}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        async with gateway_process(config) as (process, _):
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_an_address_of_another_process_is_an_error(file: Path) -> None:
    async with gateway_process(write_settings(file, "http://127.0.0.1:1")) as (process, url):
        address = url.removeprefix("http://")
        config = write_settings(file, "http://127.0.0.1:1", address)
        assert await run(TENSORGATE, "serve", config) == (
            1,
            "",
            f"tensorgate: cannot listen on {address}: Address already in use\n",
        )
        assert process.running


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_unix_socket_left_by_a_dead_process_is_replaced(file: Path, workers: int) -> None:
    path = file.with_name("gateway.sock")
    async with ScriptedServer() as server:
        config = write_settings(file, server.url, f"unix:{path}", f"workers: {workers}\n")
        for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
            # The second one finds the socket that the first one left behind.
            async with gateway_process(config) as (process, url):
                assert url == f"unix:{path}"
                async with connect(url) as one, connect(url) as other:
                    for client in (one, other):
                        assert (await client.call("GET", "/v2/x")).status == 200
                process.signal(number)
                assert (await process.end())[0] == status


HTML = {"Accept": "text/html"}


async def test_the_demo_shows_six_calls() -> None:
    status, out, err = await run(TENSORGATE, "demo", "--once", "--port", "0")
    assert (status, err) == (0, "")
    assert out.startswith(f"Tensorgate {__version__}, {describe_build()}\n")
    assert re.findall(r"^([1-9])  \S", out, re.MULTILINE) == list("123456")
    assert "Ctrl-C" not in out
    assert "\x1b" not in out  # no colours where nobody sees them


async def test_the_demo_runs_until_ctrl_c() -> None:
    async with running_process(TENSORGATE, "demo", "--port", "0", PYTHONUNBUFFERED="1") as process:
        assert process.process.stdout is not None
        async with asyncio.timeout(TIMEOUT):
            out = await process.process.stdout.readuntil(b"Ctrl-C ends the demo.\n")
        assert b"curl" in out
        page = re.search(rb"operator's page is (http://\S+)/ ", out)
        assert page is not None
        async with connect(page[1].decode()) as operator:
            assert b"<title>" in (await operator.call("GET", "/", None, HTML)).body
        found = re.search(rb"gateway +(http://\S+)", out)
        assert found is not None
        async with connect(found[1].decode()) as client:
            assert (await client.call("GET", "/v2/health/live")).status == 200
        process.signal(signal.SIGINT)
        status, _, err = await process.end()
    assert (status, err) == (0, "")


each_command = pytest.mark.parametrize("command", ["check", "serve"])


def _tls(folder: Path, more: str = "") -> tuple[str, Path]:
    """Give settings that speak TLS, and the key."""
    certificate, key = certificate_files(folder, server_certificate())
    file = Path(key)
    file.chmod(0o600)
    return f"tls: {{certificate: {certificate}, key: {key}{more}}}\n", file


@each_command
async def test_unusable_tls_files_are_an_error(
    ended: Ended, file: Path, tmp_path: Path, command: str
) -> None:
    more, key = _tls(tmp_path)
    key.write_text("no key")
    config = write_settings(file, "http://127.0.0.1:1", more=f"{more}workers: 2\n")
    assert await ended(command, config) == (
        1,
        "",
        f"tensorgate: tls.key: {key} holds no private key in PEM form\n",
    )


def test_check_prints_the_tls_files(call: Call, file: Path, tmp_path: Path) -> None:
    ca = ca_file(tmp_path)
    more, key = _tls(tmp_path, f", client_ca: {ca}")
    _, out, err = call("check", write_settings(file, "http://127.0.0.1:1", more=more))
    assert err == ""
    assert (
        f"TLS on TCP addresses, with the certificate in {key.with_name('certificate.pem')}"
        f"; client certificates required, issued by {ca}\n"
    ) in out


async def test_unchecked_server_certificates_are_warned_of_once(file: Path) -> None:
    upstream = "endpoints: ['https://127.0.0.1:1'], tls: {verify: false}"
    await asyncio.to_thread(
        file.write_text, f"workers: 2\nlisten: 127.0.0.1:0\nupstreams: {{triton: {{{upstream}}}}}\n"
    )
    async with gateway_process(str(file)) as (process, _):
        process.signal(signal.SIGTERM)
        _, _, err = await process.end()
    warning = f"{file}:3: upstreams.triton.tls.verify: certificates are not checked"
    assert err.count(warning) == 1


# --------------------------------------------------------------------------------------------- keys


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
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "people"
    path.write_text("# people\nold-key\n")
    path.chmod(0o600)
    return path


def _config(key_file: Path, url: str = "http://127.0.0.1:1", workers: int = 1) -> str:
    config = key_file.with_name("gateway.yaml")
    config.write_text(CONFIG.format(file=key_file, url=url, workers=workers))
    return str(config)


def _write_keys(key_file: Path, text: str | None) -> None:
    """Write the file of keys, or leave none."""
    key_file.unlink()
    if text is not None:
        key_file.write_text(text)
        key_file.chmod(0o600)


def _serving(config: str) -> AbstractAsyncContextManager[tuple[Process, str]]:
    return gateway_process(config, FAST_FILE_WATCH, TEST_ROBOT_KEYS="robot-key,another-key")


async def _status(client: RawClient, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await client.ask(request("GET", "/v2/models/m", headers=named))).status


def test_check_prints_the_groups_of_keys_of_routes(
    call: Call, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_ROBOT_KEYS", "robot-key")
    status, out, err = call("check", _config(key_file))
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
    key_file: Path,
    command: str,
    workers: int,
    text: str | None,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_ROBOT_KEYS", "robot-key")
    config = _config(key_file, workers=workers)
    _write_keys(key_file, text)
    status, out, err = await ended(command, config)
    assert (status, out) == (1, "")
    # What is not there is told with its line: nothing has to be opened for that.
    place = f"{config}:6" if text is None else "tensorgate"
    assert err.startswith(f"{place}: api_keys.people.file: {key_file}")
    assert fault in err
    assert err.count("\n") == 1
    assert "secret" not in err


@pytest.mark.parametrize("workers", [1, 2])
async def test_keys_are_reloaded_while_connections_stay_open(key_file: Path, workers: int) -> None:
    async with ScriptedServer() as server:
        config = _config(key_file, server.url, workers)
        async with _serving(config) as (process, url):
            async with connect(url) as client, connect(url) as other:
                for each in (client, other):
                    assert await _status(each) == 401
                    assert await _status(each, Authorization="Bearer old-key") == 200
                    assert await _status(each, X_Api_Key="another-key") == 200
                    assert (await each.call("GET", "/v2/health/live")).status == 200
                _write_keys(key_file, "new-key\n")
                renewed = rf"people\.file: keys loaded from {re.escape(str(key_file))}: 1"
                # The parent of workers says it too: those to come begin with what it has.
                processes = workers + (workers > 1)
                await process.wait_for_output("(?s)" + ".*".join([renewed] * processes))
                for each in (client, other):
                    assert await _status(each, Authorization="Bearer old-key") == 401
                    assert await _status(each, Authorization="Bearer new-key") == 200
                    assert await _status(each, X_Api_Key="robot-key") == 200
                _write_keys(key_file, "secret key\n")
                await process.wait_for_output(r"line 1 is not a key.*; keeping the previous keys")
                assert await _status(client, Authorization="Bearer new-key") == 200
            process.signal(signal.SIGTERM)
            status, _, err = await process.end()
    assert status == 0
    for key in ("old-key", "new-key", "robot-key", "another-key", "secret"):
        assert key not in err
