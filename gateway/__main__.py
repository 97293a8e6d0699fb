"""``python -m gateway`` is ``tensorgate``."""

from gateway.cli import main

if __name__ == "__main__":
    main()
