"""Modules that importing a package loads, looked at in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def modules(package: str) -> list[str]:
    files = (ROOT / package.replace(".", "/")).rglob("*.py")
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return sorted(name.removesuffix(".__init__") for name in names)


@pytest.mark.parametrize(
    ("imported", "unwanted"),
    [
        (modules("configs"), ["ray", "torch", "numpy", "fastapi"]),
        (modules("weights") + modules("deployments.engines"), ["ray", "fastapi", "starlette", "uvicorn", "cluster"]),
        (modules("cluster"), ["torch", "transformers", "diffusers", "deployments"]),
        (["deployments.cli.main"], ["torch", "ray", "transformers", "diffusers", "fastapi"]),
        (["deployments.cli.client", "deployments.records"], ["torch", "ray"]),
        (["deployments.local"], ["ray", "fastapi"]),
        (["deployments.app", "deployments.cli.running"], ["torch", "transformers", "diffusers", "scipy"]),
        (["deployments.ingress.http"], ["torch", "transformers", "diffusers", "scipy"]),
    ],
    ids=["configs", "weights and engines", "cluster", "cli", "client", "local", "driver", "ingress"],
)
def test_an_import_stays_light(imported: list[str], unwanted: list[str]) -> None:
    assert imported
    code = f"import sys, {', '.join(imported)}\nprint(*sorted(set({unwanted!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
