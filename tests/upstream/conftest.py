from tests.support.event_loops import both_loops
from tests.upstream.endpoints import endpoint_at as endpoint_at

pytest_asyncio_loop_factories = both_loops
