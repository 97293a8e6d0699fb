"""What the page shows of a gateway: one state for all operators, and new calls."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.admin import view as view_module
from gateway.admin.view import GatewayView
from tests.admin.site import ChosenSource, worker_status
from tests.support.gateway import no_leaks


@pytest.fixture
async def source() -> AsyncIterator[ChosenSource]:
    async with no_leaks():
        yield ChosenSource()


async def test_operators_who_look_at_once_see_one_state(source: ChosenSource) -> None:
    """Workers are asked once a second, however many pages are open."""
    async with GatewayView(source) as view:
        await asyncio.gather(
            *(view.overview() for _ in range(20)),
            *(view.topology({}) for _ in range(20)),
            *(view.models({}) for _ in range(20)),
        )
    assert source.asked == 1


async def test_state_is_read_again_when_it_is_old(
    source: ChosenSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "_CACHE_SECONDS", 0.0)
    async with GatewayView(source) as view:
        assert (await view.overview())["now"]["connections"] == 3
        source.statuses = [worker_status(connections=1), worker_status(connections=1)]
        assert (await view.overview())["now"]["connections"] == 2


async def test_state_that_cannot_be_read_is_tried_again(source: ChosenSource) -> None:
    async with GatewayView(source) as view:
        source.error = RuntimeError("nonsense")
        with pytest.raises(RuntimeError):
            await view.overview()
        source.error = None
        assert (await view.overview())["now"]["connections"] == 3


async def test_invalid_query_asks_no_worker(source: ChosenSource) -> None:
    async with GatewayView(source) as view:
        for describe in (view.topology, view.calls):
            with pytest.raises(ValueError, match="limit"):
                await describe({"limit": "x"})
    assert source.asked == 0


async def test_each_call_is_followed_once(source: ChosenSource) -> None:
    source.add_call(id="a", model="m")
    source.add_call(id="b", model="n")
    async with GatewayView(source) as view:
        document, positions = await view.calls_since((), {"model": "m"})
        assert [each["id"] for each in document["calls"]] == ["a"]
        assert document["kept"] == 2
        document, positions = await view.calls_since(positions, {})
        assert document["calls"] == []
        source.add_call(id="c")
        document, _ = await view.calls_since(positions, {})
        assert [each["id"] for each in document["calls"]] == ["c"]
        assert len((await view.calls({}))["calls"]) == 3
