"""The state of one stream: RFC 9113, section 5.1."""

from __future__ import annotations

from gateway.http2.flow_control import ReceiveWindow


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
