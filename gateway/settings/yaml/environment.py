"""``${NAME}`` and ``${NAME:-default}`` in the values of a settings file."""

import re
from collections.abc import Mapping

from gateway.settings.values.wording import describe

# ``$${`` comes first: it is how a plain ``${`` is written.
_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)\}|\$\{")
_BODY = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)


def expand(text: str, environ: Mapping[str, str]) -> str:
    """Return the text with each reference replaced by what the environment holds.

    As in a shell, the default of ``${NAME:-default}`` also stands in for an empty variable. ``$${``
    gives ``${``. What comes from the environment is not searched for references again. Raises
    ValueError with a message that names all variables that are neither set nor given a default.
    """
    unset: list[str] = []

    def replace(reference: re.Match[str]) -> str:
        if reference[0] == "$${":
            return "${"
        name, default = _name_and_default(reference)
        value = environ.get(name)
        if default is not None:
            return value or default
        if value is None:
            unset.append(name)
        return value or ""

    expanded = _REFERENCE.sub(replace, text)
    if unset:
        names, verb = ", ".join(dict.fromkeys(unset)), "is" if len(set(unset)) == 1 else "are"
        raise ValueError(f"{names} {verb} not set in the environment, and no default is given")
    return expanded


def is_reference(text: str) -> bool:
    """Tell whether a text is one reference, and nothing else."""
    found = _REFERENCE.fullmatch(text)
    return found is not None and found["body"] is not None


def _name_and_default(reference: re.Match[str]) -> tuple[str, str | None]:
    if reference["body"] is None:
        raise ValueError("a ${ without its }; write $${ for the characters themselves")
    if "${" in reference["body"]:
        raise ValueError("one ${...} cannot stand inside another")
    found = _BODY.fullmatch(reference["body"])
    if found is None:
        raise ValueError(f"expected ${{NAME}} or ${{NAME:-default}}, got {describe(reference[0])}")
    return found["name"], found["default"]
