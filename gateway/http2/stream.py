"""The state of one stream, and flow control of received data: RFC 9113, sections 5.1 and 5.2."""

from __future__ import annotations

from typing import Final

from gateway.http2.frames import MAX_WINDOW_SIZE

DEFAULT_WINDOW: Final = 65_535
"""The initial windows: section 6.9.2."""


class ReceiveWindow:
    """What the peer may send, on a stream or on the connection.

    It is opened again as data are used, so that at most ``target`` bytes wait to be used.
    """

    def __init__(self, size: int, target: int) -> None:
        self.size = size
        """Bytes that the peer may still send."""
        self.unused = 0
        """Bytes that were received, and are not used yet."""
        self.target = target

    def receive(self, size: int) -> bool:
        """Count received bytes; return whether they were allowed."""
        self.size -= size
        self.unused += size
        return self.size >= 0

    def use(self, size: int) -> int:
        """Count bytes as used; return by how much the window is to be opened, 0 for not yet."""
        self.unused -= size
        return self.opening()

    def opening(self) -> int:
        """Return by how much the window is to be opened: 0 if that is not worth a frame.

        It is worth one if the window doubles. If other streams' data wait to be used, that can be
        less than half of a connection's window, but not less than an eighth.
        """
        increment = self.target - self.unused - self.size
        if increment <= 0 or increment < self.size or 8 * increment < self.target:
            return 0
        increment = min(increment, MAX_WINDOW_SIZE - self.size)
        self.size += increment
        return increment


class Stream:
    """A stream, from its first frame until it is closed in both directions.

    ``handler`` is for its user: whatever handles the events of the stream.
    """

    def __init__(self, stream_id: int, send_window: int, receive_window: ReceiveWindow) -> None:
        self.id = stream_id
        self.send_window = send_window
        """Bytes that the peer accepts; negative after it has made its initial window smaller."""
        self.receive_window = receive_window
        self.handler: object = None
        self.sent_headers = False
        """Whether the headers of this end's message were sent."""
        self.sent_end = False
        """Whether the message of this end is complete."""
        self.received_end = False
        """Whether the message of the peer is complete."""
        self.has_headers = False
        """Whether the headers of the peer's message were received, apart from interim ones."""
        self.is_head = False
        """Whether the request has the method HEAD, whose response has no body."""
        self.content_left = -1
        """Bytes of the body that are still to come; -1 if that is not known."""
        self.is_reset = False
        """Whether it was reset, or its connection is closed; nothing more can be sent then."""

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent or received."""
        return self.is_reset or (self.sent_end and self.received_end)
