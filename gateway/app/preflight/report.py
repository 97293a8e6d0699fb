"""The results of a probe, as text and as an exit status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby

from gateway.sizes import QUOTED_TEXT

EXIT_MISMATCH, EXIT_NOT_READY = 3, 4
"""Exit statuses: something is not as declared; a server is not ready, or does not answer."""


class Verdict(Enum):
    """The result of probing a server, or a model there."""

    AS_DECLARED = auto()
    MISMATCH = auto()
    NOT_READY = auto()
    """It answers, but it is not ready."""
    UNAVAILABLE = auto()
    """It does not answer, or with an error."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of an endpoint, or of a model there."""

    upstream: str
    url: str
    verdict: Verdict
    messages: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """The results of the servers, and of each declared model by name, in the settings' order.

    A model to which no route leads has no results.
    """

    servers: Sequence[ProbeResult]
    models: Mapping[str, Sequence[ProbeResult]]

    @property
    def exit_status(self) -> int:
        """Return the exit status: 3 if anything differs, else 4 if a server is not ready."""
        groups = (self.servers, *self.models.values())
        verdicts = {result.verdict for results in groups for result in results}
        if Verdict.MISMATCH in verdicts or not all(self.models.values()):
            return EXIT_MISMATCH
        return EXIT_NOT_READY if verdicts - {Verdict.AS_DECLARED} else 0

    def lines(self) -> Iterator[str]:
        """Yield the lines that an operator reads."""
        for upstream, results in groupby(self.servers, lambda result: result.upstream):
            yield f"upstream {upstream}:"
            for result in results:
                yield f"  {result.url}: {_text(result)}"
        for model, model_results in self.models.items():
            yield f"model {model}:" + ("" if model_results else " no route leads to it")
            for result in model_results:
                yield f"  {result.url} (upstream {result.upstream}): {_text(result)}"


def excerpt(body: bytes) -> str:
    """Return the start of a server's response, in one line."""
    return " ".join(body[:QUOTED_TEXT].decode(errors="replace").split())


def _text(result: ProbeResult) -> str:
    text = "; ".join(result.messages) or "as declared"
    # It quotes servers and goes to a terminal: no escape sequence may get there.
    return "".join(letter if letter.isprintable() else "�" for letter in text)
