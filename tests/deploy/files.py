"""Read the files of deploy/ as their tools do."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

Document = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """Refuse duplicate keys, as Kubernetes and Compose do."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is given twice: {keys}, {node.start_mark}"
        return super().construct_mapping(node, deep)


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
