import asyncio
import logging
from collections.abc import Callable

import pytest

from gateway.routing.endpoint_health import HealthCheckPolicy
from gateway.upstream.pool.checks import HealthChecker, PoolSupervisor
from gateway.upstream.pool.dialect import DialectDetector
from gateway.upstream.pool.member import Member
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint
from tests.support.gateway import no_leaks, until


class _Attending(HealthChecker):
    """Records the members whose task runs."""

    def __init__(self, fault: Exception | None = None) -> None:
        super().__init__("/", 1, 1, HealthCheckPolicy())
        self.attended: list[Member] = []
        self._fault = fault

    async def run(self, member: Member, changed: Callable[[], None]) -> None:
        self.attended.append(member)
        try:
            if self._fault is not None:
                raise self._fault
            await asyncio.Event().wait()
        finally:
            self.attended.remove(member)


def _members(count: int) -> list[Member]:
    return [Member(ScriptedEndpoint(EventLog(), url=f"http://{number}")) for number in range(count)]


async def test_tasks_of_a_member_run_until_it_is_removed() -> None:
    health_checker = _Attending()
    supervisor = PoolSupervisor(health_checker)
    one, two, three = _members(3)
    async with no_leaks():
        supervisor.add([one, two], lambda member: None)
        await until(lambda: health_checker.attended == [one, two])
        supervisor.remove([one])
        supervisor.add([three], lambda member: None)
        await until(lambda: health_checker.attended == [two, three])
        await supervisor.close()
        assert not health_checker.attended


async def test_failing_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = PoolSupervisor(_Attending(ZeroDivisionError()))
    async with no_leaks():
        supervisor.add(_members(1), lambda member: None)
        await until(lambda: caplog.records)
        await supervisor.close()
    (record,) = caplog.records
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
    assert "ZeroDivisionError" in caplog.text


async def test_failed_task_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    class FailingOnce(_Attending):
        async def run(self, member: Member, changed: Callable[[], None]) -> None:
            if not caplog.records:
                raise ZeroDivisionError
            await super().run(member, changed)

    health_checker = FailingOnce()
    supervisor = PoolSupervisor(health_checker)
    members = _members(1)
    async with no_leaks():
        supervisor.add(members, lambda member: None)
        await until(lambda: health_checker.attended == members)
        await supervisor.close()
        assert not health_checker.attended


class _Listening(DialectDetector):
    """Records the members that are rechecked."""

    def __init__(self) -> None:
        super().__init__("u", 60, 60)
        self.rechecked: list[Member] = []

    async def run(self, member: Member, changed: Callable[[], None]) -> None:
        await asyncio.Event().wait()

    def recheck(self, member: Member) -> None:
        self.rechecked.append(member)


async def test_health_change_rechecks_the_dialect() -> None:
    class Telling(_Attending):
        async def run(self, member: Member, changed: Callable[[], None]) -> None:
            changed()

    dialect_detector = _Listening()
    supervisor = PoolSupervisor(Telling(), dialect_detector=dialect_detector)
    calls: list[Member] = []
    members = _members(2)
    async with no_leaks():
        supervisor.add(members, calls.append)
        await until(lambda: calls == members)
        assert dialect_detector.rechecked == members
        await supervisor.close()
