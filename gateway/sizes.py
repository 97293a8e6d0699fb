"""Sizes of caches, chunks and quotations that several modules share; bytes unless said."""

from typing import Final

# Caches of what repeats from call to call; entries of each BoundedCache.
CACHED_HEADS: Final = 512
"""Heads of requests and responses, and what was made of them."""
CACHED_LINES: Final = 2048
"""Lines of such heads, and names of headers."""
CACHED_DOCUMENTS: Final = 256
"""JSON headers, by their text."""
MAX_CACHED_DOCUMENT: Final = 16 * 1024
"""JSON headers above this size are not cached."""

# What one time slice of the event loop works on.
CONVERT_CHUNK: Final = 64 * 1024
"""Bytes of a body that are moved or converted in one time slice."""
MAX_FAST_REQUEST: Final = 640 * 1024
"""Bytes of a JSON request that is converted in one time slice: a third of a millisecond, mostly."""
MAX_READ_EARLY: Final = 4 * 1024 * 1024 - 64 * 1024
"""Bytes of a JSON request that is read while it arrives, for its call to take the fast path."""
MAX_FAST_RESPONSE: Final = 128 * 1024
"""Bytes of tensors of numbers that become text in one time slice: about a millisecond."""
ENCODE_CHUNK: Final = 32 * 1024
"""Bytes of tensors that become text in one time slice where they may be many tiny elements."""
MAX_UNSCHEDULED: Final = 32 * 1024
"""Bytes of a request that is converted without a time slice, as that takes little time."""
SCAN_WINDOW: Final = 64 * 1024
"""Bytes that are scanned in one call."""

# What the gateway reads of a response to a request of its own.
MAX_PROBE_RESPONSE: Final = 64 * 1024
"""Health and readiness."""
MAX_SERVER_DOCUMENT: Final = 1024 * 1024
"""Server metadata."""
MAX_MODEL_DOCUMENT: Final = 4 * 1024 * 1024
"""Model metadata and lists of models."""

# What errors and log lines quote; characters and names.
QUOTED_NAME: Final = 60
"""Characters of a name or value."""
QUOTED_TEXT: Final = 200
"""Characters of a path or of a server's own error."""
LISTED_NAMES: Final = 20
"""Names in a list of alternatives."""

# What Python's objects cost, as measured.
CHUNK_OVERHEAD: Final = 48
"""Memory of a bytes object in a list, beside its content."""
