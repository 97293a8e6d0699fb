"""`tensorgate top` in a real terminal, in front of a real gateway."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import termios
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pexpect
import pyte
import pytest

from gateway.cli import main
from tests.support.addresses import HOST, free_address
from tests.support.gateway_process import (
    TENSORGATE,
    TIMEOUT,
    Process,
    gateway_process,
    run,
    write_settings,
)
from tests.support.http_messages import http_response, request
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import ScriptedServer, always_respond

PYTHON = (sys.executable, "-c")
RESPONSE = b'{"outputs": []}'


_ALTERNATE_SCREEN = re.compile(rb"\x1b\[\?1049([hl])")
_ENVIRON = {"TERM": "xterm-256color", "COLUMNS": "77", "PYTHONWARNINGS": "default"}
"""A terminal with colours; a size in the environment does not count there."""


class RealTerminal:
    """A command in a terminal; the keys that are sent, and the lines that are shown."""

    def __init__(self, child: pexpect.spawn[bytes], size: tuple[int, int]) -> None:
        self.child = child
        self.raw = b""
        """All that the command has written."""
        self._screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        """Return what the terminal shows, without blanks at the ends of lines."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        """Return all lines."""
        return "\n".join(self.lines)

    @property
    def on_alternate_screen(self) -> bool:
        """Return whether the command shows another screen than that of the shell."""
        switches = _ALTERNATE_SCREEN.findall(self.raw)
        return bool(switches) and switches[-1] == b"h"

    @property
    def shows_cursor(self) -> bool:
        """Return whether the cursor is visible."""
        return not self._screen.cursor.hidden

    def modes(self) -> list[object]:
        """Return the modes of the line: echo, signals and others."""
        modes: list[object] = [*termios.tcgetattr(self.child.child_fd)]
        return modes

    def send(self, keys: str) -> None:
        """Press keys."""
        self.child.send(keys)

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the window, of which the command gets SIGWINCH."""
        self.read()
        self._screen.resize(lines, columns)
        self.child.setwinsize(lines, columns)

    def read(self) -> bool:
        """Read what was written; return whether the command may write more."""
        try:
            while True:
                data = self.child.read_nonblocking(65536, 0)
                self.raw += data
                self._stream.feed(data)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False

    async def until(self, shown: str | Callable[[], object]) -> None:
        """Wait until the terminal shows a text, or until a condition holds."""
        try:
            async with asyncio.timeout(TIMEOUT):
                while not (shown in self.text if isinstance(shown, str) else shown()):
                    assert self.read(), f"the command has ended:\n{self.text}"
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{shown!r} is not shown:\n{self.text}") from None

    async def end(self) -> int:
        """Wait for the end of the command; return its status, negative for a signal."""
        async with asyncio.timeout(TIMEOUT):
            while self.read() or self.child.isalive():  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.01)
        self.child.close()
        return -self.child.signalstatus if self.child.signalstatus else self.child.exitstatus or 0


@asynccontextmanager
async def terminal(
    *arguments: str,
    size: tuple[int, int] = (80, 24),
    environ: Mapping[str, str] | None = None,
    command: tuple[str, ...] = (TENSORGATE, "top"),
) -> AsyncIterator[RealTerminal]:
    """Run a command in a terminal of some columns and lines."""
    program, *more = command
    with warnings.catch_warnings():
        # Newer versions of Python warn of threads at a fork; the child only starts the command.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = pexpect.spawn(
            program,
            [*more, *arguments],
            dimensions=size[::-1],
            env={**os.environ, **_ENVIRON, **(environ or {})},
            timeout=TIMEOUT,
        )
    child.delaybeforesend = None
    running = RealTerminal(child, size)
    try:
        yield running
    finally:
        if child.isalive():
            child.kill(signal.SIGKILL)
        child.close(force=True)


@dataclass
class _Running:
    """A gateway that runs, with its addresses."""

    process: Process
    url: str
    admin: str

    async def call(self, *targets: str) -> None:
        """Send requests."""
        async with connect(self.url) as client:
            for target in targets:
                await client.ask(request("GET", target))


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """A server that responds to everything."""
    async with ScriptedServer(always_respond(http_response(RESPONSE))) as server:
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


@asynccontextmanager
async def _gateway(
    file: Path, server: ScriptedServer, admin: str = "", more: str = ""
) -> AsyncIterator[_Running]:
    admin = admin or free_address()
    config = write_settings(file, server.url, more=f"admin: {admin}\n{more}")
    async with gateway_process(config) as (process, url):
        await process.wait_for_output(r"listening on \S+ \(admin\)")
        yield _Running(process, url, admin)


async def test_each_panel_is_shown_at_each_size(file: Path, server: ScriptedServer) -> None:
    async with _gateway(file, server) as gateway, terminal(gateway.admin) as top:
        await top.until("Nothing is wrong.")
        assert len(top.lines) == 24
        assert top.lines[0].startswith(f" Tensorgate top   {gateway.admin}   0.1.0   up ")
        assert top.lines[1].startswith("[1 Overview] 2 Endpoints  3 Models  4 Calls")
        assert top.lines[-1].startswith(" 1-4 panel")
        await gateway.call(*["/v2/models/add"] * 5)
        await top.until(lambda: re.search(r"Calls +[0-9.]*[1-9][0-9.]*/s", top.text))
        for key, shown in [("2", server.url), ("3", " add "), ("4", " 200 OK ")]:
            top.send(key)
            await top.until(shown)
        for size in [(120, 40), (40, 10), (80, 24)]:
            top.resize(*size)
            await top.until(lambda: top.lines[-1].startswith(" 1-4 panel"))
            for key, shown in [
                ("1", "p99, last"),
                ("2", " in use"),
                ("3", " add "),
                ("4", " add "),
            ]:
                top.send(key)
                await top.until(partial(_shows, top, f"[{key} ", shown))
                assert len(top.lines) == size[1]
                assert top.lines[-1].startswith(" 1-4 panel")
        top.send("q")
        assert await top.end() == 0


def _shows(top: RealTerminal, *texts: str) -> bool:
    """Tell whether the screen has all texts now; a screen that is drawn in parts has some."""
    return all(text in top.text for text in texts)


async def test_keys_choose_panels_pause_calls_and_filter_rows(
    file: Path, server: ScriptedServer, tmp_path: Path
) -> None:
    socket = f"unix:{tmp_path}/admin.sock"
    async with _gateway(file, server, socket) as gateway, terminal(socket) as top:
        await top.until("Nothing is wrong.")
        assert "unix:" in top.lines[0]
        for key, panel in [("\t", "[2 E"), ("\x1b[C", "[3 M"), ("\x1b[Z", "[2 E"), ("4", "[4 C")]:
            top.send(key)
            await top.until(panel)
        await gateway.call("/v2/models/apple")
        await top.until(" apple ")
        top.send("f")
        await top.until("Paused: 1 of 1")
        await gateway.call("/v2/models/pear")
        top.send("3")
        await top.until(" pear ")  # the gateway has told of it
        top.send("4")
        await top.until("Paused: 1 of 1")
        assert " pear " not in top.text
        top.send("f")
        await top.until(" pear ")
        assert "Follows: 2 of 2" in top.text
        top.send("/pe")
        await top.until("Filter: pe_")
        await top.until(lambda: " apple " not in top.text)
        assert " pear " in top.text
        top.send("\r")
        await top.until('Only with "pe"')
        top.send("\x1b")
        await top.until(" apple ")


async def test_a_gateway_that_goes_away_is_told_and_read_again_when_it_is_back(
    file: Path, server: ScriptedServer
) -> None:
    admin = free_address()
    async with terminal(admin, "--interval", "200ms") as top:
        await top.until(f"Nothing read for 0 s: no gateway has its admin address at {admin}")
        async with _gateway(file, server, admin) as gateway:
            await top.until("Nothing is wrong.")
            assert "Nothing read" not in top.text
            gateway.process.signal(signal.SIGKILL)
            await gateway.process.end()
            await top.until("Nothing read for")
            await top.until("Below is the state of")
            assert "Nothing is wrong." in top.text
            assert "version 0.1.0" in top.text
        async with _gateway(file, server, admin):
            await top.until("Notice: this is another gateway process than before")
            assert "Nothing read" not in top.text
        top.send("q")
        assert await top.end() == 0


@pytest.mark.parametrize("key", ["q", "\x03", "/\x04"])
async def test_keys_leave_a_sane_terminal(key: str) -> None:
    # The shell that waits for the command keeps the terminal, so that its modes can be read.
    script = f'trap : INT; "{TENSORGATE}" top {free_address()}; echo status $?; sleep 60'
    async with terminal(command=("/bin/sh", "-c", script)) as shell:
        modes = shell.modes()
        await shell.until("Nothing read")
        assert shell.on_alternate_screen
        assert not shell.shows_cursor
        assert shell.modes() != modes
        shell.send(f"\x132{key}")  # Ctrl-S does not stop the output
        await shell.until("status 0")
        assert shell.modes() == modes
        _check_is_given_back(shell)


def _check_is_given_back(shell: RealTerminal) -> None:
    assert not shell.on_alternate_screen
    assert shell.shows_cursor


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
async def test_a_signal_gives_the_terminal_back_and_is_told_to_the_shell(number: int) -> None:
    async with terminal(free_address()) as top:
        await top.until("Nothing read")
        top.child.kill(number)
        assert await top.end() == (0 if number == signal.SIGINT else -number)
        _check_is_given_back(top)


async def test_an_error_of_our_own_leaves_a_sane_terminal() -> None:
    for broken in ("frame._footer", "client.AdminClient.get"):
        program = (
            "from gateway.top import client, frame\n"
            "def fail(*_): raise ZeroDivisionError('of our own')\n"
            f"{broken} = fail\n"
            "from gateway.cli import main; main(['top', '127.0.0.1:1'])"
        )
        async with terminal(command=(*PYTHON, program)) as top:
            assert await top.end() == 1
            assert "ZeroDivisionError: of our own" in top.text
            _check_is_given_back(top)


async def test_a_signal_that_interrupts_does_not_end_the_program() -> None:
    """As ``bg`` does with a program that was suspended: it stops again, in the midst of a call."""
    program = """
import termios
set_modes, calls = termios.tcsetattr, []
def interrupted(*arguments):
    calls.append(arguments)
    if len(calls) % 2:
        raise termios.error(4, "Interrupted system call")
    set_modes(*arguments)
termios.tcsetattr = interrupted
from gateway.cli import main; main(["top", "127.0.0.1:1"])
"""
    async with terminal(command=(*PYTHON, program)) as top:
        await top.until("Nothing read")
        top.send("q")  # the modes are set: a key comes without Enter
        assert await top.end() == 0


async def test_a_suspended_program_gives_the_terminal_back_and_takes_it_again() -> None:
    async with terminal(free_address()) as top:
        modes = top.modes()
        await top.until("Nothing read")
        in_use = top.modes()
        top.send("\x1a")  # Ctrl-Z
        await top.until(lambda: top.modes() != in_use and not top.on_alternate_screen)
        assert top.modes() == modes
        top.child.kill(signal.SIGCONT)
        await top.until(lambda: top.on_alternate_screen and top.lines[-1].startswith(" 1-4 panel"))
        top.send("2")
        await top.until("[2 Endpoints]")


async def test_a_plain_page_is_printed_once(file: Path, server: ScriptedServer) -> None:
    """It goes to a pipe, to a dumb terminal, and to a real one if the user asks for it."""
    async with _gateway(file, server) as gateway:
        await gateway.call("/v2/models/add")
        await _until_listed(gateway, b'"add"')
        for arguments in ((), ("--once",)):
            command = (TENSORGATE, "top", gateway.admin, *arguments)
            status, out, err = await run(*command, FORCE_COLOR="1")
            assert (status, err) == (0, "")
            assert "\x1b" not in out
            for text in ("OVERVIEW", "ENDPOINTS", "MODELS", "CALLS", server.url, "200 OK", "0.1.0"):
                assert text in out
        await _check_plain_page(terminal(gateway.admin, "--once", size=(80, 100)))
        await _check_plain_page(terminal(gateway.admin, size=(80, 100), environ={"TERM": "dumb"}))
        script = f'"{TENSORGATE}" top {gateway.admin} | head -n 1'
        status, out, err = await run("/bin/sh", "-c", script)
        assert (status, err) == (0, "")
        assert out.startswith(" Tensorgate top")


async def _until_listed(gateway: _Running, name: bytes) -> None:
    """Wait for the end of the second of a call, which is listed then."""
    listed, host = b"", {"Host": gateway.admin}
    async with connect(f"http://{gateway.admin}") as operator, asyncio.timeout(TIMEOUT):
        while name not in listed:
            listed = (await operator.call("GET", "/api/calls", None, host)).body
            await asyncio.sleep(0.1)


async def _check_plain_page(prints: AbstractAsyncContextManager[RealTerminal]) -> None:
    async with prints as top:
        assert await top.end() == 0
        assert "OVERVIEW" in top.lines
        assert b"\x1b" not in top.raw


@pytest.mark.parametrize("arguments", [(), ("--once",)])
def test_once_without_a_gateway_is_an_error(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    address = free_address()
    with pytest.raises(SystemExit) as ended:
        main(["top", address, *arguments], prog_name="tensorgate")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (1, "")
    assert err == (
        f"tensorgate: no gateway has its admin address at {address}: the connection was refused\n"
    )


async def test_a_slow_gateway_does_not_stop_the_keys() -> None:
    writers: list[asyncio.StreamWriter] = []
    stalled = await asyncio.start_server(lambda _, writer: writers.append(writer), HOST, 0)
    host, port = stalled.sockets[0].getsockname()
    async with stalled, terminal(f"{host}:{port}") as top:
        await top.until("Reads …")
        top.send("3")
        await top.until("[3 Models]")
        top.send("q")
        assert await top.end() == 0
        for writer in writers:
            writer.close()
            await writer.wait_closed()
