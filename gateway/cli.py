"""The command line: serve, check, demo."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path

import click
import uvloop

from gateway import __version__
from gateway.app import Gateway, ListenError
from gateway.demo.curl import curl_lines
from gateway.demo.server import DemoServer
from gateway.demo.show import ShowError, run_show
from gateway.settings.load import load
from gateway.settings.problems import SettingsError
from gateway.settings.schema import Settings

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
    _start_logging(settings.log.level)
    _run(_serve(settings))


@main.command()
@click.argument("config", metavar="FILE", type=click.Path(path_type=Path))
def check(config: Path) -> None:
    """Say what is wrong with a settings file, or what it would serve."""
    click.echo(_summary(_load(config)))


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
    _run(_demo(once, port))


def _load(path: Path) -> Settings:
    try:
        return load(path, os.environ)
    except SettingsError as error:
        click.echo(str(error), err=True)
        sys.exit(2)


def _start_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def _run(main: Coroutine[None, None, None]) -> None:
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)
    except (ListenError, ShowError) as error:
        click.echo(f"tensorgate: {error}", err=True)
        sys.exit(1)


async def _serve(settings: Settings) -> None:
    stop = _stop_signal()
    async with Gateway(settings) as gateway:
        for address in gateway.addresses:
            _log.info("listening on %s", address)
        # What is loaded by now stays: a full collection need not look at it again, which would
        # hold the event loop for tens of milliseconds.
        gc.collect()
        gc.freeze()
        await stop.wait()
        _log.info("stopping: at most %g s for what is running", settings.limits.drain_time)
    if gateway.dropped:
        _log.warning("%d exchanges took longer and were dropped", gateway.dropped)
    _log.info("stopped")


async def _demo(once: bool, port: int) -> None:
    stop = _stop_signal()
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


def _stop_signal() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def _summary(settings: Settings) -> str:
    lines = [f"listen on {', '.join(map(str, settings.listen))}"]
    for route in settings.routes:
        upstream = settings.upstreams[route.upstream]
        lines.append(
            f"every request → upstream {route.upstream} ({upstream.dialect}): "
            + ", ".join(upstream.endpoints)
        )
    return "\n".join(lines)
