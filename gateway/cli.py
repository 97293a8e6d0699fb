"""The command line: serve, check, schema, demo, top.

What only one command needs, it imports itself: the gateway takes most of the time of a start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import click

from gateway import __version__
from gateway.app.build.listening import UnusableSettingsError
from gateway.app.build.worker_count import worker_count
from gateway.build_info import COMPILED, describe_build
from gateway.settings.load import load_with_positions
from gateway.settings.problems import SettingsError
from gateway.settings.routes import Route, describe_match
from gateway.settings.schema import ClientTls, Settings
from gateway.settings.upstreams import Upstream
from gateway.system.descriptors import open_standard_descriptors, raise_descriptor_limit
from gateway.system.memory import tune_garbage_collector, tune_malloc, tune_thread_switches
from gateway.system.stderr_handler import StderrHandler

_T = TypeVar("_T")

_FILE = click.Path(path_type=Path)
_INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended, as shells have it."""
_DEMO_ADMIN_PORT = 9080
_DEMO_KEY = "demo"
"""What the demo's page asks for before it acts; the demo is reached from this machine only."""

_log = logging.getLogger("tensorgate")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(f"{__version__} ({describe_build()})", prog_name="tensorgate")
def main() -> None:
    """Run a reverse proxy for the Open Inference Protocol (KServe V2).

    It converts the JSON of clients to the binary tensor form of servers, and back.
    """


@main.command()
@click.argument("file", required=False, type=_FILE)
@click.option("--config", metavar="FILE", type=_FILE, help="The same as FILE.")
def serve(file: Path | None, config: Path | None) -> None:
    """Serve by a settings file until SIGTERM or Ctrl-C, and then finish the calls in progress.

    SIGHUP reloads the settings, and opens the file of the access log anew. The exit status is 2 for
    invalid settings, and 1 if they cannot be used, as an address that is in use.
    """
    config = config or file
    if config is None or file not in (None, config):
        raise click.UsageError("Name one settings FILE.")
    open_standard_descriptors()
    from gateway.app.reload import SettingsSource

    source = SettingsSource(config, os.environ)
    with _exit_on_errors():
        settings = _load_or_exit(source.read)
        workers = worker_count(settings)
        _start_logging(settings.log.level, many=workers > 1)
        source.log_warnings()
        tune_malloc()
        tune_thread_switches()
        raise_descriptor_limit()
        if workers == 1:
            from gateway.app.standalone import serve

            serve(settings, source)
            return
        from gateway.app.with_workers import serve_with_workers
        from gateway.workers.supervisor import NoWorkerError

        with _exit_on_errors(NoWorkerError):
            serve_with_workers(workers, settings, source)


@main.command()
@click.argument("config", metavar="FILE", type=_FILE)
@click.option(
    "--probe",
    is_flag=True,
    help="Also ask every server for its readiness and its metadata, and compare the declared models"
    " with it.",
)
def check(config: Path, probe: bool) -> None:
    """Report all errors of a settings file, or else what it would serve.

    The exit status is 0 for valid settings, 2 for invalid ones, and 1 if a file that they name
    cannot be used. With --probe, it is 3 if a server or a model is not as declared, and else 4 if a
    server is not ready or cannot be reached.
    """
    from gateway.app.preflight.settings_checks import (
        check_files,
        find_self_references,
        settings_warnings,
    )

    loaded = _load_or_exit(partial(load_with_positions, config, os.environ, with_files=True))
    settings = loaded.settings
    with _exit_on_errors():
        check_files(settings)
    for path, message in (*settings_warnings(settings), *find_self_references(settings)):
        click.echo(loaded.problem(path, f"warning: {message}").describe(config), err=True)
    click.echo(_summary(settings))
    if probe:
        from gateway.app.loaded_resources import load_resources
        from gateway.app.preflight.probe import probe_servers
        from gateway.app.process import run

        with _exit_on_errors():
            report = run(probe_servers(load_resources(settings)))
        click.echo("\n".join(report.lines()))
        sys.exit(report.exit_status)


@main.command()
def schema() -> None:
    """Print the JSON Schema of the settings, for editors."""
    from gateway.settings.json_schema import settings_schema

    click.echo(json.dumps(settings_schema(), indent=2))


@main.command()
@click.option("--once", is_flag=True, help="Exit after the show.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port of the gateway.",
)
@click.option("--triton", metavar="URL", help="Compare the ways to your own Triton instead.")
@click.option("--model", help="Its model, with inputs of numbers, for --triton.")
def demo(once: bool, port: int, triton: str | None, model: str | None) -> None:
    """Run a demo server behind the gateway, and show example calls.

    After the show both keep running until Ctrl-C, with the operator's page of the gateway, and some
    calls a second for it to show.

    With --triton and --model, it measures calls to a model of your own: directly, through a
    gateway, and through a gateway that shares memory with the server.
    """
    from gateway.app.process import run
    from gateway.demo.walkthrough.client import ShowError
    from gateway.demo.walkthrough.own_server import compare_ways

    if (triton is None) != (model is None):
        raise click.UsageError("--triton and --model go together")
    _start_logging("warning")
    with _exit_on_errors(ShowError):
        if triton is None or model is None:
            run(_demo(once, port))
            return
        ports = _free_port(port), _free_port(_DEMO_ADMIN_PORT)
        listen, admin = (f"127.0.0.1:{each}" for each in ports)
        color = sys.stdout.isatty()
        compare_ways(triton.rstrip("/"), model, (listen, admin), sys.stdout, color=color)


@main.command()
@click.argument("address", default="127.0.0.1:9080")
@click.option("--interval", default="1s", show_default=True, help="Time between two readings.")
@click.option("--once", is_flag=True, help="Print one page, and exit.")
def top(address: str, interval: str, once: bool) -> None:
    """Show what a gateway does, in a terminal.

    ADDRESS is the gateway's admin address: HOST:PORT, a URL, or unix:/PATH. Without it, it is
    127.0.0.1:9080. In a pipe it prints one page, as with --once. The exit status is then 1 if the
    gateway cannot be read.
    """
    from gateway.top.client import parse_admin_address
    from gateway.top.run import NoGatewayError, parse_interval, run

    parameter = "ADDRESS"
    try:
        admin = parse_admin_address(address)
        parameter = "--interval"
        seconds = parse_interval(interval)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=parameter) from None
    tune_garbage_collector()
    with _exit_on_errors(NoGatewayError):
        run(admin, seconds, once=once)


def _load_or_exit(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except SettingsError as error:
        click.echo(str(error), err=True)
        sys.exit(1 if error.is_about_files else 2)


def _start_logging(level: str, many: bool = False) -> None:
    """Log to stderr; with ``many`` processes, each line has the id of its process."""
    name = "%(name)s[%(process)d]" if many else "%(name)s"
    # Times as in the access log, which may go to stderr too.
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)s {name}: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = StderrHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])


@contextmanager
def _exit_on_errors(*more: type[Exception]) -> Iterator[None]:
    expected: tuple[type[Exception], ...] = (UnusableSettingsError, *more)
    try:
        yield
    except expected as error:
        click.echo(f"tensorgate: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("tensorgate: interrupted", err=True)
        sys.exit(_INTERRUPTED)


async def _demo(once: bool, port: int) -> None:
    from gateway.app.process import handle_signals
    from gateway.app.standalone import StandaloneGateway
    from gateway.demo.server.server import DemoServer
    from gateway.demo.walkthrough.walkthrough import make_traffic, next_steps, run_show
    from gateway.workers.signals import STOP_SIGNALS

    stop = asyncio.Event()
    handle_signals(stop.set, *STOP_SIGNALS)
    admin_port = _free_port(0 if once else _DEMO_ADMIN_PORT)
    async with (
        DemoServer() as server,
        StandaloneGateway(_demo_settings(server.url, port, admin_port)) as gateway,
    ):
        url = gateway.addresses[0]
        tune_garbage_collector()
        click.echo(f"Tensorgate {__version__}, {describe_build()}")
        if not COMPILED:
            click.echo('Compiled, it is faster: docs/guide/install.md, "Compiled".')
        await run_show(url, server, sys.stdout, sys.stdout.isatty())
        if once:
            return
        click.echo(
            next_steps(url, server.url, f"http://{gateway.settings.admin.listen}", _DEMO_KEY)
        )
        click.echo("Ctrl-C ends the demo.")
        traffic = asyncio.create_task(make_traffic(url, server))
        await stop.wait()
        traffic.cancel()
        await asyncio.gather(traffic, return_exceptions=True)


def _free_port(preferred: int) -> int:
    """Return a port of this machine on which nobody listens, if possible the preferred one."""
    for port in (preferred, 0):
        with socket.socket() as sock, suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            return int(sock.getsockname()[1])
    return preferred


def _demo_settings(server_url: str, port: int, admin_port: int) -> Settings:
    os.environ["TENSORGATE_DEMO_KEY"] = _DEMO_KEY
    return Settings.model_validate(
        {
            "listen": f"127.0.0.1:{port}",
            "admin": {
                "listen": f"127.0.0.1:{admin_port}",
                "actions": True,
                "payloads": True,
                "keys": "demo",
            },
            "api_keys": {"demo": {"environment": "TENSORGATE_DEMO_KEY"}},
            "upstreams": {"demo": {"endpoints": [server_url], "dialect": "triton"}},
            "limits": {"drain_timeout": 1},
            "log": {"access": False},
        }
    )


def _summary(settings: Settings) -> str:
    lines = [f"listen on {', '.join(map(str, settings.listen))}"]
    if settings.tls is not None:
        lines.append(_describe_tls(settings.tls))
    workers = worker_count(settings)
    if workers > 1:
        lines.append(f"{workers} workers")
    lines += [_describe_route(route, settings) for route in settings.routes]
    if settings.models:
        lines.append(f"declared models: {', '.join(settings.models)}")
    return "\n".join(lines)


def _describe_route(route: Route, settings: Settings) -> str:
    """Describe the requests of a route, its upstreams, and what the gateway does with them."""
    servers = []
    for weighted in route.upstream:
        upstream = settings.upstreams[weighted.name]
        weight = f" × {weighted.weight}" if len(route.upstream) > 1 else ""
        endpoints = ", ".join(map(str, upstream.endpoints))
        checks = _describe_checks(upstream)
        name = f"upstream {weighted.name} ({upstream.dialect}){weight}"
        servers.append(f"{name}: {endpoints}{checks}")
    key = f", with a key of {' or '.join(route.auth)}" if route.auth else ""
    parts = [f"{describe_match(route.match)}{key} → {'; '.join(servers)}"]
    if route.rewrite is not None:
        version = f", version {route.rewrite.version}" if route.rewrite.version else ""
        parts.append(f"as model {route.rewrite.model}{version}")
    if route.mirror is not None:
        parts.append(f"{route.mirror.percent:g}% copied to upstream {route.mirror.upstream}")
    if route.compression:
        parts.append(f"responses compressed with {' or '.join(route.compression)}")
    if route.server_timing:
        parts.append("with Server-Timing")
    if route.deny_operations:
        parts.append(f"but not {', '.join(route.deny_operations)}")
    return "; ".join(parts)


def _describe_checks(upstream: Upstream) -> str:
    """Describe how the gateway finds and checks the endpoints, if it does."""
    checks = [] if upstream.dns_refresh is None else [f"looked up every {upstream.dns_refresh:g} s"]
    if upstream.health_check is not None:
        checks.append(f"checked every {upstream.health_check.interval:g} s")
    if upstream.model_discovery:
        checks.append("model discovery")
    return f" ({', '.join(checks)})" if checks else ""


def _describe_tls(tls: ClientTls) -> str:
    line = f"TLS on TCP addresses, with the certificate in {tls.certificate}"
    if tls.client_ca is not None:
        need = tls.client_certificates or "required"
        line += f"; client certificates {need}, issued by {tls.client_ca}"
    return line
