"""The files that commands write for people: pictures and pages."""

from __future__ import annotations

from pathlib import Path

from deployments.cli.generate import OptionError


def check_plot(path: Path | None) -> None:
    """Raise OptionError before minutes go by, for a picture that could not be written afterwards."""
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        raise OptionError(f"--plot {path}: expected a file that ends in .svg")
    if path.is_dir():
        raise OptionError(f"--plot {path}: a folder is there")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--plot {path}: {error.strerror or error}") from None


def write_file(path: Path, text: str) -> None:
    """Write a file and the folders above it. Raises OptionError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}") from None
