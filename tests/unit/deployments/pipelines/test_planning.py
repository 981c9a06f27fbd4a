"""Config and known models -> plan, or every mistake with its place; and which stages run together."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.counting import operations

from cluster.registry.directory import ModelRecord
from configs.pipeline import PipelineConfig
from deployments.ingress.service.catalog import _openai_role, _OpenAiRole
from deployments.pipelines.edge_types import TEXT, EdgeType
from deployments.pipelines.pipelines import Pipelines
from deployments.pipelines.planning import PipelineUnusable, check_pipeline, plan_pipeline, plan_segments
from deployments.pipelines.plans import Edge, SegmentPlan, StagePlan, form_units
from deployments.pipelines.records import Signature, TensorSpec
from weights.operations.feature_sizes import FeatureSizes

MODELS = {
    "flux": ModelRecord("flux", "ready", "diffusion"),
    "adder": ModelRecord("adder", "ready", "llm"),
    "bert": ModelRecord("bert", "ready", "embedding", features=FeatureSizes(out_features=8)),
    "head": ModelRecord("head", "ready", "head", features=FeatureSizes(8, 3)),
    "ranker": ModelRecord("ranker", "ready", "reranker"),
    "sorter": ModelRecord("sorter", "ready", "classifier", features=FeatureSizes(None, 3, ("x", "y", "z"))),
    "wide-head": ModelRecord("wide-head", "ready", "head", features=FeatureSizes(9)),
    "lora": ModelRecord("lora", "ready", "adapter"),
    "late": ModelRecord("late", "registering"),
    "torn": ModelRecord("torn", "unavailable", error="it is torn"),
}
LABELS = ["a", "b", "c"]


def pipeline(*stages: dict[str, Any], inputs: dict[str, str] | None = None, **outputs: str) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {"id": "p", "inputs": inputs or {"text": "text"}, "stages": stages, "outputs": outputs}
    )


def stage(name: str, inputs: dict[str, Any], **target: str) -> dict[str, Any]:
    return {"name": name, "inputs": inputs, **target}


CLASSIFIER = pipeline(
    stage("classes", {"logits": "$logits", "labels": LABELS}, function="classify"),
    stage("ids", {"text": "$text"}, tokenizer="bert"),
    stage("logits", {"features": "$vector"}, model="head"),
    stage("vector", {"tokens": "$ids"}, model="bert"),
    label="$classes.label",
    scores="$classes.scores",
)


def test_a_text_classifier_is_one_segment() -> None:
    plan = plan_pipeline(CLASSIFIER, MODELS, max_batch_size=4)
    (segment,) = plan.units
    assert isinstance(segment, SegmentPlan)
    assert [stage.name for stage in segment.stages] == ["ids", "vector", "logits", "classes"]
    assert segment.results == (Edge("classes", "label"), Edge("classes", "scores"))
    assert segment.models == {"bert", "head"}
    assert segment.buffers == {Edge("vector", "embedding"): (4, 8), Edge("logits", "output"): (4, 3)}
    assert segment.memory.live_bytes == 4 * 8 * 4 + 4 * 3 * 4
    assert plan.signature.inputs == (TensorSpec("text", "BYTES", (-1,)),)
    assert plan.signature.outputs == (TensorSpec("label", "BYTES", (-1,)), TensorSpec("scores", "FP32", (-1, -1)))


def test_scores_have_the_labels_of_their_stage_or_of_its_head() -> None:
    given = plan_pipeline(CLASSIFIER, MODELS)
    assert given.labels_of("scores", {"head": ("x", "y", "z")}) == LABELS
    config = pipeline(
        stage("ids", {"text": "$text"}, tokenizer="bert"),
        stage("vector", {"tokens": "$ids"}, model="bert"),
        stage("logits", {"features": "$vector"}, model="head"),
        stage("shares", {"scores": "$logits"}, function="softmax"),
        vector="$vector",
        logits="$logits",
        shares="$shares",
    )
    plan, names = plan_pipeline(config, MODELS), {"head": ("x", "y", "z")}
    found = {output: tuple(plan.labels_of(output, names)) for output in plan.outputs}
    assert found == {"vector": (), "logits": names["head"], "shares": names["head"]}
    assert plan.labels_of("logits", {}) == ()
    assert Pipelines([config], None, SimpleNamespace(records=MODELS)).labels("p") == {
        "vector": (),
        "logits": (),
        "shares": (),
    }  # type: ignore[arg-type]
    labelled = replace(MODELS["head"], features=FeatureSizes(8, 3, names["head"]))
    pipelines = Pipelines([config], None, SimpleNamespace(records=MODELS | {"head": labelled}))  # type: ignore[arg-type]
    assert pipelines.labels("p") == found


def test_a_replica_knows_at_its_start_what_memory_pipelines_need() -> None:
    late = pipeline(stage("vector", {"text": "$text"}, model="late"), out="$vector")
    (segment,) = plan_segments([late, CLASSIFIER], MODELS, 4)
    assert (segment.pipeline, segment.memory.live_bytes) == ("p", 4 * 8 * 4 + 4 * 3 * 4)
    assert plan_segments([CLASSIFIER], {}, 4) == []


def test_optional_inputs_are_optional_outside() -> None:
    config = pipeline(
        stage("digit_image", {"prompt": "$text", "seed": "$seed"}, model="flux"),
        inputs={"text": "text", "seed": "optional int"},
        image="$digit_image",
    )
    plan = plan_pipeline(config, MODELS)
    assert plan.signature.inputs[1] == TensorSpec("seed", "INT64", (-1,), optional=True)
    assert plan.signature.outputs == (TensorSpec("image", "UINT8", (-1, -1, -1, 3)),)


def chain(num_stages: int, first: dict[str, Any], further: Callable[[str], dict[str, Any]]) -> PipelineConfig:
    stages = [first, *({"name": f"s{n}", **further(f"$s{n - 1}")} for n in range(1, num_stages))]
    return pipeline(*stages, out=f"$s{num_stages - 1}")


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("first", "further"),
    [
        (
            stage("s0", {"first": "$text", "second": "x"}, function="join_texts"),
            lambda before: {"function": "join_texts", "inputs": {"first": before, "second": "x"}},
        ),
        (
            stage("s0", {"text": "$text"}, model="bert"),
            lambda before: {"model": "square-head", "inputs": {"features": before}},
        ),
        (
            stage("s0", {"message": "$text"}, model="adder"),
            lambda before: {"model": "adder", "inputs": {"message": before}},
        ),
    ],
    ids=["functions", "one segment", "models"],
)
def test_a_plan_takes_time_in_proportion_to_its_stages(
    first: dict[str, Any], further: Callable[[str], dict[str, Any]]
) -> None:
    models = MODELS | {"square-head": ModelRecord("square-head", "ready", "head", features=FeatureSizes(8, 8))}

    def cost(num_stages: int) -> int:
        return operations(lambda: plan_pipeline(chain(num_stages, first, further), models))

    cost(5)  # what is done once
    assert cost(200) < 2.5 * cost(100)


def problems(config: PipelineConfig) -> dict[str, str]:
    with pytest.raises(PipelineUnusable) as caught:
        plan_pipeline(config, MODELS)
    found = {".".join(map(str, problem.location)): problem.text for problem in caught.value.problems}
    assert all(text in str(caught.value) for text in found.values())
    return found


@pytest.mark.parametrize(
    ("wrong", "location", "parts"),
    [
        (stage("s", {"prompt": "$text"}, model="fluks"), "model", ["unknown model 'fluks'", "did you mean 'flux'"]),
        (stage("s", {"prompt": "$text"}, model="lora"), "model", ["'lora' (adapter) cannot be a stage", "diffusion"]),
        (stage("s", {"text": "$text"}, tokenizer="adder"), "tokenizer", ["adder", "llm", "no embedding model"]),
        (stage("s", {"text": "$text"}, function="softmx"), "function", ["did you mean 'softmax'"]),
        (stage("s", {"promt": "$text", "prompt": "$text"}, model="flux"), "inputs.promt", ["did you mean 'prompt'"]),
        (stage("s", {"negative_prompt": "$text"}, model="flux"), "inputs", ["flux needs 'prompt' (text)"]),
        (stage("s", {"prompt": "$vector"}, model="flux"), "inputs.prompt", ["text, but $vector is FP32[-1,8]"]),
        (stage("s", {"prompt": "$text", "seed": "$text"}, model="flux"), "inputs.seed", ["expected int", "is text"]),
        (stage("s", {"prompt": "$text", "seed": 1.5}, model="flux"), "inputs.seed", ["expected int, got 1.5"]),
        (stage("s", {"prompt": "$text", "seed": True}, model="flux"), "inputs.seed", ["expected int, got True"]),
        (stage("s", {"features": "$vector"}, model="wide-head"), "inputs.features", ["FP32[-1,9]", "is FP32[-1,8]"]),
        (stage("s", {"message": "$text", "prompt": "$text"}, model="adder"), "inputs", ["one of message and prompt"]),
        (stage("s", {"stop": ["$text"], "seed": 1}, model="adder"), "inputs", ["got none"]),
        (stage("s", {"prompt": "$text", "system": "x"}, model="adder"), "inputs.system", ["with 'message' only"]),
        (stage("s", {"prompt": "$text"}, model="late"), "model", ["model 'late' is registering"]),
        (
            stage("s", {"template": "a {word} and {text}", "wrod": "$text", "text": "$text"}, function="fill_template"),
            "inputs",
            ["the template wants 'word'; did you mean 'wrod'? (known: text, wrod)"],
        ),
        (stage("s", {"prompt": "$text"}, model="torn"), "model", ["model 'torn' is unavailable: it is torn"]),
        (stage("s", {"message": "$maybe", "system": "$text"}, model="adder"), "inputs.message", ["may be left out"]),
        (stage("s", {"prompt": "$maybe", "seed": 1}, model="flux"), "inputs.prompt", ["may be left out"]),
        (stage("s", {"logits": "$vector", "labels": "$text"}, function="classify"), "inputs.labels", ["list of str"]),
        (stage("s", {"logits": "$vector", "labels": [1]}, function="classify"), "inputs.labels", ["str, got (1,)"]),
        (stage("s", {"template": "{x}", "x": "$vector"}, function="fill_template"), "inputs.x", ["text or int or"]),
        (stage("s", {"text": "$classes"}, function="sum_question"), "inputs.text", ["choose one of $classes.label"]),
        (stage("s", {"text": "$classes.lable"}, function="sum_question"), "inputs.text", ["no output 'lable'"]),
    ],
)  # fmt: skip
def test_mistakes_name_stage_edge_and_both_types(wrong: dict[str, Any], location: str, parts: list[str]) -> None:
    config = pipeline(
        stage("vector", {"text": "$text"}, model="bert"),
        stage("classes", {"logits": "$vector", "labels": LABELS}, function="classify"),
        wrong,
        stage("digit_image", {"prompt": "$text", "negative_prompt": "$maybe"}, model="flux"),
        inputs={"text": "text", "maybe": "optional text"},
        label="$classes.label",
        image="$digit_image",
        s="$s.label" if wrong.get("function") == "classify" else "$s",
    )
    found = problems(config)
    assert found.keys() == {f"stages.2.{location}"}
    text = found[f"stages.2.{location}"]
    assert text.startswith("stage 's': ")
    assert all(part in text for part in parts), text


def test_all_mistakes_are_told_at_once() -> None:
    config = pipeline(
        stage("a", {"message": "$text", "temperature": "hot"}, model="adder"),
        stage("b", {"text": "$a"}, function="nothing"),
        stage("c", {"prompt": "$b", "width": "$a"}, model="flux"),
        image="$c.digit_image",
    )
    found = problems(config)
    assert found["stages.1.function"].startswith("stage 'b': unknown function 'nothing'")
    assert found.keys() == {
        "stages.0.inputs.temperature",
        "stages.1.function",
        "stages.2.inputs.width",
        "outputs.image",
    }


def test_before_the_models_are_known_functions_are_checked_already() -> None:
    config = pipeline(
        stage("number", {"text": "$text"}, function="whole_number"),
        stage("word", {"text": "$number"}, function="whole_number"),
        stage("digit_image", {"prompt": "$word", "anything": "$number"}, model="not-there-yet"),
        stage("end", {"text": "$digit_image.image"}, function="single_digit"),
        out="$end",
    )
    (problem,) = check_pipeline(config)
    assert problem.location == ("stages", 1, "inputs", "text")
    assert "expected text, but $number is int" in problem.text
    assert check_pipeline(CLASSIFIER) == []


def embed(name: str, *sources: str) -> StagePlan:
    return StagePlan(name, "embed", "bert", {s: Edge(s, "x") for s in sources}, {}, {"x": EdgeType("FP32", (-1, 8))})


def other(name: str, *sources: str, action: Any = "write") -> StagePlan:
    return StagePlan(name, action, "adder", {s: Edge(s, "x") for s in sources}, {}, {"x": TEXT})


def names(units: list[Any]) -> list[list[str]]:
    return [[stage.name for stage in unit.stages] if isinstance(unit, SegmentPlan) else [unit.name] for unit in units]


def test_a_segment_does_not_wait_for_what_its_first_stage_need_not() -> None:
    stages = [embed("a"), other("llm"), other("both", "a", "llm", action="function"), embed("b", "a")]
    units = form_units("p", stages, [Edge("both", "x"), Edge("b", "x")], 2)
    assert names(units) == [["a", "b"], ["llm"], ["both"]]
    assert isinstance(units[2], SegmentPlan)  # takes a's vector by reference, in the encoder
    assert units[0].results == (Edge("a", "x"), Edge("b", "x"))  # type: ignore[union-attr]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_units_can_run_one_after_the_other_and_wait_for_nothing_new(seed: int) -> None:
    draw = random.Random(seed)
    stages: list[StagePlan] = []
    for index in range(draw.randint(1, 12)):
        sources = draw.sample([stage.name for stage in stages], min(len(stages), draw.randint(0, 3)))
        make = draw.choice([embed, other, lambda *names: other(*names, action="function")])
        stages.append(make(f"s{index}", *sources))
    outputs = [Edge(stage.name, "x") for stage in draw.sample(stages, draw.randint(1, len(stages)))]
    units = form_units("p", stages, outputs, 2)
    assert sorted(name for unit in names(units) for name in unit) == sorted(stage.name for stage in stages)
    ancestors: dict[str, set[str]] = {}
    for one in stages:
        ancestors[one.name] = set(one.needs).union(*(ancestors[name] for name in one.needs))
    done: set[str] = set()
    for unit in units:
        assert unit.needs <= done
        members = unit.stages if isinstance(unit, SegmentPlan) else (unit,)
        assert unit.needs <= ancestors[members[0].name]
        for member in members:
            assert member.needs <= done
            done.add(member.name)
            if member.action == "embed":
                assert isinstance(unit, SegmentPlan)
        if isinstance(unit, SegmentPlan):
            inside = {member.name for member in members}
            wanted = {edge for s in stages if s.name not in inside for edge in s.edges.values()} | set(outputs)
            assert set(unit.results) == {edge for edge in wanted if edge.stage in inside}


TEXT_IN = TensorSpec("prompt", "BYTES", (-1,))
SEED_IN = TensorSpec("seed", "INT64", (-1,), optional=True)


@pytest.mark.parametrize(
    ("inputs", "output", "endpoint"),
    [
        ((TEXT_IN, SEED_IN), TensorSpec("o", "UINT8", (-1, -1, -1, 3)), "images"),
        ((TEXT_IN, SEED_IN), TensorSpec("o", "BYTES", (-1,)), "text"),
        ((TEXT_IN,), TensorSpec("o", "FP32", (-1, 384)), "embeddings"),
        ((TEXT_IN,), TensorSpec("o", "FP32", (-1,)), None),
        ((TEXT_IN,), TensorSpec("o", "INT64", (-1, -1)), None),
        ((TEXT_IN, TensorSpec("b", "BYTES", (-1,))), TensorSpec("o", "BYTES", (-1,)), None),
        ((TensorSpec("n", "INT64", (-1,)),), TensorSpec("o", "BYTES", (-1,)), None),
    ],
)
def test_which_endpoint_a_pipeline_serves(inputs: Any, output: TensorSpec, endpoint: Any) -> None:
    options = tuple(spec.name for spec in inputs if spec.optional)
    expected = _OpenAiRole(endpoint, "prompt", "o", options) if endpoint else None
    assert _openai_role(Signature(inputs, (output, TEXT_IN))) == expected


def test_rerankers_and_classifiers_are_stages() -> None:
    config = pipeline(
        stage("rank", {"query": "which one?", "text": "$text"}, model="ranker"),
        stage("kind", {"text": "$text"}, model="sorter"),
        score="$rank",
        kinds="$kind",
    )
    plan = plan_pipeline(config, MODELS)
    assert plan.signature.outputs == (TensorSpec("score", "FP32", (-1,)), TensorSpec("kinds", "FP32", (-1, 3)))
    assert {unit.name for unit in plan.units if isinstance(unit, SegmentPlan)} == {"rank", "kind"}
    assert plan.labels_of("kinds", {"sorter": ("x", "y", "z")}) == ("x", "y", "z")
    lacking = pipeline(stage("rank", {"text": "$text"}, model="ranker"), score="$rank")
    [problem] = check_pipeline(lacking, MODELS)
    assert "ranker needs 'query' (text)" in problem.text
