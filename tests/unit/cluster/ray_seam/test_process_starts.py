"""Templates of processes are optional: without their package, or where they are off, processes start as Ray has it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cluster.ray_seam.template_records import Template
from cluster.start.process_starts import quick_starts, template_environment, template_stats


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of templates as processes of a cluster find it."""
    (tmp_path / "worker").touch()
    monkeypatch.setenv("ATELIER_TEMPLATES", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_tree_without_the_package_starts_everything_as_usual_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert template_environment("worker") == {"ATELIER_TEMPLATE": "worker"}
    assert template_stats() is not None
    for name in [name for name in sys.modules if name.startswith("cluster.ray_seam.templates")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cluster.ray_seam.templates", None)
    before = dict(os.environ)
    with quick_starts(Template("ray", ["no_such_module"])):
        assert os.environ == before
    (line,) = caplog.messages
    assert "cluster.ray_seam.templates" in line
    assert template_environment("worker") == {}
    assert template_stats() is None


def test_an_error_in_the_block_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError of the cluster's own start is not taken for an absent package."""
    monkeypatch.setitem(sys.modules, "cluster.ray_seam.templates.starting", None)
    with pytest.raises(ImportError, match="of the block"), quick_starts(Template("ray", [])):
        raise ImportError("of the block")
