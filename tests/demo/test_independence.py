"""The demo's server must share no code with the gateway, because tests use it as an oracle."""

import ast
import sys
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[2] / "gateway" / "demo" / "server"


@pytest.mark.parametrize("path", sorted(SERVER.rglob("*.py")), ids=lambda path: path.name)
def test_server_imports_nothing_else_of_the_gateway(path: Path) -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "aiohttp", "pydantic"}
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or ".")
    foreign = {
        name
        for name in imported
        if name.split(".")[0] not in allowed and not f"{name}.".startswith("gateway.demo.server.")
    }
    assert foreign == set()
