"""What came of asking servers, and what an operator reads of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby

from gateway.sizes import QUOTED_TEXT

EXIT_MISMATCH, EXIT_NOT_READY = 3, 4
"""Exit statuses: something is another than declared; a server is not ready, or cannot be asked."""


class Verdict(Enum):
    """What came of asking a server."""

    AS_DECLARED = auto()
    MISMATCH = auto()
    NOT_READY = auto()
    """It answers, but not as one that can be used."""
    UNAVAILABLE = auto()
    """It did not answer."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What was found out of an endpoint, or of a model there, in order."""

    upstream: str
    url: str
    verdict: Verdict
    told: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """Findings of the servers, and of each declared model by name.

    All are in the order of the settings; a model to which no route leads has none.
    """

    servers: Sequence[ProbeResult]
    models: Mapping[str, Sequence[ProbeResult]]

    @property
    def status(self) -> int:
        """Give the exit status: 3 where anything differs, else 4 where not all servers are well."""
        groups = (self.servers, *self.models.values())
        found = {finding.verdict for findings in groups for finding in findings}
        if Verdict.MISMATCH in found or not all(self.models.values()):
            return EXIT_MISMATCH
        return EXIT_NOT_READY if found - {Verdict.AS_DECLARED} else 0

    def lines(self) -> Iterator[str]:
        """Yield what an operator reads."""
        for upstream, findings in groupby(self.servers, lambda finding: finding.upstream):
            yield f"upstream {upstream}:"
            for finding in findings:
                yield f"  {finding.url}: {_text(finding)}"
        for model, of_model in self.models.items():
            yield f"model {model}:" + ("" if of_model else " no route leads to it")
            for finding in of_model:
                yield f"  {finding.url} (upstream {finding.upstream}): {_text(finding)}"


def excerpt(body: bytes) -> str:
    """Give what is repeated of a server's response, in one line."""
    return " ".join(body[:QUOTED_TEXT].decode(errors="replace").split())


def _text(finding: ProbeResult) -> str:
    told = "; ".join(finding.told) or "as declared"
    # Servers are quoted, and what they say goes to a terminal.
    return "".join(letter if letter.isprintable() else "�" for letter in told)
