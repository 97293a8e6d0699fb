"""What routes change in the headers of their responses, the same on both paths."""

from __future__ import annotations

from dataclasses import dataclass

from multidict import CIMultiDict

from gateway.upstream.transport import HeaderLines


@dataclass(frozen=True, slots=True)
class ResponseHeaderPolicy:
    """Changes the headers of every response of a call that its route admits, errors included.

    ``apply`` makes the changes that are the same for equal headers. Whoever sends the response adds
    what differs from call to call.
    """

    adds_vary: bool = False
    """Whether the route compresses responses for some clients."""
    adds_server_timing: bool = False
    """Whether responses say where the call's time went: see ``server_timing``."""

    def apply(self, headers: CIMultiDict[str]) -> None:
        """Change the headers of a response."""
        if self.adds_vary:
            _add_vary(headers)

    def apply_to_lines(self, lines: HeaderLines) -> HeaderLines:
        """Return the changed headers of a fully buffered response."""
        headers = CIMultiDict(lines)
        self.apply(headers)
        return tuple(headers.items())


def _add_vary(headers: CIMultiDict[str]) -> None:
    """Say that the response depends on Accept-Encoding; RFC 9110, section 12.5.5."""
    values = [value for value in headers.getall("Vary", ()) if value]
    names = {name.strip().lower() for value in values for name in value.split(",")}
    if names.isdisjoint(("*", "accept-encoding")):
        headers["Vary"] = ", ".join([*values, "Accept-Encoding"])
