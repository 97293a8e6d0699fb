"""Prints titles, labelled rows and bar charts on a page of at most 100 columns."""

import json
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, Final, TextIO

from rich.console import Console
from rich.text import Text

from gateway.demo.server.server import RecordedMessage

WIDTH: Final = 100

_LABEL_WIDTH: Final = 18
_TEXT_WIDTH: Final = WIDTH - 2 - _LABEL_WIDTH
_MAX_LINES: Final = 2  # of the text in a row; the rest is cut
_BAR_WIDTH: Final = 40
_MAX_ELEMENTS: Final = 3


class Page:
    """Prints to `out`, in ANSI colors if `color`; a character that `out` cannot encode is `?`."""

    def __init__(self, out: TextIO, *, color: bool) -> None:
        self._encoding = out.encoding or "utf-8"
        self._console = Console(
            file=out,
            width=WIDTH,
            force_terminal=color,
            color_system="standard" if color else None,
            no_color=False,
            legacy_windows=False,
            highlight=False,
        )

    def title(self, text: str, side: str = "") -> None:
        """Start a section; `side` is at the right edge."""
        gap = " " * max(2, WIDTH - len(text) - len(side))
        self._line()
        self._line((text, "bold"), (gap, ""), (side, "dim"))

    def row(self, label: str, text: str, style: str = "") -> None:
        """Print a label and a text of one or two lines."""
        for line in wrap(text) or [""]:
            self._line(("  ", ""), (f"{label:{_LABEL_WIDTH}}", "dim"), (line, style))
            label = ""

    def details(self, texts: Iterable[str]) -> None:
        """Print texts that explain the row above them."""
        for text in texts:
            self.row("", text, "dim")

    def bars(self, label: str, times: Mapping[str, float]) -> None:
        """Print times, given in seconds, as a bar chart."""
        name_width = max(map(len, times))
        longest = max(times.values())
        for name, seconds in times.items():
            bar = "█" * max(1, round(_BAR_WIDTH * seconds / longest))
            self.row(label, f"{name:{name_width}}  {milliseconds(seconds):>9}  {bar}")
            label = ""

    def _line(self, *parts: tuple[str, str]) -> None:
        coding = self._encoding
        known = [(text.encode(coding, "replace").decode(coding), style) for text, style in parts]
        line = Text.assemble(*known)
        line.rstrip()
        self._console.print(line, soft_wrap=True)


def wrap(text: str) -> list[str]:
    """Wrap the text of a row into lines without control characters."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return textwrap.wrap(
        printable, _TEXT_WIDTH, max_lines=_MAX_LINES, placeholder=" …", break_on_hyphens=False
    )


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds, below one with two decimals."""
    value = seconds * 1000
    return f"{value:.2f} ms" if value < 1 else f"{value:.1f} ms"


def summarize_body(message: RecordedMessage) -> str:
    """Describe the form and the size of a body."""
    if message.form == "empty":
        return "no body"
    text = f"{message.form}, {len(message.body):,} bytes"
    if not message.header_length:
        return text
    tensors = len(message.body) - message.header_length
    return f"{text}: JSON header {message.header_length:,}, tensors {tensors:,}"


def summarize_json(json_text: str) -> list[str]:
    """Describe each tensor of a request or response on a line; other JSON text stays as it is."""
    try:
        document = json.loads(json_text)
    except ValueError:  # the text is empty or cut off
        return [json_text] if json_text else []
    try:
        return [_tensor(entry) for entry in document.get("inputs") or document["outputs"]]
    except (KeyError, TypeError, AttributeError):  # there are no tensors
        return [json.dumps(document)]


def _tensor(entry: dict[str, Any]) -> str:
    shape = ",".join(map(str, entry["shape"]))
    if "data" in entry:
        content = f"data {_elements(entry['data'])}"
    else:
        content = f"binary_data_size {entry['parameters']['binary_data_size']:,}"
    return f"{entry['name']}  {entry['datatype']} [{shape}]  {content}"


def _elements(data: list[Any]) -> str:
    shown = [f"{e:.6g}" if isinstance(e, float) else str(e) for e in data[:_MAX_ELEMENTS]]
    if len(data) > len(shown):
        shown.append(f"… {len(data):,} in all")
    return f"[{', '.join(shown)}]"
