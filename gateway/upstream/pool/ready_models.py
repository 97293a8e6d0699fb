"""The models that an endpoint has ready, as it lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.protocol.model_name import ModelName
from gateway.protocol.v1 import ready_entries


@dataclass(frozen=True, slots=True)
class ReadyModels:
    """What an endpoint has ready: the versions of each model, none where it names none.

    Without ``versions``, it does not say what it has: that may be every model.
    """

    versions: Mapping[str, frozenset[str]] | None

    def have(self, model: ModelName) -> bool:
        """Tell whether a model is among them; any of its versions, if none is meant."""
        if self.versions is None:
            return True
        versions = self.versions.get(model.name)
        if versions is None:
            return False
        return model.version is None or not versions or model.version in versions

    @property
    def names(self) -> tuple[str, ...] | None:
        """Give the names of all, in order; None where they are not known."""
        return None if self.versions is None else tuple(sorted(self.versions))


ANY_MODEL = ReadyModels(None)


def listed(document: Any) -> ReadyModels:
    """Read a repository index, or a list as KServe gives it.

    There are servers whose index names no versions, as MLServer's where a model has none, and a
    list as KServe's never does. Raises TypeError, KeyError or AttributeError for what is neither.
    """
    found: dict[str, set[str]] = {}
    unversioned: set[str] = set()
    for entry in ready_entries(document):
        name, version = str(entry["name"]), entry.get("version")
        found.setdefault(name, set())
        if version in (None, ""):
            unversioned.add(name)
        else:
            found[name].add(str(version))
    return ReadyModels(
        {
            name: frozenset() if name in unversioned else frozenset(versions)
            for name, versions in found.items()
        }
    )
