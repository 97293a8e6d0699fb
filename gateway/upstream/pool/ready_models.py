"""The models that an endpoint has ready, by its own list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.protocol.operations import ModelName
from gateway.protocol.v1 import ready_entries


@dataclass(frozen=True, slots=True)
class ReadyModels:
    """The versions of each ready model; empty for a model whose versions are unknown.

    ``versions`` is None if the endpoint does not say: it may have any model.
    """

    versions: Mapping[str, frozenset[str]] | None
    names: tuple[str, ...] | None = field(init=False)
    """The sorted names of all models; None if unknown."""

    def __post_init__(self) -> None:
        # Once, as each publication of the status takes them.
        names = None if self.versions is None else tuple(sorted(self.versions))
        object.__setattr__(self, "names", names)

    def includes(self, model: ModelName) -> bool:
        """Tell whether a model is ready; without a version, whether any version is."""
        if self.versions is None:
            return True
        versions = self.versions.get(model.name)
        if versions is None:
            return False
        return model.version is None or not versions or model.version in versions


ANY_MODEL = ReadyModels(None)


def parse_ready_models(document: Any) -> ReadyModels:
    """Read a repository index, or KServe's list of models.

    KServe's list has no versions, nor has MLServer's index for a model without one. Raises
    TypeError, KeyError or AttributeError for anything else.
    """
    versions: dict[str, set[str]] = {}
    unversioned: set[str] = set()
    for entry in ready_entries(document):
        name, version = str(entry["name"]), entry.get("version")
        versions.setdefault(name, set())
        if version in (None, ""):
            unversioned.add(name)
        else:
            versions[name].add(str(version))
    return ReadyModels(
        {
            name: frozenset() if name in unversioned else frozenset(found)
            for name, found in versions.items()
        }
    )
