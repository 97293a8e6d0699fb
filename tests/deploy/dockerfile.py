"""Read the stages of a Dockerfile, and run them without a container."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import string
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dockerfile_parse import DockerfileParser

_CACHE_MOUNT = re.compile(r"--mount=type=cache\S*\s+")
# Where a path from the root begins: with a word, or behind the = of a variable or the : of a list.
_FROM_THE_ROOT = re.compile(r"(?<![^\s=:])/(?=\w)")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its instructions with their values, in order."""

    base: str
    name: str
    steps: tuple[tuple[str, str], ...]

    def values(self, instruction: str) -> list[str]:
        """Return the values of all instructions of a kind."""
        return [value for kind, value in self.steps if kind == instruction]

    def value(self, instruction: str) -> str:
        """Return the value of the only instruction of a kind."""
        (value,) = self.values(instruction)
        return value

    def pairs(self, instruction: str) -> dict[str, str]:
        """Return the pairs that ENV or LABEL set."""
        words = [word for value in self.values(instruction) for word in shlex.split(value)]
        return dict(word.split("=", 1) for word in words)

    def command(self, instruction: str) -> list[str]:
        """Return the words of a command in exec form."""
        words = json.loads(self.value(instruction)[self.value(instruction).index("[") :])
        assert all(isinstance(word, str) for word in words)
        return list(words)


def read_stages(file: Path) -> list[Stage]:
    """Read a Dockerfile's stages."""
    stages: list[Stage] = []
    for step in DockerfileParser(str(file)).structure:
        kind, value = step["instruction"], step["value"]
        if kind == "FROM":
            base, _, name = value.partition(" AS ")
            stages.append(Stage(base, name, ()))
        elif kind != "COMMENT":
            last = stages.pop()
            stages.append(Stage(last.base, last.name, (*last.steps, (kind, value))))
    return stages


class Ignored:
    """The rules of a .dockerignore; the last rule that fits a path decides."""

    def __init__(self, file: Path) -> None:
        lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
        self._rules = [(_pattern(line.removeprefix("!")), line[0] != "!") for line in lines]

    def __contains__(self, path: str) -> bool:
        """Tell whether a path of the context, or a folder around it, is ignored."""
        folders = [path, *map(str, Path(path).parents)]
        ignored = False
        for pattern, ignores in self._rules:
            if any(pattern.fullmatch(each) for each in folders):
                ignored = ignores
        return ignored


def _pattern(text: str) -> re.Pattern[str]:
    escaped = re.escape(text).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
    return re.compile(escaped)


class Builder:
    """Run the steps of stages with one folder as the root of all of them.

    A copy from another stage must go to the same path, where it is already.
    """

    def __init__(self, root: Path, context: Path, environ: Mapping[str, str]) -> None:
        self._root = root
        self._context = context
        self._ignored = Ignored(context / ".dockerignore")
        self._environ = environ
        self._folder = root

    def build(self, stage: Stage) -> None:
        """Run a stage's steps, except those that only describe the image."""
        for kind, value in stage.steps:
            if kind == "WORKDIR":
                self._folder = self._at(value)
                self._folder.mkdir(parents=True, exist_ok=True)
            elif kind == "COPY":
                self._copy(value.split())
            elif kind == "RUN":
                self._run(value)

    def here(self, text: str) -> str:
        """Put the folder before each absolute path of a text."""
        return _FROM_THE_ROOT.sub(f"{self._root}/", text)

    def _at(self, path: str) -> Path:
        return self._root / path.removeprefix("/") if path[0] == "/" else self._folder / path

    def _run(self, command: str) -> None:
        text = self.here(_CACHE_MOUNT.sub("", command))
        done = subprocess.run(
            ["/bin/sh", "-c", text],
            cwd=self._folder,
            env=dict(self._environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}"

    def _copy(self, words: list[str]) -> None:
        *sources, target = words
        if sources[0].startswith("--from="):
            assert sources[1:] == [target]
            assert self._at(target).exists()
            return
        for source in sources:
            into = target.endswith("/") and (self._context / source).is_file()
            self._copy_in(source, self._at(target) / source if into else self._at(target))

    def _copy_in(self, source: str, target: Path) -> None:
        start = self._context / source
        files = (
            [start] if start.is_file() else [each for each in start.rglob("*") if each.is_file()]
        )
        taken = [
            each for each in files if str(each.relative_to(self._context)) not in self._ignored
        ]
        assert taken, f"{source} does not reach the builder"
        for each in taken:
            place = target / each.relative_to(start)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(each, place)


def environment(stage: Stage, before: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a stage's commands; ENV may refer to the one ``before``."""
    return {
        name: string.Template(value).substitute(before)
        for name, value in stage.pairs("ENV").items()
    }
