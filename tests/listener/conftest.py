from tests.support.checks.fast_path import fast_path_requests as fast_path_requests
from tests.support.event_loops import both_loops

pytest_asyncio_loop_factories = both_loops
