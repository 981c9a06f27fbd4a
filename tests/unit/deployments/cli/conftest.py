"""The command line in this process: what one command prints and how it ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.main
from kit.command_line import run_atelier


@pytest.fixture(autouse=True, scope="session")
def one_parser() -> Iterator[None]:
    """Make the tree of commands once: typer reads the signatures of all of them whenever one is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.main.get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Return exit code, stdout and stderr of one command, which knows no key and runs in a private folder."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("ATELIER_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> tuple[int, str, str]:
        code = run_atelier(*arguments)
        captured = capsys.readouterr()
        return int(code), captured.out, captured.err

    return command
