from tests.support.event_loops import both_loops

# Transports of the two loops differ in how they pause, drop and close.
pytest_asyncio_loop_factories = both_loops
