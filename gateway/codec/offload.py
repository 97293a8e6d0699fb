"""Numbers that are converted elsewhere meanwhile: on another core, say.

The codecs lend out pieces of their work, go on with the next, and take the results in order.
What comes back as None could not be done there: it is done here, which tells why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from gateway.protocol.datatypes import Datatype, Family


@dataclass(frozen=True, slots=True)
class ConversionJob:
    """What is to be done with some elements of a datatype.

    ``to_json`` turns their bytes into the text between an array's brackets; else a JSON array of
    them is turned into bytes.
    """

    to_json: bool
    datatype: Datatype

    @property
    def can_be_offloaded(self) -> bool:
        """Tell whether the elements are of one size, so that each piece stands for itself."""
        return self.datatype.family in (Family.INTEGER, Family.FLOAT)


class OffloadFuture(ABC):
    """A piece of work that was lent out."""

    done: bool = False
    result: bytes | memoryview | None = None
    """What was made of the data; None until it is done, or where it could not be."""

    @abstractmethod
    async def wait(self) -> None:
        """Wait until it is done, which may be here, with a turn for others behind each piece."""


class Offloader(ABC):
    """Who has work done elsewhere."""

    @abstractmethod
    def submit(self, work: ConversionJob, *data: bytes | memoryview) -> OffloadFuture | None:
        """Have a piece of work done; None where it is sooner done here.

        ``data`` is taken one behind the other, and copied.
        """


class _NeverDone(OffloadFuture):
    done = True

    async def wait(self) -> None:
        pass


FAILED_FUTURE: OffloadFuture = _NeverDone()
"""Work that nobody could do: it is left to be done here."""
