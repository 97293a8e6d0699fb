"""The interface by which codecs have numbers converted on other cores.

A codec submits a part of a tensor, goes on with its next work, and collects the results in order.
If a result is None, the codec converts the data itself, and so finds the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.codec.policies import Nonfinite
from gateway.protocol.datatypes import Datatype


class OffloadFuture(Protocol):
    """The result of a conversion, once it is done."""

    @property
    def done(self) -> bool:
        """Tell whether the result is known."""

    def take_result(self) -> bytes | None:
        """Return the converted data, once; None if they could not be converted."""

    async def wait(self) -> None:
        """Wait until it is done; the caller's thread may convert, one time slice per piece."""

    def help(self) -> bool:
        """Convert here what nobody has begun, a piece at most; return whether there was any."""

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """Call back once it may be done, in a later turn of the event loop."""


class Offloader(Protocol):
    """Converts numbers and booleans elsewhere, unless converting here is faster: then None.

    Data must not change.
    """

    def decode(
        self, text: memoryview, datatype: Datatype, open_before: int, open_after: int
    ) -> OffloadFuture | None:
        """Have a part of a JSON array become binary elements.

        It may lack ``open_before`` opening brackets and ``open_after`` closing ones.
        """

    def encode(
        self, data: bytes | memoryview, datatype: Datatype, nonfinite: Nonfinite, continued: bool
    ) -> OffloadFuture | None:
        """Have binary elements become the text between an array's brackets.

        A comma comes first if they are ``continued``.
        """
