import socket
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from gateway.app import loaded_resources
from tests.support.checks.fast_path import fast_path_requests as fast_path_requests
from tests.support.event_loops import product_loop
from tests.support.gateway import no_errors_logged, no_leaks
from tests.support.http_messages import with_long_head

pytest_asyncio_loop_factories = product_loop


@pytest.fixture(autouse=True)
async def clean(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """No test here may leave a task or a socket behind, or make anything log an error."""
    with no_errors_logged(caplog):
        async with no_leaks():
            yield


@pytest.fixture(params=[bytes, with_long_head], ids=["fast path", "streaming path"])
def path(request: pytest.FixtureRequest) -> Callable[[bytes], bytes]:
    """Return a function that makes a request take one of the paths."""
    change: Callable[[bytes], bytes] = request.param
    return change


@pytest.fixture
def one_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """All gateways have the same identity, so that recorded requests do not differ by it."""
    monkeypatch.setattr(loaded_resources, "new_identity", lambda: "0" * 16)


@pytest.fixture
def unused_backlog() -> Iterator[str]:
    """The URL of a server that accepts no connection."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(busy.getsockname())
        yield "http://{}:{}".format(*busy.getsockname())
        for sock in waiting:
            sock.close()
