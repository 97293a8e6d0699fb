"""Each incident is one alarm with one sentence: in the log, /status, the page and ``top``.

Two workers serve clients that call all the time. What is wrong is named within ten seconds of its
effect on them, and nothing else is.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.top.client import AdminClient, Poller, Wanted, parse_admin_address
from gateway.top.frame import Frame, plain_page
from gateway.top.view import PANELS
from tests.end_to_end.observe.incidents import INCIDENTS, Incident, Site, begin, incident_site
from tests.resilience.incident_page import is_quoted, is_shown
from tests.support import raw_client
from tests.support.gateway import until

WATCHED = 4.0
"""Seconds after it was named in which no other alarm may come."""


@pytest.mark.parametrize("incident", INCIDENTS.values(), ids=INCIDENTS)
async def test_incident_is_one_alarm_with_one_sentence(incident: Incident, tmp_path: Path) -> None:
    async with incident_site(tmp_path, incident) as site:
        found = await begin(site, incident)
        assert found["level"] == incident.level
        assert bool(found["since"]) is incident.is_dated

        good, bad = site.servers
        log = incident.log.replace("URL", re.escape(bad.url))
        await site.process.wait_for_output(log)
        if incident.is_on_page:
            lines = [line for line in site.process.said.splitlines() if re.search(log, line)]
            assert is_quoted(found["text"]) or any(map(is_shown, lines)), (found["text"], lines)
        status = await site.operator.status()
        (problem,) = status["problems"]
        assert re.search(incident.sentence_of(site), problem["text"])
        assert re.search(incident.status, json.dumps(status))
        endpoint = (await site.endpoints())[bad.url]
        assert endpoint["state"] in incident.states
        assert endpoint["state_text"] or endpoint["state"] == "in_use"
        assert endpoint["state_since"]
        shown = " ".join((await _top(site.operator.url)).split())
        assert re.search(incident.sentence_of(site), shown), shown
        states = "|".join(incident.states).replace("_", " ")
        assert re.search(rf"{re.escape(bad.url)} ({states}) ", shown), shown
        assert (await _outliers(site))[bad.url] == float("slow" in incident.states)
        assert (await _outliers(site))[good.url] == 0
        if incident.event:
            (event,) = (await site.operator.get(f"/api/journal?kind={incident.event}"))["events"]
            assert event["why"]

        async for problems in _watched(site):
            assert len(problems) == 1, problems


async def test_alarm_of_a_silent_server_goes_on_when_its_calls_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_client, "TIMEOUT", 60.0)
    incident = replace(INCIDENTS["frozen, with a long timeout"], idle_timeout="12s")
    async with incident_site(tmp_path, incident) as site:
        found = await begin(site, incident)
        bad = site.servers[1].url
        async with asyncio.timeout(60):
            while not (await site.endpoints())[bad]["failures_total"]:
                (problem,) = await site.problems()
                assert problem["since"] == found["since"]
                await asyncio.sleep(0.2)
        async for (problem,) in _watched(site):
            assert problem["since"] == found["since"]

        site.servers[1].resume()
        await site.process.wait_for_output("is not failing any more")
        assert site.process.said.count(f"{bad} of upstream model is ") == 2

        async def is_over() -> bool:
            return not await site.problems()

        await until(is_over, 60)


async def test_server_that_comes_back_is_no_second_alarm(tmp_path: Path) -> None:
    """Its failures are recent still, but over."""
    incident = INCIDENTS["canary down"]
    async with incident_site(tmp_path, incident) as site:
        await begin(site, incident)
        await site.servers[1].start()
        async with asyncio.timeout(60):
            while problems := await site.problems():
                (problem,) = problems
                assert re.search(incident.sentence_of(site), problem["text"]), problem
                await asyncio.sleep(0.1)
        async for problems in _watched(site):
            assert not problems
        assert "failing" not in site.process.said


async def _watched(site: Site) -> AsyncIterator[list[dict[str, Any]]]:
    """Give what is wrong, again and again for some seconds."""
    end = time.monotonic() + WATCHED
    while time.monotonic() < end:
        yield await site.problems()
        await asyncio.sleep(0.2)


async def _top(admin: str) -> str:
    """Return what ``tensorgate top --once`` prints."""
    address = parse_admin_address(admin)
    async with AdminClient(address) as client:
        poller = Poller(client, 1.0)
        for panel in PANELS:
            await poller.read(Wanted(panel))
    page = plain_page(Frame(address.shown, 1.0), poller.snapshot, 300)
    return "\n".join(line.plain for line in page)


async def _outliers(site: Site) -> dict[str, float]:
    samples = await site.operator.samples("tensorgate_endpoint_latency_outlier")
    return {sample.labels["endpoint"]: sample.value for sample in samples}
