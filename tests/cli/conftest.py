"""Calls the command, in this process where that is enough."""

from collections.abc import Awaitable, Callable

import pytest

from gateway.cli import main
from tests.support.gateway_process import TENSORGATE, run

Call = Callable[..., tuple[int | str | None, str, str]]
"""What ends the command, and what it prints; as ``run``."""
Ended = Callable[..., Awaitable[tuple[int | str | None, str, str]]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Call the command in this process, where it does not serve: a process takes a second."""

    def call(*arguments: str) -> tuple[int | str | None, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments, prog_name="tensorgate")
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def ended(call: Call) -> Ended:
    """Run the command to its end: in a process if it is to serve."""

    async def ended(*arguments: str) -> tuple[int | str | None, str, str]:
        return await run(TENSORGATE, *arguments) if arguments[0] == "serve" else call(*arguments)

    return ended
