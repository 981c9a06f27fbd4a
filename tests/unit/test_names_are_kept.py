"""Names that operators and clients rely on are still there: metrics, error codes, keys of the config.

`kept_names.json` lists them. `PYTHONPATH=.:tests python tests/unit/test_names_are_kept.py` adds new names. A name that
goes or changes is a change for users: remove it from the list by hand, and write a line in CHANGELOG.md.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from kit.metric_names import metric_names
from pydantic import BaseModel

from configs.cluster import ClusterConfig
from deployments.ingress.messages import responses

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).parent / "kept_names.json"
CODE_POSITION = 3  # of `Failure(status, message, type, code)`


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in sections_of(argument)]


def config_keys(model: type[BaseModel] = ClusterConfig, above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{above}{field.alias or name}"
        yield key
        for section in sections_of(field.annotation):
            yield from config_keys(section, f"{key}.")


def codes_of(source: str) -> Iterator[str]:
    """Yield the codes that a module's calls of `Failure` spell out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Failure":
            named = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            for value in (*node.args[CODE_POSITION : CODE_POSITION + 1], *named):
                if isinstance(value, ast.Constant):
                    yield str(value.value)


def error_codes() -> set[str]:
    spelled = {
        code
        for path in (ROOT / "deployments/ingress").rglob("*.py")
        if "Failure(" in (source := path.read_text())
        for code in codes_of(source)
    }
    return (
        spelled
        | {row[3] for row in responses._TABLE}
        | {*responses._HTTP_CODES.values(), responses.Failure(500, "").code}
    )


def names_of_now() -> dict[str, list[str]]:
    return {
        "config keys": sorted(set(config_keys())),
        "error codes": sorted(error_codes()),
        "metrics": sorted(metric_names()),
    }


@pytest.mark.parametrize("kind", ["config keys", "error codes", "metrics"])
def test_every_kept_name_is_there(kind: str) -> None:
    kept = json.loads(LIST.read_text())[kind]
    assert len(kept) > 20
    assert set(kept) - set(names_of_now()[kind]) == set(), "users rely on these names"


def test_codes_are_found_in_calls() -> None:
    spelled = 'Failure(404, text, "invalid_request_error", "gone")\nFailure(500, text, code="odd")\n'
    source = spelled + 'Failure(400, "x", t, code)'
    assert [*codes_of(source)] == ["gone", "odd"]


if __name__ == "__main__":
    LIST.write_text(json.dumps(names_of_now(), indent=1) + "\n")
