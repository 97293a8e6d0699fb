"""The house: imports point down, rooms stay small, and each module has its tests.

Each table lists the rooms of a package from top to bottom, with all rooms that each one imports.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.support.compiled import needs_source

ROOT = Path(__file__).parents[1]

pytestmark = needs_source

Rooms = Mapping[str, frozenset[str]]


def _imports(text: str) -> frozenset[str]:
    return frozenset(text.split())


GATEWAY: Rooms = {
    "__main__": _imports("cli"),
    "cli": _imports("app settings workers build_info observe system demo top"),
    "top": _imports("protocol settings system"),
    "app": _imports(
        "admin listener proxy offload upstream build_info codec routing "
        "protocol settings workers observe system errors sizes"
    ),
    "admin": _imports("listener proxy upstream build_info codec protocol settings observe errors"),
    "listener": _imports("proxy observe http2 http1 system errors"),
    "proxy": _imports("upstream codec routing protocol observe http1 system errors sizes"),
    "offload": _imports("codec"),
    "upstream": _imports("codec routing protocol http1 http2 system errors sizes"),
    "build_info": _imports("codec http1"),
    "codec": _imports("protocol system errors sizes"),
    "observe": _imports("protocol system errors"),
    "routing": _imports("protocol errors sizes"),
    "protocol": _imports("system errors sizes"),
    "settings": _imports("system errors sizes"),
    "workers": _imports("system"),
    "http2": _imports("http1 system sizes"),
    "http1": _imports("system errors sizes"),
    "system": _imports(""),
    "demo": _imports(""),
    "errors": _imports(""),
    "sizes": _imports(""),
}
PROXY: Rooms = {
    "fast_path": _imports(
        "dispatch router grpc infer passthrough filters server_dialect calls interfaces destination"
        " headers response_headers server_timing admission"
    ),
    "dispatch": _imports(
        "router grpc cluster infer passthrough filters server_dialect interfaces destination"
        " headers admission"
    ),
    "router": _imports("cluster filters destination response_headers admission"),
    "grpc": _imports(
        "cluster filters infer destination calls body_io interfaces headers admission"
    ),
    "cluster": _imports(
        "passthrough server_dialect destination calls body_io interfaces headers admission"
    ),
    "infer": _imports("passthrough filters destination calls body_io interfaces headers admission"),
    "passthrough": _imports(
        "server_dialect destination calls body_io interfaces headers admission"
    ),
    "filters": _imports("body_io destination interfaces headers admission"),
    "server_dialect": _imports("destination interfaces admission"),
    "calls": _imports("destination admission"),
    "body_io": _imports("interfaces admission"),
    "interfaces": _imports("destination response_headers admission"),
    "destination": _imports("admission"),
    "headers": _imports(""),
    "response_headers": _imports(""),
    "server_timing": _imports(""),
    "admission": _imports(""),
}
CODEC: Rooms = {
    "generate": _imports("v2 elements json policies"),
    "grpc": _imports("elements"),
    "v1": _imports("v2 elements native json offload_interface policies"),
    "v2": _imports("elements native json offload_interface policies"),
    "elements": _imports("json native offload_interface policies"),
    "decompress": _imports(""),
    "json": _imports("native"),
    "native": _imports(""),
    "offload_interface": _imports("policies"),
    "policies": _imports(""),
}

MOST_FILES = 16
"""Python files in a folder: more than that cannot be seen at a glance."""

TESTED_BY = {
    "system/fair_queue.py": "system/test_time_slices.py",
    "system/tls_transport.py": "listener/test_tls_transport.py",
    "listener/lingering.py": "listener/hostile/test_lingering.py",
    "listener/open_connections.py": "listener/hostile/test_crowds.py",
    "proxy/infer/convert_buffered_request.py": "proxy/fast_path/test_handlers.py",
    "proxy/infer/response_plan.py": "proxy/fast_path/test_handlers.py",
    "codec/grpc/document_reader.py": "codec/grpc/test_documents.py",
    "codec/grpc/document_writer.py": "codec/grpc/test_documents.py",
    "codec/grpc/header_budget.py": "codec/grpc/test_request_errors.py",
    "codec/grpc/message_parts.py": "codec/grpc/test_request.py",
    "codec/grpc/parameters.py": "codec/grpc/test_request.py",
    "codec/grpc/tensors.py": "codec/grpc/test_request.py",
    "codec/v1/buffered_request.py": "proxy/fast_path/test_handlers.py",
    "codec/v1/buffered_response.py": "proxy/fast_path/test_handlers.py",
    "codec/v2/buffered_request.py": "proxy/fast_path/test_handlers.py",
    "codec/v2/buffered_response.py": "proxy/fast_path/test_handlers.py",
    "proxy/grpc/compression.py": "end_to_end/grpc/test_passthrough.py",
    "proxy/grpc/health.py": "end_to_end/grpc/test_grpc_clients.py",
    "proxy/grpc/http_form.py": "end_to_end/grpc/test_grpc_clients.py",
    "proxy/grpc/infer.py": "end_to_end/grpc/test_grpc_clients.py",
    "proxy/grpc/message.py": "end_to_end/grpc/test_grpc_clients.py",
    "proxy/grpc/passthrough.py": "end_to_end/grpc/test_passthrough.py",
    "proxy/grpc/response.py": "end_to_end/grpc/test_passthrough.py",
    "proxy/grpc/stream_infer.py": "end_to_end/grpc/test_stream_infer.py",
    "proxy/infer/generate.py": "end_to_end/grpc/test_generate.py",
    "proxy/infer/grpc_upstream.py": "end_to_end/grpc/test_http_clients.py",
    "upstream/grpc/endpoint.py": "end_to_end/grpc/test_http_clients.py",
    "upstream/http2/response.py": "upstream/http2/test_endpoint.py",
    "upstream/http2/reserved_stream.py": "end_to_end/grpc/test_fast_path.py",
    "proxy/fast_path/grpc_handler.py": "end_to_end/grpc/test_fast_path.py",
    "codec/v2/binary_response.py": "end_to_end/grpc/test_http_clients.py",
    "protocol/grpc/headers.py": "end_to_end/grpc/test_passthrough.py",
    "proxy/infer/server_form.py": "proxy/infer/test_handler.py",
    "__main__.py": "test_cli.py",
    "app/build/routes.py": "end_to_end/routing/test_routes.py",
    "app/build/tls.py": "listener/test_tls.py",
    "app/build/tracing.py": "end_to_end/traces/test_exports.py",
    "app/build/upstreams.py": "app/test_gateway_reload.py",
    "app/preflight/report.py": "app/preflight/test_probe_all.py",
    "app/loaded_resources.py": "app/test_gateway_reload.py",
    "admin/authorization.py": "admin/test_actions.py",
    "admin/own_calls.py": "admin/test_actions.py",
    "admin/source.py": "admin/test_view.py",
    "app/admin_site.py": "admin/test_server.py",
    "app/shared_memory.py": "app/test_status_publisher.py",
    "app/active_config.py": "app/test_gateway.py",
    "codec/elements/run_job.py": "codec/test_offload_interface.py",
    "codec/json/parsed_size.py": "codec/test_memory_accounting.py",
    "codec/json/text_reader.py": "codec/v1/test_request.py",
    "settings/log.py": "settings/test_invalid_files.py",
    "codec/policies.py": "codec/v2/test_response.py",
    "codec/v1/nested_reader.py": "codec/v1/test_request.py",
    "codec/v2/json_reader.py": "codec/v2/test_request.py",
    "codec/v2/json_writer.py": "codec/v2/test_response.py",
    "demo/server/documents.py": "demo/server/test_api.py",
    "demo/server/errors.py": "demo/server/test_api.py",
    "demo/server/models.py": "demo/server/test_inference.py",
    "demo/server/recorder.py": "demo/walkthrough/test_walkthrough.py",
    "demo/walkthrough/client.py": "demo/walkthrough/test_walkthrough.py",
    "http2/errors.py": "http2/test_frame_reader.py",
    "http2/events.py": "http2/test_connection.py",
    "http2/frames.py": "http2/test_frame_reader.py",
    "http2/stream.py": "http2/test_connection.py",
    "listener/connection_host.py": "listener/test_connection.py",
    "observe/call_record.py": "listener/test_dispatcher.py",
    "observe/metric_cells.py": "observe/test_metric_store.py",
    "protocol/grpc/descriptors.py": "codec/grpc/test_reflection.py",
    "protocol/grpc/schema.py": "protocol/grpc/test_rpcs.py",
    "protocol/json_errors.py": "protocol/test_request_header.py",
    "proxy/cluster/model_lists.py": "proxy/cluster/test_aggregate.py",
    "proxy/cluster/scatter_gather.py": "proxy/cluster/test_aggregate.py",
    "proxy/destination.py": "proxy/test_dispatch.py",
    "proxy/filters/body_filter.py": "proxy/filters/test_chain.py",
    "proxy/grpc/reflection.py": "end_to_end/grpc/test_reflection.py",
    "proxy/interfaces.py": "proxy/test_dispatch.py",
    "settings/api_keys.py": "settings/test_invalid_files.py",
    "settings/error_text.py": "settings/test_invalid_files.py",
    "settings/limits.py": "settings/test_invalid_files.py",
    "settings/models.py": "settings/test_invalid_files.py",
    "settings/problems.py": "settings/test_load.py",
    "settings/routes.py": "settings/test_invalid_files.py",
    "settings/sections.py": "settings/test_invalid_files.py",
    "settings/upstreams.py": "settings/test_invalid_files.py",
    "settings/values/fields.py": "settings/test_invalid_files.py",
    "settings/yaml/errors.py": "settings/test_invalid_files.py",
    "settings/yaml/misplaced.py": "settings/test_invalid_files.py",
    "sizes.py": "system/test_buffers.py",
    "system/certificates.py": "listener/test_tls.py",
    "system/memory.py": "test_cli.py",
    "top/panels/body.py": "top/panels/test_overview.py",
    "upstream/address.py": "upstream/http/test_transports.py",
    "upstream/pool/lease.py": "upstream/pool/test_pool.py",
    "workers/signals.py": "workers/test_supervisor.py",
}
"""Modules without a test file at the mirrored path, and the file that tests them."""


@cache
def modules() -> Mapping[str, Path]:
    """Give the files of the package by their dotted names."""
    return {_dotted(path): path for path in sorted((ROOT / "gateway").rglob("*.py"))}


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """Give the modules of the package that each module imports, for types only too."""
    return {name: frozenset(_imported(path)) for name, path in modules().items()}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [_target(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        yield from (name for name in names if name in modules() and name != _dotted(path))


def _target(module: str, name: str) -> str:
    """Give the module that is imported: ``from package import module`` names it last."""
    return f"{module}.{name}" if f"{module}.{name}" in modules() else module


def _rooms(package: str) -> Rooms:
    """Give the rooms of a package that each of its rooms imports."""
    depth = package.count(".") + 1
    found: dict[str, set[str]] = {}
    for name, targets in imports().items():
        if not name.startswith(f"{package}."):
            continue
        own = name.split(".")[depth]
        inside = {each.split(".")[depth] for each in targets if each.startswith(f"{package}.")}
        found.setdefault(own, set()).update(inside - {own})
    return {room: frozenset(targets) for room, targets in found.items()}


HOUSE = {"gateway": GATEWAY, "gateway.proxy": PROXY, "gateway.codec": CODEC}
each_package = pytest.mark.parametrize("package", HOUSE)


@each_package
def test_rooms_import_exactly_what_the_table_says(package: str) -> None:
    assert _rooms(package) == HOUSE[package]


@each_package
def test_rooms_import_only_rooms_below_them(package: str) -> None:
    above: set[str] = set()
    for room, targets in HOUSE[package].items():
        above.add(room)
        assert not targets & above, room


def test_no_modules_import_each_other_in_a_circle() -> None:
    # Raises CycleError, which names the circle.
    graphlib.TopologicalSorter(imports()).prepare()


@pytest.mark.parametrize("folder", ["gateway", "tests", "benchmarks"])
def test_no_folder_has_too_many_files(folder: str) -> None:
    counts = Counter(path.parent for path in (ROOT / folder).rglob("*.py"))
    crowded = {str(path.relative_to(ROOT)): count for path, count in counts.items()}
    assert {path: count for path, count in crowded.items() if count > MOST_FILES} == {}


def test_each_module_has_its_tests() -> None:
    untested = {
        path.relative_to(ROOT / "gateway").as_posix()
        for path in modules().values()
        if path.name != "__init__.py" and not _test_of(path).exists()
    }
    assert untested == set(TESTED_BY)
    assert [file for file in TESTED_BY.values() if not (ROOT / "tests" / file).exists()] == []


def _test_of(path: Path) -> Path:
    below = path.relative_to(ROOT / "gateway")
    return ROOT / "tests" / below.parent / f"test_{below.name}"


def test_no_compiled_module_lies_beside_the_sources() -> None:
    """Python would import it, whatever the sources say: `make clean` removes it."""
    assert not list((ROOT / "gateway").rglob("*.so"))


WITH_IO = {"gateway.http2.session"}
"""The only modules of sans-I/O rooms that do I/O."""


@pytest.mark.parametrize("package", ["gateway.protocol", "gateway.codec", "gateway.http2"])
def test_sans_io_rooms_load_no_io(package: str) -> None:
    program = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if module.name not in {WITH_IO!r}:
        importlib.import_module(module.name)
print(sorted({{"asyncio", "aiohttp"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
