from __future__ import annotations

import asyncio

import pytest

from gateway.app.background import BackgroundTask


class _Noting(BackgroundTask):
    def __init__(self) -> None:
        self.notes: list[str] = []

    async def run(self) -> None:
        self.notes.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.notes.append("ended")


async def test_background_task_runs_while_its_context_is_open() -> None:
    async with _Noting() as noting:
        await asyncio.sleep(0)
        assert noting.notes == ["begun"]
    assert noting.notes == ["begun", "ended"]


async def test_failed_background_task_is_logged_and_ends_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(BackgroundTask):
        async def run(self) -> None:
            raise ValueError("failed")

    async with Failing():
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # from Python 3.12 on, a task can be awaited before its callbacks run
    assert caplog.messages == ["background task Failing failed and stopped"]
    assert "ValueError: failed" in caplog.text
