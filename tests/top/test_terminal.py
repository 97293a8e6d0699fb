"""A terminal is given back as it was, in every way in which a program can end."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.top.real_terminal import PYTHON, RealTerminal, terminal

_PROGRAM = """
import os, select, sys
from gateway.top.terminal import Terminal
with Terminal(0, 1) as terminal:
    terminal.write(b"in use, %d columns\\r\\n" % terminal.size()[0])
    while terminal.ended_by is None:
        ready, _, _ = select.select([0, terminal.wakeup], [], [])
        if terminal.wakeup in ready:
            os.read(terminal.wakeup, 100)
            terminal.write(b"woken, %d columns\\r\\n" % terminal.size()[0])
        if 0 in ready:
            key = os.read(0, 100)
            if key == b"x":
                1 / 0
            if key == b"w":
                terminal.wake()
            if key == b"q":
                break
            terminal.write(b"key %b\\r\\n" % key.hex().encode())
print("ended by", terminal.ended_by)
"""
COMMAND = (*PYTHON, _PROGRAM)


def _is_as_before(shell: RealTerminal, modes: list[object]) -> bool:
    return shell.modes() == modes and not shell.on_alternate_screen and shell.shows_cursor


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("q", "ended by None"),
        ("\x03", "ended by 2"),
        ("\x1c", "ended by 3"),
        ("x", "ZeroDivisionError"),
    ],
)
async def test_a_terminal_is_given_back_after_a_key(key: str, shown: str) -> None:
    async with terminal(command=COMMAND) as shell:
        modes = shell.modes()
        await shell.until("in use, 80 columns")
        assert shell.on_alternate_screen
        assert not shell.shows_cursor
        assert shell.modes() != modes
        shell.send(key)
        await shell.end()
        assert shown in shell.text
        assert not shell.on_alternate_screen
        assert shell.shows_cursor


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
async def test_a_terminal_is_given_back_after_a_signal(number: int) -> None:
    async with terminal(command=COMMAND) as shell:
        await shell.until("in use")
        shell.child.kill(number)
        await shell.end()
        assert f"ended by {number}" in shell.text
        assert not shell.on_alternate_screen


async def test_the_modes_of_the_line_are_as_before() -> None:
    run = f"subprocess.run([sys.executable, '-c', {_PROGRAM!r}])"
    program = f"import subprocess, sys, time; {run}; print('shell'); time.sleep(60)"
    async with terminal(command=(*PYTHON, program)) as shell:
        modes = shell.modes()
        await shell.until("in use")
        assert shell.modes() != modes
        shell.send("q")
        await shell.until("shell")
        assert _is_as_before(shell, modes)


async def test_a_signal_that_interrupts_does_not_end_the_program() -> None:
    """As ``bg`` does with a program that was suspended: it stops again, in the midst of a call."""
    interrupting = """
import termios
set_modes, calls = termios.tcsetattr, []
def interrupted(*arguments):
    calls.append(arguments)
    if len(calls) % 2:
        raise termios.error(4, "Interrupted system call")
    set_modes(*arguments)
termios.tcsetattr = interrupted
"""
    async with terminal(command=(*PYTHON, interrupting + _PROGRAM)) as shell:
        await shell.until("in use")
        shell.send("a")
        await shell.until("key 61")  # the modes are set: a key comes without Enter
        shell.send("q")
        await shell.end()
        assert "ended by None" in shell.text


async def test_keys_come_at_once_and_without_echo() -> None:
    async with terminal(command=COMMAND) as shell:
        await shell.until("in use")
        shell.send("a")
        await shell.until("key 61")
        assert "a" not in shell.lines
        shell.send("\x13")  # Ctrl-S
        await shell.until("key 13")
        shell.send("\r")
        await shell.until("key 0d")


async def test_a_new_size_and_another_thread_wake_the_program() -> None:
    async with terminal(command=COMMAND) as shell:
        await shell.until("in use")
        shell.resize(100, 30)
        await shell.until("woken, 100 columns")
        shell.send("w")
        await shell.until(lambda: shell.text.count("woken") == 2)


async def test_a_program_that_is_suspended_gives_the_terminal_back() -> None:
    async with terminal(command=COMMAND) as shell:
        modes = shell.modes()
        await shell.until("in use")
        shell.send("\x1a")  # Ctrl-Z
        await shell.until(lambda: not shell.on_alternate_screen)
        async with asyncio.timeout(10):
            while shell.modes() != modes:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.01)
        shell.child.kill(signal.SIGCONT)
        await shell.until(lambda: shell.on_alternate_screen)
        shell.send("a")
        await shell.until("key 61")
