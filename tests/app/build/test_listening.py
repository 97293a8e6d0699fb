from collections.abc import Iterator

import pytest

from gateway.app.build.listening import BoundAddress, UnusableSettingsError, close, listen
from gateway.settings.values.addresses import TcpAddress
from tests.support.addresses import HOST, OTHER_HOST, free_port

IN_USE = "Address already in use"
RESTART = " by {} of the gateway itself: such a change takes a restart"
TOGETHER = " by {} of the gateway itself: the two cannot be had together"


@pytest.fixture
def before(request: pytest.FixtureRequest) -> Iterator[tuple[BoundAddress, ...]]:
    """Listen on the host that the test names, and on a free port."""
    listening = listen([TcpAddress(request.param, 0)])
    yield listening
    close(listening)


def _port(before: tuple[BoundAddress, ...]) -> int:
    return int(before[0].sockets[0].getsockname()[1])


@pytest.mark.parametrize(
    ("before", "host"),
    [(HOST, "0.0.0.0"), ("0.0.0.0", HOST), ("127.0.0.1", "localhost")],
    indirect=["before"],
    ids=["wider", "narrower", "by its name"],
)
def test_conflict_with_a_removed_address_is_named(
    before: tuple[BoundAddress, ...], host: str
) -> None:
    had = TcpAddress(*before[0].sockets[0].getsockname())
    wanted = TcpAddress(host, had.port)
    with pytest.raises(UnusableSettingsError) as raised:
        listen([wanted], before=before)
    assert str(raised.value) == f"cannot listen on {wanted}: {IN_USE}{RESTART.format(had)}"
    assert before[0].sockets[0].fileno() >= 0


def test_conflict_of_two_wanted_addresses_is_named() -> None:
    port = free_port()
    first, every = (TcpAddress(host, port) for host in (HOST, "0.0.0.0"))
    for known in (False, True):
        before = listen([first]) if known else ()
        with pytest.raises(UnusableSettingsError) as raised:
            listen([first, every], before=before)
        assert str(raised.value) == f"cannot listen on {every}: {IN_USE}{TOGETHER.format(first)}"
        close(before)


@pytest.mark.parametrize("before", [HOST], indirect=True, ids=["host"])
def test_conflict_with_another_process_is_not_blamed_on_the_gateway(
    before: tuple[BoundAddress, ...],
) -> None:
    wanted = TcpAddress(OTHER_HOST, _port(before))
    others = listen([wanted])
    with pytest.raises(UnusableSettingsError) as raised:
        listen([wanted], before=before)
    assert str(raised.value) == f"cannot listen on {wanted}: {IN_USE}"
    close(others)
