"""The entry of the command `atelier`: Ctrl-C ends it without a traceback, also during its imports."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deployments.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
