import asyncio
import logging
from collections.abc import Callable

import pytest

from gateway.routing.health import ProbePolicy
from gateway.upstream.pool.dialect import Interpreter
from gateway.upstream.pool.health_check import Prober
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.supervisor import Keeper
from tests.support.doubles.streaming import Log, ScriptedEndpoint
from tests.support.gateway import nothing_left, until


class _Attending(Prober):
    """Notes who is attended."""

    def __init__(self, fault: Exception | None = None) -> None:
        super().__init__("/", 1, 1, ProbePolicy())
        self.attended: list[Member] = []
        self._fault = fault

    async def attend(self, member: Member, changed: Callable[[], None]) -> None:
        self.attended.append(member)
        try:
            if self._fault is not None:
                raise self._fault
            await asyncio.Event().wait()
        finally:
            self.attended.remove(member)


def _members(count: int) -> list[Member]:
    return [Member(ScriptedEndpoint(Log(), url=f"http://{number}")) for number in range(count)]


async def test_each_member_is_attended_until_it_is_let_go() -> None:
    prober = _Attending()
    keeper = Keeper(prober)
    one, two, three = _members(3)
    async with nothing_left():
        keeper.take_in([one, two], lambda member: None)
        await until(lambda: prober.attended == [one, two])
        keeper.let_go([one])
        keeper.take_in([three], lambda member: None)
        await until(lambda: prober.attended == [two, three])
        await keeper.close()
        assert not prober.attended


async def test_what_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    keeper = Keeper(_Attending(ZeroDivisionError()))
    async with nothing_left():
        keeper.take_in(_members(1), lambda member: None)
        await until(lambda: caplog.records)
        await keeper.close()
    (record,) = caplog.records
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
    assert "ZeroDivisionError" in caplog.text


async def test_where_nothing_is_wanted_there_are_no_tasks() -> None:
    keeper = Keeper()
    tasks = asyncio.all_tasks()
    keeper.take_in(_members(3), lambda member: None)
    await keeper.look_up(lambda endpoints: None)
    assert asyncio.all_tasks() == tasks
    await keeper.close()


class _Listening(Interpreter):
    """Notes who is doubted."""

    def __init__(self) -> None:
        super().__init__("u", 60, 60)
        self.doubted: list[Member] = []

    async def attend(self, member: Member, changed: Callable[[], None]) -> None:
        await asyncio.Event().wait()

    def doubt(self, member: Member) -> None:
        self.doubted.append(member)


async def test_one_that_is_well_again_may_be_another_server() -> None:
    class Telling(_Attending):
        async def attend(self, member: Member, changed: Callable[[], None]) -> None:
            changed()

    interpreter = _Listening()
    keeper = Keeper(Telling(), interpreter=interpreter)
    calls: list[Member] = []
    members = _members(2)
    async with nothing_left():
        keeper.take_in(members, calls.append)
        await until(lambda: calls == members)
        assert interpreter.doubted == members
        await keeper.close()
