"""Draw frames on a terminal: only the lines that have changed are written."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

_ASCII = str.maketrans(
    {
        **dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True)),
        "…": "~",
        "–": "-",
        "·": "|",
        "→": ">",
        "×": "x",
        "↑": "^",
        "↓": "v",
    }
)
"""What stands for our own characters where the terminal has none of them."""


class Painter:
    """Turns lines into text with the escape sequences of a terminal, or without any."""

    def __init__(self, encoding: str, environ: Mapping[str, str], *, plain: bool = False) -> None:
        self._encoding = encoding
        self._console = Console(
            file=io.StringIO(),
            force_terminal=not plain,
            color_system=None if plain else "auto",
            legacy_windows=False,
            markup=False,
            highlight=False,
            emoji=False,
            _environ=environ,
        )

    def paint(self, line: Text) -> bytes:
        """Return the bytes of a line, without its end."""
        with self._console.capture() as captured:
            self._console.print(line, end="", crop=False, soft_wrap=True)
        text = captured.get()
        try:
            return text.encode(self._encoding)
        except UnicodeEncodeError:
            return text.translate(_ASCII).encode(self._encoding, "replace")


class Screen:
    """Writes frames; the terminal has to show another screen than that of the shell."""

    def __init__(self, painter: Painter, write: Callable[[bytes], None]) -> None:
        self._painter = painter
        self._write = write
        self._size = (0, 0)
        self._lines: list[bytes] = []

    def draw(self, lines: Sequence[Text], size: tuple[int, int]) -> None:
        """Show a frame."""
        painted = [self._painter.paint(line) for line in lines]
        parts = []
        if size != self._size:
            self._size, self._lines = size, []
            parts.append(b"\x1b[0m\x1b[2J")
        for number, line in enumerate(painted):
            if number >= len(self._lines) or self._lines[number] != line:
                parts.append(b"\x1b[%d;1H\x1b[0m\x1b[2K%b" % (number + 1, line))
        self._lines = painted
        if parts:
            self._write(b"".join(parts))

    def forget(self) -> None:
        """Draw all of the next frame: the terminal has shown something else."""
        self._size = (0, 0)
