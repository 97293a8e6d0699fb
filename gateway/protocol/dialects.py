"""How each server family speaks the protocol: what they do differently stands here alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.protocol.operations import model_path


@dataclass(frozen=True, slots=True)
class TraceForm:
    """How a server family serves the trace extension.

    ``suffix`` follows a model's path, or ``/v2``, in the path of its trace settings.
    ``per_version`` tells whether a version has settings of its own.
    """

    suffix: str
    per_version: bool

    def path(self, model: str | None, version: str | None) -> str:
        """Give the path of the trace settings, global where no model is named."""
        if model is None:
            return "/v2" + self.suffix
        return model_path(model, version if self.per_version else None) + self.suffix


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a server family does in its own way."""

    name: str
    binary: bool = True
    """Whether tensors travel in binary form; where they do not, all of them travel as JSON."""
    lists_outputs: bool = False
    """Whether just the outputs that a request lists can come back in binary form."""
    answers_as_asked: bool = False
    """Whether every output surely comes in the form that a request asks for."""
    versions: bool = True
    """Whether paths may name a model's version."""
    batches: bool = False
    """Whether ``/config`` tells if the leading dimension is that of a batch."""
    wants_json_type: bool = False
    """Whether a JSON body is refused that does not say that it is JSON."""
    trace: TraceForm | None = None
    """How it serves the trace extension, if it does."""
    triton_extensions: bool = False
    """Whether parameters mean to it what Triton's extensions say; see header_facts.py."""
    few_chunks: bool = False
    """Whether a chunked body of very many chunks ends it."""
    speaks_v1: bool = False
    """Whether clients of V1 are served too, under the paths that KServe has for them."""
    lists_models: bool = True
    """Whether it may have a list of its models; of one that has none, a 400 says just that."""
    longest_part: int | None = None
    """The most bytes that a target, or a header's name or value, may have for it to answer."""


# Triton serves `trace/setting`, where the specification says `trace`, and keeps settings per
# model: a version's path is 404. Its parser has room for 8,191 bytes of a part, and counts a
# byte of the target twice at the end of each of its reads, that is every 4 KiB and wherever the
# network cuts the head into segments: what is left here is room for 15 such ends.
TRITON = Dialect(
    "triton",
    answers_as_asked=True,
    batches=True,
    trace=TraceForm("/trace/setting", per_version=False),
    triton_extensions=True,
    few_chunks=True,
    longest_part=8_176,
)
# Takes binary tensors without saying so in `GET /v2`; its models may answer in JSON all the same.
KSERVE = Dialect("kserve", versions=False, wants_json_type=True, speaks_v1=True)
# Makes nothing of `binary_data_output`; of the outputs listed, the last alone comes in binary form.
# A path that it does not know is a 400.
OPENVINO = Dialect("openvino", lists_outputs=True, lists_models=False)
# Any server that says that it takes the binary form; such are not known by name.
BINARY = Dialect("binary", wants_json_type=True)
# MLServer, and any server that is not known to take the binary form.
JSON = Dialect("json", binary=False, wants_json_type=True)

DIALECTS = {dialect.name: dialect for dialect in (TRITON, KSERVE, OPENVINO, JSON)}
"""The dialects that can be named; others are made of what a server says of itself."""


def common(dialects: Sequence[Dialect]) -> Dialect:
    """Give what servers of these dialects, one at least, all understand."""
    first, *others = dialects
    if all(other == first for other in others):
        return first
    longest = [each.longest_part for each in dialects if each.longest_part is not None]
    alike = all(other.trace == first.trace for other in others)
    return Dialect(
        " and ".join(dict.fromkeys(each.name for each in dialects)),
        binary=all(each.binary for each in dialects),
        lists_outputs=any(each.lists_outputs for each in dialects),
        answers_as_asked=all(each.answers_as_asked for each in dialects),
        versions=all(each.versions for each in dialects),
        batches=any(each.batches for each in dialects),
        wants_json_type=any(each.wants_json_type for each in dialects),
        triton_extensions=any(each.triton_extensions for each in dialects),
        few_chunks=any(each.few_chunks for each in dialects),
        speaks_v1=all(each.speaks_v1 for each in dialects),
        lists_models=all(each.lists_models for each in dialects),
        longest_part=min(longest, default=None),
        trace=first.trace if alike else None,
    )
