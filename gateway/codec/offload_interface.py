"""The interface by which codecs have numbers converted in another process.

A codec submits jobs, goes on with its next work, and collects the results in order. If a result is
None, the codec converts the data itself, and so finds the error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from gateway.protocol.datatypes import Datatype, Family


@dataclass(frozen=True, slots=True)
class ConversionJob:
    """How to convert elements of a datatype.

    With ``to_json``, binary elements become the text between an array's brackets. Otherwise a JSON
    array becomes binary elements.
    """

    to_json: bool
    datatype: Datatype

    @property
    def can_be_offloaded(self) -> bool:
        """Tell whether elements have one size, so that pieces can be converted independently."""
        return self.datatype.family in (Family.INTEGER, Family.FLOAT)


class OffloadFuture(ABC):
    """The result of a submitted job, once it is done."""

    done: bool = False
    result: bytes | memoryview | None = None
    """The converted data; None until it is done, and None if it could not be converted."""

    @abstractmethod
    async def wait(self) -> None:
        """Wait until it is done; it may run in this process, one time slice per piece."""


class Offloader(ABC):
    """Runs conversion jobs elsewhere."""

    @abstractmethod
    def submit(self, job: ConversionJob, *data: bytes | memoryview) -> OffloadFuture | None:
        """Submit a job; return None if converting here is faster.

        ``data`` is concatenated and copied.
        """


class _FailedFuture(OffloadFuture):
    done = True

    async def wait(self) -> None:
        pass


FAILED_FUTURE: OffloadFuture = _FailedFuture()
"""A future without a result: the caller converts the data itself."""
