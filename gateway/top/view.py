"""What the operator has chosen: the panel, how far it is scrolled, and what it is filtered by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

OVERVIEW, ENDPOINTS, MODELS, CALLS = PANELS = ("overview", "endpoints", "models", "calls")
_MOST_FILTER = 200


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
        if key == "leave":
            self.left = True
        elif self.edits:
            self._edit(key)
        elif action := _ACTIONS.get(key):
            action(self)

    def show(self, panel: str) -> None:
        """Show a panel."""
        self.panel = panel

    def scroll(self, rows: int) -> None:
        """Scroll; calls stand still once they are scrolled."""
        self.tops[self.panel] = max(0, self.top + rows)
        if self.panel == CALLS and rows > 0:
            self.follows = False

    def go_to(self, row: int) -> None:
        """Scroll to a row."""
        self.scroll(row - self.top)

    def toggle_follow(self) -> None:
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

    def begin_filter(self) -> None:
        """Let the operator type a filter."""
        self.edits = True

    def clear_filter(self) -> None:
        """Show all."""
        self.filters[self.panel] = ""

    def leave(self) -> None:
        """End the program."""
        self.left = True

    def step(self, panels: int) -> None:
        """Show the panel behind this one, or before."""
        self.show(PANELS[(PANELS.index(self.panel) + panels) % len(PANELS)])


_ALL = 10**9
_ACTIONS: Mapping[str, Callable[[View], None]] = {
    "1": lambda view: view.show(OVERVIEW),
    "2": lambda view: view.show(ENDPOINTS),
    "3": lambda view: view.show(MODELS),
    "4": lambda view: view.show(CALLS),
    "tab": lambda view: view.step(1),
    "right": lambda view: view.step(1),
    "back tab": lambda view: view.step(-1),
    "left": lambda view: view.step(-1),
    "up": lambda view: view.scroll(-1),
    "k": lambda view: view.scroll(-1),
    "down": lambda view: view.scroll(1),
    "j": lambda view: view.scroll(1),
    "page up": lambda view: view.scroll(-view.page),
    "page down": lambda view: view.scroll(view.page),
    " ": lambda view: view.scroll(view.page),
    "home": lambda view: view.go_to(0),
    "g": lambda view: view.go_to(0),
    "end": lambda view: view.go_to(_ALL),
    "G": lambda view: view.go_to(_ALL),
    "/": View.begin_filter,
    "escape": View.clear_filter,
    "f": View.toggle_follow,
    "q": View.leave,
    "Q": View.leave,
}
