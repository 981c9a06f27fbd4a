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


CONFIGS = ("configs", modules("configs"), ["ray", "torch", "numpy", "fastapi"])
CLI = ("cli", ["deployments.cli.main"], ["torch", "ray", "transformers", "diffusers", "fastapi"])
CLIENT = ("client", ["deployments.console.client", "deployments.records"], ["torch", "ray"])
CONTROL_PLANE = ("cluster", modules("cluster"), ["torch", "transformers", "diffusers", "deployments"])
DRIVER = ("driver", ["deployments.app", "deployments.console.running"], ["torch", "transformers", "diffusers", "scipy"])
INGRESS = ("ingress", ["deployments.ingress.http"], ["torch", "transformers", "diffusers", "scipy"])
FOR_CUDA = ("deployments.engines.nn.triton_products",)  # triton comes with CUDA builds of torch
ENGINES = (
    "weights and engines",
    modules("weights") + [name for name in modules("deployments.engines") if name not in FOR_CUDA],
    ["ray", "fastapi", "starlette", "uvicorn", "cluster"],
)
LOCAL = ("local", ["deployments.local"], ["ray", "fastapi"])


@pytest.mark.parametrize(
    "imports",
    [
        (CONFIGS, CLI, CLIENT),
        (CONTROL_PLANE, DRIVER, INGRESS),
        # Imports both libraries of models; an import contract says the same of ours.
        pytest.param((ENGINES, LOCAL), marks=pytest.mark.long),
    ],
    ids=lambda all_: all_[0][0],
)
def test_an_import_stays_light(imports: tuple[tuple[str, list[str], list[str]], ...]) -> None:
    """Those of one process come one after the other: what a later one does not want, none before has loaded."""
    code = ["import sys"]
    for name, imported, unwanted in imports:
        assert imported
        code += [f"import {', '.join(imported)}", f"print({name!r}, sorted(set({unwanted!r}) & set(sys.modules)))"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, cwd=ROOT, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} []" for name, _, _ in imports]
