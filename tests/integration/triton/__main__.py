"""Run the tests' Triton by hand: python -m tests.integration.triton."""

import argparse
import signal
import sys
from types import FrameType

from tests.integration.environment import MissingServerError
from tests.integration.support.real_server import HOST, ServerError
from tests.integration.triton.server import TritonServer


def main() -> None:
    """Start the server and keep it until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.integration.triton",
        description="Run the real Triton server of the tests by hand. A port of 0 is any free one.",
    )
    for number, name in enumerate(("http", "grpc", "metrics")):
        parser.add_argument(f"--{name}-port", type=int, default=8000 + number)
    server = TritonServer(**vars(parser.parse_args()))
    # SIGINT too: a shell starts background jobs with it ignored.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, _leave)
    try:
        print(f"starting Triton with {len(server.models)} models ...", flush=True)
        with server:
            print(f"ready: {server.http_url}, gRPC {HOST}:{server.grpc_port}")
            print(f"metrics {server.metrics_url}, log {server.log_path}")
            print("models", *(model.name for model in server.models))
            print("Ctrl-C ends it", flush=True)
            status = server.wait()
            sys.exit(f"Triton ended by itself with status {status}:\n{server.log_tail()}")
    except KeyboardInterrupt:
        print("stopped")
    except (ServerError, MissingServerError) as error:
        sys.exit(str(error))


def _leave(_signal: int, _frame: FrameType | None) -> None:
    # An exception, so that the server is stopped and its files are removed on the way out.
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
