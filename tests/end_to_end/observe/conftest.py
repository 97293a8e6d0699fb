"""Sends the same request down both paths, which must leave the same record."""

from collections.abc import Callable

import pytest

from tests.support.http_messages import with_long_head

Way = Callable[[bytes], bytes]


def _as_it_is(data: bytes) -> bytes:
    return data


@pytest.fixture(params=[_as_it_is, with_long_head], ids=["fast path", "streaming path"])
def way(request: pytest.FixtureRequest) -> Way:
    """Return what makes of a request one that takes the fast path, or the streaming path."""
    chosen: Way = request.param
    return chosen
