"""How each server family speaks the protocol: what they do differently stands here alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.protocol.operations import model_path


@dataclass(frozen=True, slots=True)
class TracePaths:
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
    binary_only_if_listed: bool = False
    """Whether just the outputs that a request lists can come back in binary form."""
    honors_output_encoding: bool = False
    """Whether every output surely comes in the form that a request asks for."""
    versioned_paths: bool = True
    """Whether paths may name a model's version."""
    has_config: bool = False
    """Whether ``/config`` tells if the leading dimension is that of a batch."""
    requires_json_type: bool = False
    """Whether a JSON body is refused that does not say that it is JSON."""
    trace: TracePaths | None = None
    """How it serves the trace extension, if it does."""
    triton_extensions: bool = False
    """Whether parameters mean to it what Triton's extensions say; see header_facts.py."""
    limits_chunks: bool = False
    """Whether a chunked body of very many chunks ends it."""
    speaks_v1: bool = False
    """Whether clients of V1 are served too, under the paths that KServe has for them."""
    has_model_list: bool = True
    """Whether it may have a list of its models; of one that has none, a 400 says just that."""
    max_head_part: int | None = None
    """The most bytes that a target, or a header's name or value, may have for it to answer."""


# Triton serves `trace/setting`, where the specification says `trace`, and keeps settings per
# model: a version's path is 404. Its parser has room for 8,191 bytes of a part, and counts a
# byte of the target twice at the end of each of its reads, that is every 4 KiB and wherever the
# network cuts the head into segments: what is left here is room for 15 such ends.
TRITON = Dialect(
    "triton",
    honors_output_encoding=True,
    has_config=True,
    trace=TracePaths("/trace/setting", per_version=False),
    triton_extensions=True,
    limits_chunks=True,
    max_head_part=8_176,
)
# Takes binary tensors without saying so in `GET /v2`; its models may answer in JSON all the same.
KSERVE = Dialect("kserve", versioned_paths=False, requires_json_type=True, speaks_v1=True)
# Makes nothing of `binary_data_output`; of the outputs listed, the last alone comes in binary form.
# A path that it does not know is a 400.
OPENVINO = Dialect("openvino", binary_only_if_listed=True, has_model_list=False)
# Any server that says that it takes the binary form; such are not known by name.
BINARY = Dialect("binary", requires_json_type=True)
# MLServer, and any server that is not known to take the binary form.
JSON = Dialect("json", binary=False, requires_json_type=True)

DIALECTS = {dialect.name: dialect for dialect in (TRITON, KSERVE, OPENVINO, JSON)}
"""The dialects that can be named; others are made of what a server says of itself."""


def common_dialect(dialects: Sequence[Dialect]) -> Dialect:
    """Give what servers of these dialects, one at least, all understand."""
    first, *others = dialects
    if all(other == first for other in others):
        return first
    longest = [each.max_head_part for each in dialects if each.max_head_part is not None]
    alike = all(other.trace == first.trace for other in others)
    return Dialect(
        " and ".join(dict.fromkeys(each.name for each in dialects)),
        binary=all(each.binary for each in dialects),
        binary_only_if_listed=any(each.binary_only_if_listed for each in dialects),
        honors_output_encoding=all(each.honors_output_encoding for each in dialects),
        versioned_paths=all(each.versioned_paths for each in dialects),
        has_config=any(each.has_config for each in dialects),
        requires_json_type=any(each.requires_json_type for each in dialects),
        triton_extensions=any(each.triton_extensions for each in dialects),
        limits_chunks=any(each.limits_chunks for each in dialects),
        speaks_v1=all(each.speaks_v1 for each in dialects),
        has_model_list=all(each.has_model_list for each in dialects),
        max_head_part=min(longest, default=None),
        trace=first.trace if alike else None,
    )
