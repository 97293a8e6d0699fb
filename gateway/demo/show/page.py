"""What the show prints: titles, labelled rows and bars on a page of at most 100 columns."""

import textwrap
from collections.abc import Iterable, Mapping
from typing import Final, TextIO

WIDTH: Final = 100

_LABEL: Final = 16
_TEXT: Final = WIDTH - 2 - _LABEL
_LINES: Final = 2  # of a row's text; what is longer is cut
_BAR: Final = 40
_RESET: Final = "\x1b[0m"
_STYLES: Final = {
    "plain": "",
    "title": "\x1b[1m",
    "faint": "\x1b[2m",
    "good": "\x1b[32m",
    "bad": "\x1b[33m",
}


class Page:
    """Print to `out`, with ANSI colours if `color`; characters that `out` lacks become `?`."""

    def __init__(self, out: TextIO, *, color: bool) -> None:
        self._out = out
        self._color = color

    def title(self, text: str, side: str = "") -> None:
        """Begin a part of the page; `side` stands at the right end."""
        gap = " " * max(2, WIDTH - len(text) - len(side))
        self._line()
        self._line(self._paint(text, "title"), gap, self._paint(side, "faint"))

    def row(self, label: str, text: str, style: str = "plain") -> None:
        """Print a text with a label before it, on one line or two."""
        for line in wrap(text) or [""]:
            self._line("  ", self._paint(f"{label:{_LABEL}}", "faint"), self._paint(line, style))
            label = ""

    def details(self, texts: Iterable[str]) -> None:
        """Print texts that explain the row above."""
        for text in texts:
            self.row("", text, "faint")

    def bars(self, label: str, times: Mapping[str, float]) -> None:
        """Print times in seconds, each with a bar; the longest has the full length."""
        name_width = max(map(len, times))
        longest = max(times.values())
        for name, seconds in times.items():
            bar = "█" * max(1, round(_BAR * seconds / longest))
            self.row(label, f"{name:{name_width}}  {milliseconds(seconds):>9}  {bar}")
            label = ""

    def _paint(self, text: str, style: str) -> str:
        code = _STYLES[style] if self._color else ""
        return f"{code}{text}{_RESET}" if code and text else text

    def _line(self, *parts: str) -> None:
        encoding = self._out.encoding or "utf-8"
        line = "".join(parts).rstrip().encode(encoding, "replace").decode(encoding)
        print(line, file=self._out, flush=True)


def wrap(text: str) -> list[str]:
    """Return the lines of a row's text, free of control characters."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return textwrap.wrap(
        printable, _TEXT, max_lines=_LINES, placeholder=" …", break_on_hyphens=False
    )


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, with two digits after the point where it is below one."""
    value = seconds * 1000
    return f"{value:.2f} ms" if value < 1 else f"{value:.1f} ms"
