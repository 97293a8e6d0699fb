"""What the operator has chosen: the panel, how far it is scrolled, and what it is filtered by."""

from __future__ import annotations

from dataclasses import dataclass, field

OVERVIEW, ENDPOINTS, MODELS, CALLS = PANELS = ("overview", "endpoints", "models", "calls")
_MOST_FILTER = 200
_ALL = 10**9
_PANELS = dict(zip("1234", PANELS, strict=True))
_STEPS = {"tab": 1, "right": 1, "back tab": -1, "left": -1}
"""The keys to other panels, and to those behind and before."""
_ROWS = {"up": -1, "k": -1, "down": 1, "j": 1, "home": -_ALL, "g": -_ALL, "end": _ALL, "G": _ALL}
_PAGES = {"page up": -1, "page down": 1, " ": 1}
"""The keys that scroll by rows, and by pages."""


@dataclass
class View:
    """The choices; keys change them."""

    panel: str = OVERVIEW
    tops: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PANELS, 0))
    """The first row that each panel shows."""
    filters: dict[str, str] = field(default_factory=lambda: dict.fromkeys(PANELS, ""))
    edits: bool = False
    """Whether the operator types a filter."""
    follows: bool = True
    """Whether new calls are shown as they come."""
    left: bool = False
    page: int = 10
    """Rows that there is room for."""

    @property
    def top(self) -> int:
        """Return the first row that the panel shows."""
        return self.tops[self.panel]

    @property
    def filter(self) -> str:
        """Return what the panel is filtered by."""
        return self.filters[self.panel]

    def limit_scroll(self, rows: int, page: int) -> None:
        """Keep the last row at the end of the room, once it is known how many rows there are."""
        self.page = max(1, page)
        self.tops[self.panel] = max(0, min(self.top, rows - page))

    def press(self, key: str) -> None:
        """Do what a key means."""
        if key == "leave" or (key in ("q", "Q") and not self.edits):
            self.left = True
        elif self.edits:
            self._edit(key)
        elif key in _PANELS:
            self.panel = _PANELS[key]
        elif key in _STEPS:
            self.panel = PANELS[(PANELS.index(self.panel) + _STEPS[key]) % len(PANELS)]
        elif key == "f":
            self._toggle_follow()
        elif key in ("/", "escape"):
            self.edits = key == "/"
            self.filters[self.panel] = self.filter if self.edits else ""
        else:
            self.scroll(_ROWS.get(key, 0) + _PAGES.get(key, 0) * self.page)

    def scroll(self, rows: int) -> None:
        """Scroll; calls stand still once they are scrolled."""
        self.tops[self.panel] = max(0, self.top + rows)
        if self.panel == CALLS and rows > 0:
            self.follows = False

    def _toggle_follow(self) -> None:
        """Follow new calls, or let the list stand still."""
        self.follows = not self.follows
        if self.follows:
            self.tops[CALLS] = 0

    def _edit(self, key: str) -> None:
        text = self.filter
        if len(key) == 1:
            text = (text + key)[:_MOST_FILTER]
        elif key == "backspace":
            text = text[:-1]
        elif key in ("clear", "escape"):
            text = ""
        self.edits = len(key) == 1 or key in ("backspace", "clear")
        if text != self.filter:
            self.filters[self.panel] = text
            self.tops[self.panel] = 0
