"""Read the manifests for Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.settings.load import load
from gateway.settings.schema import Settings
from tests.deploy.files import DEPLOY, Document, documents

FOLDER = DEPLOY / "kubernetes"
SIDECAR, GATEWAYS = FOLDER / "sidecar.yaml", FOLDER / "gateway.yaml"
FILES = (GATEWAYS, SIDECAR)
"""The files that deploy a gateway."""
WORKLOADS = ("Deployment",)
GATEWAY, TRITON = "gateway", "triton"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def ports(container: Document) -> dict[str, int]:
    """Return the ports of a container by name."""
    return {port["name"]: port["containerPort"] for port in container["ports"]}


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod template of a workload."""

    workload: Document

    @property
    def name(self) -> str:
        """Return the workload's name."""
        return str(self.workload["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that selectors look for."""
        labels: dict[str, str] = self.workload["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def spec(self) -> Document:
        """Return the pod's spec."""
        spec: Document = self.workload["spec"]["template"]["spec"]
        return spec

    @property
    def containers(self) -> dict[str, Document]:
        """Return all containers by name, init containers first."""
        listed = [*self.spec.get("initContainers", []), *self.spec["containers"]]
        return {container["name"]: container for container in listed}

    @property
    def ports(self) -> dict[str, int]:
        """Return the ports of all containers by name."""
        return {
            name: port
            for container in self.containers.values()
            for name, port in ports(container).items()
        }

    def is_selected_by(self, selector: dict[str, str]) -> bool:
        """Tell whether a selector matches the pod."""
        return selector.items() <= self.labels.items()


class Manifest:
    """A manifest file with several documents."""

    def __init__(self, file: Path) -> None:
        self.documents = documents(file)
        self.pods = [Pod(each) for each in self.documents if each["kind"] in WORKLOADS]

    def all(self, kind: str) -> list[Document]:
        """Return the documents of a kind."""
        return [each for each in self.documents if each["kind"] == kind]

    def one(self, kind: str, name: str) -> Document:
        """Return a document by its kind and name."""
        (found,) = [each for each in self.all(kind) if each["metadata"]["name"] == name]
        return found

    def pod_with(self, container: str) -> Pod:
        """Return the pod that has a container of this name."""
        (found,) = [pod for pod in self.pods if container in pod.containers]
        return found

    @property
    def gateway(self) -> Document:
        """Return the gateway's container."""
        return self.pod_with(GATEWAY).containers[GATEWAY]

    @property
    def triton(self) -> Document:
        """Return Triton's container."""
        return self.pod_with(TRITON).containers[TRITON]

    @property
    def settings_folder(self) -> str:
        """Return the folder of the settings in the gateway's container."""
        (mount,) = self.gateway["volumeMounts"]
        return str(mount["mountPath"])

    def settings_text(self) -> dict[str, str]:
        """Return the settings files of the gateway's container, by name."""
        (mount,) = self.gateway["volumeMounts"]
        volumes = self.pod_with(GATEWAY).spec["volumes"]
        (volume,) = [each for each in volumes if each["name"] == mount["name"]]
        data: dict[str, str] = self.one("ConfigMap", volume["configMap"]["name"])["data"]
        return data

    def write_settings(self, folder: Path) -> Settings:
        """Write the settings files to a folder; return the settings that the command names."""
        for name, text in self.settings_text().items():
            (folder / name).write_text(text)
        return load(folder / Path(self.gateway["args"][-1]).name, {})

    def selectors(self) -> Iterator[tuple[Document, dict[str, str]]]:
        """Yield each document that selects pods, with its labels."""
        for document in self.documents:
            for found in _selectors(document):
                yield document, found


def _selectors(value: Any, key: str = "") -> Iterator[dict[str, str]]:
    """Yield all selectors of pods in a value."""
    if not isinstance(value, dict | list):
        return
    if key == "matchLabels" or (key == "selector" and "matchLabels" not in value):
        assert isinstance(value, dict)
        yield value
        return
    for name, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _selectors(part, str(name))
