"""Commands of `atelier` in the process of the test."""

from __future__ import annotations

import sys

import pytest

from deployments.cli.main import main


def run_atelier(*words: object) -> int | str:
    """Run one command. Returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["atelier", *map(str, words)])
        patch.setattr(sys, "excepthook", sys.excepthook)  # in whose place typer puts its own
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code or 0
