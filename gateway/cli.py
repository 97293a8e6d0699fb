"""The command line: serve, check, demo."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
import uvloop

from gateway import __version__
from gateway.app.gateway import Gateway
from gateway.app.keys import ClientKeys, KeysError
from gateway.app.listen import ListenError, listen, shown
from gateway.app.tls import UpstreamTlsError, client_tls, server_contexts
from gateway.demo.curl import curl_lines
from gateway.demo.server import DemoServer
from gateway.demo.show import ShowError, run_show
from gateway.memory import keep_what_is_freed, settle
from gateway.settings.load import load
from gateway.settings.problems import SettingsError
from gateway.settings.routes import Match, Route
from gateway.settings.schema import ClientTls, Settings
from gateway.workers.cores import usable_cores
from gateway.workers.parent import NoWorkerError, Parent
from gateway.workers.post import Post

_log = logging.getLogger("tensorgate")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tensorgate")
def main() -> None:
    """Stand in front of inference servers: JSON clients get the binary tensor form."""


@main.command()
@click.option(
    "--config", "config", required=True, type=click.Path(path_type=Path), help="The settings, YAML."
)
def serve(config: Path) -> None:
    """Serve until SIGTERM or Ctrl-C, then let what is running finish."""
    settings = _load(config)
    workers = _workers(settings)
    _start_logging(settings.log.level, many=workers > 1)
    keep_what_is_freed()
    with _plain_errors():
        if workers == 1:
            _run(_serve(settings))
        else:
            _serve_with(workers, settings)


@main.command()
@click.argument("config", metavar="FILE", type=click.Path(path_type=Path))
def check(config: Path) -> None:
    """Say what is wrong with a settings file, or what it would serve."""
    settings = _load(config)
    with _plain_errors():
        client_tls(settings)
        server_contexts(settings)
        ClientKeys(settings, os.environ)
    click.echo(_summary(settings))


@main.command()
@click.option("--once", is_flag=True, help="Leave after the show.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="The gateway's port.",
)
def demo(once: bool, port: int) -> None:
    """Start a demo server with the gateway in front of it, and show the main job."""
    _start_logging("warning")
    with _plain_errors():
        _run(_demo(once, port))


def _load(path: Path) -> Settings:
    try:
        return load(path, os.environ)
    except SettingsError as error:
        click.echo(str(error), err=True)
        sys.exit(2)


def _workers(settings: Settings) -> int:
    return usable_cores() if settings.workers == "auto" else settings.workers


def _start_logging(level: str, many: bool = False) -> None:
    """Log to stderr; of ``many`` processes, each line tells which one wrote it."""
    name = "%(name)s[%(process)d]" if many else "%(name)s"
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s %(levelname)s {name}: %(message)s"
    )


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except (ListenError, UpstreamTlsError, KeysError, NoWorkerError, ShowError) as error:
        click.echo(f"tensorgate: {error}", err=True)
        sys.exit(1)


def _run(main: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    _on_stop_signal(stop.set)
    async with Gateway(settings) as gateway:
        _say_begun(gateway.addresses)
        settle()
        await stop.wait()
        _say_stopping(settings)
    _say_stopped(gateway.dropped)


def _serve_with(workers: int, settings: Settings) -> None:
    """Serve with several processes, which this one starts and watches."""
    # The workers have these too: one comes up even if the files have become unusable since.
    tls, contexts = client_tls(settings), server_contexts(settings)
    keys = ClientKeys(settings, os.environ)
    sockets = listen(settings.listen)
    settle()
    parent = Parent(
        sockets,
        workers,
        lambda post: _run(_work(Gateway(settings, post.has_closed, tls, contexts, keys), post)),
        settings.limits.drain_time,
        _Events(settings, sockets),
    )
    _say_stopped(parent.run())


async def _work(gateway: Gateway, post: Post) -> None:
    """Serve the connections that the parent accepts."""
    _on_stop_signal(post.leave)
    async with gateway:
        settle()
        post.is_up()
        await post.deliver(gateway.take)
    post.has_dropped(gateway.dropped)


class _Events:
    """Logs what a single process would."""

    def __init__(self, settings: Settings, sockets: Sequence[socket.socket]) -> None:
        self._settings = settings
        self._addresses = [shown(sock, settings.tls is not None) for sock in sockets]

    def begun(self, workers: Sequence[int]) -> None:
        _log.info("%d workers: %s", len(workers), ", ".join(map(str, workers)))
        _say_begun(self._addresses)

    def stopping(self) -> None:
        _say_stopping(self._settings)


def _say_begun(addresses: Sequence[str]) -> None:
    for address in addresses:
        _log.info("listening on %s", address)


def _say_stopping(settings: Settings) -> None:
    _log.info("stopping: at most %g s for what is running", settings.limits.drain_time)


def _say_stopped(dropped: int) -> None:
    if dropped:
        _log.warning("%d exchanges took longer and were dropped", dropped)
    _log.info("stopped")


async def _demo(once: bool, port: int) -> None:
    stop = asyncio.Event()
    _on_stop_signal(stop.set)
    async with DemoServer() as server, Gateway(_demo_settings(server.url, port)) as gateway:
        url = gateway.addresses[0]
        await run_show(url, server, sys.stdout, sys.stdout.isatty())
        if once:
            return
        click.echo(curl_lines(url))
        click.echo("Ctrl-C ends the demo.")
        await stop.wait()


def _demo_settings(server_url: str, port: int) -> Settings:
    return Settings.model_validate(
        {
            "listen": f"127.0.0.1:{port}",
            "upstreams": {"demo": {"endpoints": [server_url]}},
            "limits": {"drain_time": 1},
            "log": {"access": False},
        }
    )


def _on_stop_signal(callback: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, callback)


def _summary(settings: Settings) -> str:
    lines = [f"listen on {', '.join(map(str, settings.listen))}"]
    if settings.tls is not None:
        lines.append(_tls(settings.tls))
    workers = _workers(settings)
    if workers > 1:
        lines.append(f"{workers} workers")
    lines += [_route(route, settings) for route in settings.routes]
    return "\n".join(lines)


def _route(route: Route, settings: Settings) -> str:
    """Tell which requests a route takes and where to; a weight only where there is a choice."""
    servers = []
    for share in route.upstream:
        upstream = settings.upstreams[share.name]
        weight = f" × {share.weight}" if len(route.upstream) > 1 else ""
        endpoints = ", ".join(map(str, upstream.endpoints))
        servers.append(f"upstream {share.name} ({upstream.dialect}){weight}: {endpoints}")
    key = f", with a key of {' or '.join(route.auth)}" if route.auth else ""
    lines = [f"{_taken(route.match)}{key} → {'; '.join(servers)}"]
    if route.rewrite is not None:
        version = f", version {route.rewrite.version}" if route.rewrite.version else ""
        lines.append(f"as model {route.rewrite.model}{version}")
    if route.deny:
        lines.append(f"but not {', '.join(route.deny)}")
    return "; ".join(lines)


def _tls(declared: ClientTls) -> str:
    said = f"TLS on TCP addresses, with the certificate in {declared.certificate}"
    if declared.client_ca is not None:
        need = declared.client_certificates or "required"
        said += f"; client certificates {need}, issued by {declared.client_ca}"
    return said


def _taken(match: Match) -> str:
    parts = [f"model {match.model}"] if match.model else []
    parts += [f"version {match.version}"] if match.version else []
    parts += [f"{name}: {value}" for name, value in match.headers.items()]
    parts += [" or ".join(match.kinds)] if match.kinds else []
    return ", ".join(parts) or "every request"
