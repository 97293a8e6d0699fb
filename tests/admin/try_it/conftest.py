from tests.support.event_loops import product_loop

pytest_asyncio_loop_factories = product_loop
