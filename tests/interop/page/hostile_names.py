"""Names that would be markup, or look like others, if the page showed them as they are."""

from __future__ import annotations

NAMES = (
    "<script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "\u202egnp.exe",
    "نموذج",
    "x" * 2000,
)
HOSTILE_SORTS = (NAMES[0], NAMES[2], NAMES[4])


def shown_begin(name: str) -> str:
    """Return how a name begins where the page shows it."""
    return name[:20].replace("\u202e", "⟨U+202E⟩")
