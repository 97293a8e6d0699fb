"""The command ``tensorgate``, and ``python -m gateway``."""

import gc
import os
import signal
import sys

_IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended, as shells have it."""


def main() -> None:
    """Run the command line; where a command does not handle Ctrl-C, that ends it with one line."""
    # A shell ignores it for commands in the background.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # An exception could come up anywhere in the imports, which take a quarter of a second.
        signal.signal(signal.SIGINT, _end)
    if sys.argv[1:2] == ["serve"]:
        # A reload or a log rotation may come at any time; before it serves, they would end it.
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
    # There is next to no garbage at the start, and to look for it takes a tenth of the time. What
    # runs for long enables it: tune_garbage_collector.
    gc.disable()
    # Looking for plugins, pydantic reads the metadata of all packages: some 10 ms for a hundred.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from gateway.cli import main as run

    run()


def _end(*_: object) -> None:
    os.write(2, b"tensorgate: interrupted\n")
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
