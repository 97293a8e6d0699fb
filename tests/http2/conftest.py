from tests.support.event_loops import both_loops

pytest_asyncio_loop_factories = both_loops
