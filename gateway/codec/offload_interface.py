"""The interface by which codecs have numbers converted on other cores.

A codec submits jobs, goes on with its next work, and collects the results in order. If a result is
None, the codec converts the data itself, and so finds the error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from gateway.codec.policies import Nonfinite
from gateway.protocol.datatypes import Datatype, Family


@dataclass(frozen=True, slots=True)
class ConversionJob:
    """How to convert elements of a datatype.

    With ``to_json``, binary elements become the text between an array's brackets, with a comma in
    front if they are ``continued``; ``nonfinite`` says what becomes of NaN and infinities.
    Otherwise a part of a JSON array becomes binary elements.
    """

    to_json: bool
    datatype: Datatype
    nonfinite: Nonfinite = Nonfinite.ERROR
    continued: bool = False

    @property
    def can_be_offloaded(self) -> bool:
        """Tell whether elements have one size, so that pieces can be converted independently."""
        return self.datatype.family in (Family.INTEGER, Family.FLOAT)


class OffloadFuture(ABC):
    """The result of a submitted job, once it is done."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Tell whether the result is known."""

    @property
    @abstractmethod
    def result(self) -> bytes | None:
        """Return the converted data; None until it is done, and if it could not be converted."""

    @abstractmethod
    async def wait(self) -> None:
        """Wait until it is done; the caller's thread may convert, one time slice per piece."""


class Offloader(ABC):
    """Runs conversion jobs elsewhere."""

    @abstractmethod
    def submit(
        self,
        job: ConversionJob,
        data: bytes | memoryview,
        open_before: int = 0,
        open_after: int = 0,
    ) -> OffloadFuture | None:
        """Submit a job; return None if converting here is faster.

        ``data`` must not change. A text may lack ``open_before`` opening brackets and
        ``open_after`` closing ones.
        """
