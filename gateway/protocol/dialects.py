"""How each server family speaks the protocol."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.protocol.endpoints import model_path


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a server family does in its own way.

    ``trace_suffix`` follows a model's path, or ``/v2``, in the path of its trace settings.
    ``trace_per_version`` tells whether a version has trace settings of its own.
    """

    name: str
    trace_suffix: str
    trace_per_version: bool

    def trace_path(self, model: str | None, version: str | None) -> str:
        """Give the path of the trace settings, global where no model is named."""
        if model is None:
            return "/v2" + self.trace_suffix
        return model_path(model, version if self.trace_per_version else None) + self.trace_suffix


# Triton serves `trace/setting`, where the specification says `trace`, and keeps settings per
# model: a version's path is 404.
TRITON = Dialect("triton", trace_suffix="/trace/setting", trace_per_version=False)

DIALECTS = {dialect.name: dialect for dialect in (TRITON,)}
