import asyncio

from gateway.proxy.admission.conversion_scheduler import ConversionScheduler


async def _convert(
    scheduler: ConversionScheduler, name: str, log: list[str], chunks: int, client: str = ""
) -> None:
    for _ in range(chunks):
        log.append(name)
        await scheduler.next_slice(client)


async def _laps(log: list[str]) -> None:
    """Log each time slice of a conversion."""
    while True:
        log.append("|")
        await asyncio.sleep(0)


async def test_conversions_share_the_time_slices() -> None:
    log: list[str] = []
    scheduler = ConversionScheduler()
    laps = asyncio.create_task(_laps(log))
    await asyncio.gather(*(_convert(scheduler, name, log, 10) for name in "abcd"))
    laps.cancel()
    later = "".join(log).strip("|").split("|")[3:]  # all start together
    assert max(map(len, later)) == 1
    assert [log.count(name) for name in "abcd"] == [10] * 4
    order = "".join(later)
    assert all(set(order[i : i + 4]) == set("abcd") for i in range(len(order) - 8))


async def test_clients_take_turns_however_many_calls_they_have() -> None:
    log: list[str] = []
    scheduler = ConversionScheduler()
    greedy = [_convert(scheduler, "g", log, 10, "greedy") for _ in range(100)]
    await asyncio.gather(*greedy, *(_convert(scheduler, name, log, 10, name) for name in "ab"))
    later = log[102:]  # all start together
    assert later[:35].count("a") == later[:35].count("b") == 9


async def test_cancelled_conversion_passes_its_time_slice_on() -> None:
    log: list[str] = []
    scheduler = ConversionScheduler()
    tasks = [asyncio.create_task(_convert(scheduler, name, log, 1000)) for name in "abcd"]
    for _ in range(20):
        await asyncio.sleep(0)
    for task in tasks[1:]:
        task.cancel()
    before = log.count("a")
    for _ in range(20):
        await asyncio.sleep(0)
    assert log.count("a") >= before + 10
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.wait_for(scheduler.next_slice(), 5)


async def test_free_time_slice_is_taken_at_once() -> None:
    scheduler = ConversionScheduler()
    assert scheduler.try_take_slice()
    assert not scheduler.try_take_slice()
    waiting = asyncio.create_task(scheduler.next_slice())
    await asyncio.sleep(0)
    assert not scheduler.try_take_slice()  # the waiting conversion has it
    await waiting
    await asyncio.sleep(0)
    assert scheduler.try_take_slice()


async def test_waiting_conversion_runs_before_a_new_one() -> None:
    scheduler = ConversionScheduler()
    log: list[str] = []
    tasks = [asyncio.create_task(_convert(scheduler, name, log, 10)) for name in "ab"]
    await asyncio.sleep(0)
    while not all(task.done() for task in tasks):
        if scheduler.try_take_slice():
            log.append("t")
        await asyncio.sleep(0)
    assert "".join(log).strip("t").count("t") <= 1
