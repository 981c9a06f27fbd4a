"""Pipelines in the config: what is read, and how each mistake is told, with its line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

import configs.pipeline
from configs.errors import ConfigFileError
from configs.loading import load_cluster_config
from configs.pipeline import PipelineConfig, Reference, parse_tensor_type

EXAMPLE = """\
id: p
inputs: {prompt: text, seed: optional int}
stages:
  - {name: a, model: adder, inputs: {message: $prompt, temperature: 0, stop: [x, y], note: $$5}}
  - name: b
    function: f
    inputs: {text: $a, seed: $seed}
outputs: {image: $b.left}
"""


def edited(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(EXAMPLE)
    return data | changes


def problems(data: dict[str, Any]) -> dict[tuple[str | int, ...], str]:
    with pytest.raises(ValidationError) as caught:
        PipelineConfig.model_validate(data)
    return {detail["loc"]: detail["msg"] for detail in caught.value.errors()}


def test_references_and_literals_are_told_apart() -> None:
    config = PipelineConfig.model_validate(yaml.safe_load(EXAMPLE))
    first, second = config.stages
    assert first.references == {"message": Reference("prompt")}
    assert first.literals == {"temperature": 0, "stop": ("x", "y"), "note": "$5"}
    assert second.references == {"text": Reference("a"), "seed": Reference("seed")}
    assert config.output_references == {"image": Reference("b", "left")}
    assert config.dependencies == {"a": set(), "b": {"a"}}


def test_a_config_survives_being_written_and_read() -> None:
    config = PipelineConfig.model_validate(yaml.safe_load(EXAMPLE))
    assert PipelineConfig.model_validate_json(config.model_dump_json()) == config


def test_the_example_of_the_module_is_valid() -> None:
    assert configs.pipeline.__doc__ is not None
    block = re.search(r"^    pipelines:\n(?:^      .*\n)+", configs.pipeline.__doc__, re.MULTILINE)
    assert block is not None
    (data,) = yaml.safe_load(block[0])["pipelines"]
    assert PipelineConfig.model_validate(data).id == "sum-to-digit"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FP32[-1]", ("FP32", (-1,))),
        ("FP32[-1, 3,-1]", ("FP32", (-1, 3, -1))),
        ("FP31[-1]", None),
        ("FP32[3]", None),
        ("FP32", None),
        ("text", None),
    ],
)
def test_tensor_types(text: str, expected: Any) -> None:
    assert parse_tensor_type(text) == expected


@pytest.mark.parametrize(
    ("changes", "location", "parts"),
    [
        ({"inputs": {"prompt": "txt", "seed": "optional int"}}, ("inputs", "prompt"), ["unknown type", "'text'"]),
        ({"inputs": {"prompt": 3}}, ("inputs", "prompt"), ["unknown type"]),
        ({"inputs": {"prompt": "text", "seed": "optional int", "extra": "int"}}, ("inputs", "extra"), ["no stage"]),
        ({"outputs": {"image": "$c"}}, ("outputs", "image"), ["unknown name 'c'", "known: a, b"]),
        ({"outputs": {"image": "b"}}, ("outputs", "image"), ["expected a reference"]),
        ({"outputs": {"image": "$prompt"}}, ("outputs", "image"), ["comes from a stage"]),
        ({"outputs": {"text": "$a"}}, ("stages", 1), ["no output needs stage 'b'"]),
    ],
)
def test_mistakes_around_the_stages(changes: dict[str, Any], location: tuple[Any, ...], parts: list[str]) -> None:
    found = problems(edited(**changes))
    assert all(part in found[location] for part in parts), found


@pytest.mark.parametrize(
    ("stage", "location", "parts"),
    [
        ({"inputs": {"text": "$promt", "seed": "$seed"}}, ("inputs", "text"), ["did you mean 'prompt'"]),
        ({"inputs": {"text": "$prompt.x", "a": "$a", "seed": "$seed"}}, ("inputs", "text"), ["write $prompt"]),
        ({"inputs": {"text": "$", "seed": "$seed"}}, ("inputs", "text"), ["expected a reference"]),
        ({"inputs": {"text": None}}, ("inputs", "text"), ["expected a reference"]),
        ({"inputs": {"text": {"deep": 1}}}, ("inputs", "text"), ["expected a reference"]),
        ({"name": "a"}, ("name",), ["earlier stage"]),
        ({"name": "prompt"}, ("name",), ["an input of the pipeline"]),
        ({"name": "b c"}, ("name",), ["pattern"]),
        ({"model": "m"}, (), ["model and function"]),
        ({"function": None}, (), ["got none"]),
        ({"extra": 1}, ("extra",), ["Extra inputs"]),
    ],
)
def test_mistakes_of_a_stage(stage: dict[str, Any], location: tuple[Any, ...], parts: list[str]) -> None:
    data = edited()
    data["stages"][1] |= stage
    found = problems(data)
    assert all(part in found["stages", 1, *location] for part in parts), found


def test_a_cycle_is_named() -> None:
    data = edited()
    data["stages"][0]["inputs"]["message"] = "$b"
    data["stages"][0]["inputs"]["again"] = "$prompt"
    (text,) = problems(data).values()
    assert "a -> b -> a" in text or "b -> a -> b" in text


def test_all_mistakes_are_told_at_once() -> None:
    data = edited(outputs={"image": "$c"})
    data["stages"][0]["inputs"] = {"message": "$nobody"}
    data["stages"][1]["inputs"] = {"text": "$nothing"}
    assert problems(data).keys() == {
        ("stages", 0, "inputs", "message"),
        ("stages", 1, "inputs", "text"),
        ("outputs", "image"),
    }


def test_the_loader_tells_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    example = EXAMPLE.replace("$a,", "$aa,").replace("function", "functoin")
    lines = ["models: [{id: m, path: m}]", "pipelines:", *("    " + line for line in example.splitlines())]
    lines[2] = lines[2].replace("    id", "  - id", 1)
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigFileError) as caught:
        load_cluster_config(file)
    (problem,) = caught.value.problems
    assert lines[(problem.line or 0) - 1].strip().startswith("functoin")
    assert "did you mean 'function'" in problem.text
    lines[(problem.line or 0) - 1] = lines[(problem.line or 0) - 1].replace("functoin", "function")
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigFileError) as caught:
        load_cluster_config(file)
    (problem,) = caught.value.problems
    assert "$aa" in lines[(problem.line or 0) - 1]
    assert problem.text.startswith("$aa: unknown name 'aa'")


def test_the_old_name_of_the_stages_is_refused_with_the_new_one() -> None:
    data = edited()
    data["steps"] = data.pop("stages")
    assert problems(data) == {("steps",): "unknown key; the stages of a pipeline are listed under 'stages'"}


def test_a_message_lists_twenty_names() -> None:
    names = [f"name{number}" for number in range(21)]
    assert configs.pipeline.nearest_name("?", names[:20]) == f" (known: {', '.join(names[:20])})"
    assert configs.pipeline.nearest_name("?", names) == f" (known: {', '.join(names[:20])}, …)"
