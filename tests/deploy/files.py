"""Read the files of deploy/ as their tools do, and run the gateway by their command lines."""

from __future__ import annotations

import shlex
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gateway.settings.load import load
from gateway.settings.schema import Settings
from tests.support.gateway_process import TENSORGATE, Process, running_process

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

Document = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """Refuse duplicate keys, as Kubernetes and Compose do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is given twice: {keys}, {node.start_mark}"
        return super().construct_mapping(node, deep)


_Loader.add_constructor("!reset", lambda loader, node: None)
"""What Compose removes of the files before."""


def documents(file: Path) -> list[Document]:
    """Read all documents of a YAML file."""
    return list(yaml.load_all(file.read_text(), _Loader))


def replace_folders(words: Sequence[str], folders: dict[str, Path]) -> list[str]:
    """Replace the folders that a command line names by folders of this machine."""
    return [_replace_folder(word, folders) for word in words]


def _replace_folder(word: str, folders: dict[str, Path]) -> str:
    for folder, here in folders.items():
        if word == folder or word.startswith(f"{folder}/"):
            return f"{here}{word.removeprefix(folder)}"
    return word


class Unit:
    """A unit file of systemd; each key of a section has a list of values."""

    def __init__(self, file: Path) -> None:
        self._sections: dict[str, dict[str, list[str]]] = {}
        for line in _lines(file):
            if line.startswith("["):
                section = self._sections.setdefault(line.strip("[]"), {})
            else:
                key, _, value = line.partition("=")
                section.setdefault(key, []).append(value)

    def values(self, section: str, key: str) -> list[str]:
        """Return all values of a key."""
        return self._sections[section].get(key, [])

    def value(self, section: str, key: str) -> str:
        """Return the only value of a key."""
        (value,) = self.values(section, key)
        return value

    def command(self, key: str) -> list[str]:
        """Return the words of a command line."""
        return shlex.split(self.value("Service", key))


def _lines(file: Path) -> Iterator[str]:
    for line in file.read_text().splitlines():
        if line and line[0] not in "#;":
            yield line


def shared_memory_size(settings: Settings) -> int:
    """Return the bytes of shared memory that a gateway without a ``size`` takes at most."""
    (shared,) = [each.shared_memory for each in settings.upstreams.values() if each.shared_memory]
    assert shared.size is None
    return settings.limits.max_buffered_bytes // 4


@asynccontextmanager
async def run_gateway(
    arguments: Sequence[str], **environ: str
) -> AsyncIterator[tuple[Process, str]]:
    """Run ``tensorgate`` with these arguments; yield the process and its address.

    Checks that SIGTERM ends it without an error.
    """
    async with running_process(TENSORGATE, *arguments, **environ) as process:
        found = await process.wait_for_output(r"listening on (\S+)")
        yield process, found[1]
        process.signal(signal.SIGTERM)
        status, _, err = await process.end()
        assert status == 0, err
        assert "ERROR" not in err


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
    def settings_mount(self) -> Document:
        """Return where the settings are in the gateway's container."""
        mounts: list[Document] = self.gateway["volumeMounts"]
        (mount,) = [each for each in mounts if each["name"] == "settings"]
        return mount

    @property
    def settings_folder(self) -> str:
        """Return the folder of the settings in the gateway's container."""
        return str(self.settings_mount["mountPath"])

    def settings_text(self) -> dict[str, str]:
        """Return the settings files of the gateway's container, by name."""
        volume = self.volume(self.settings_mount)
        data: dict[str, str] = self.one("ConfigMap", volume["configMap"]["name"])["data"]
        return data

    def volume(self, mount: Document) -> Document:
        """Return what a mount of the gateway's container shows."""
        volumes: list[Document] = self.pod_with(GATEWAY).spec["volumes"]
        (volume,) = [each for each in volumes if each["name"] == mount["name"]]
        return volume

    def write_settings(self, folder: Path, *, shares_memory: bool = False) -> Settings:
        """Write the settings files to a folder; return the settings that the command names.

        ``shares_memory`` takes up the setting that is there as a comment.
        """
        for name, text in self.settings_text().items():
            wanted = text.replace("#shared_memory:", "shared_memory:") if shares_memory else text
            (folder / name).write_text(wanted)
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
