"""A workflow as a pipeline: nodes with a plain name are its inputs, what is saved or shown its outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kit.workflows import workflow_of

from configs.pipeline import PipelineConfig
from configs.workflow import WorkflowConfig, WorkflowInput, WorkflowOutput
from deployments.workflows.named_nodes import find_ports, with_values
from deployments.workflows.reading import api_form, read_workflow
from deployments.workflows.records import Workflow, WorkflowError

SIZE = {"width": 16, "height": 16, "batch_size": 1, "color": 7}
NODES: dict[str, tuple[str, dict[str, Any]]] = {
    "words": ("PrimitiveStringMultiline", {"value": "a seven"}),
    "number": ("PrimitiveInt", {"value": 3}),
    "colors": ("EmptyImage", SIZE),
    "photo": ("LoadImage", {"image": "me.png"}),
    "both": ("ImageBatch", {"image1": ("colors", 0), "image2": ("photo", 0)}),
    "show": ("PreviewAny", {"source": ("words", 0)}),
    "count": ("PreviewAny", {"source": ("number", 0)}),
    "save": ("SaveImage", {"images": ("both", 0), "filename_prefix": "x"}),
    "again": ("PreviewImage", {"images": ("photo", 0)}),
    "alone": ("PrimitiveFloat", {"value": 1.0}),
}


def titled(workflow: Workflow, **titles: str) -> Workflow:
    return Workflow({id_: replace(one, title=titles.get(id_, one.title)) for id_, one in workflow.nodes.items()})


def test_named_nodes_are_inputs_and_what_is_saved_or_shown_is_given() -> None:
    names = {"words": "prompt", "number": "Int", "colors": "size", "photo": "photo", "save": "poster"}
    workflow = titled(workflow_of(**NODES), **names, alone="unused", both="middle", again="Preview Image")
    inputs, outputs = find_ports(workflow)
    sizes = {f"size_{name}": WorkflowInput(node="colors", input=name, type="int") for name in SIZE}
    assert inputs == sizes | {
        "prompt": WorkflowInput(node="words", input="value", type="text"),
        "photo": WorkflowInput(node="photo", input="image", type="image", required=True),
    }
    assert list(outputs.items()) == [
        ("poster", WorkflowOutput(node="save", type="image")),
        ("image", WorkflowOutput(node="again", type="image")),
        ("text", WorkflowOutput(node="show", type="text")),
        ("text_2", WorkflowOutput(node="count", type="text")),
    ]
    config = WorkflowConfig(id="p", nodes=api_form(workflow), inputs=inputs, outputs=outputs)
    assert read_workflow(config.nodes) == workflow
    assert config.as_pipeline() == PipelineConfig.model_validate(
        {
            "id": "p",
            "inputs": dict.fromkeys(sizes, "optional int") | {"photo": "image", "prompt": "optional text"},
            "stages": [{"name": "workflow", "model": "p", "inputs": {name: f"${name}" for name in inputs}}],
            "outputs": {name: f"$workflow.{name}" for name in outputs},
        }
    )
    other = with_values(workflow, {("words", "value"): "an eight"})
    assert (other.nodes["words"].inputs, workflow.nodes["words"].inputs) == (
        {"value": "an eight"},
        {"value": "a seven"},
    )


def test_an_input_may_have_the_name_of_the_stage() -> None:
    inputs, outputs = find_ports(titled(workflow_of(**NODES), words="workflow", photo="photo"))
    pipeline = WorkflowConfig(id="p", nodes={}, inputs=inputs, outputs=outputs).as_pipeline()
    assert pipeline.stages[0].name == "workflow_"


@pytest.mark.parametrize(
    ("titles", "said"),
    [
        ({"words": "prompt"}, "node photo, LoadImage: a pipeline's images come with its requests"),
        ({"photo": "My photo", "words": "prompt"}, "My photo (LoadImage)"),
        ({"words": "one", "number": "one", "photo": "photo"}, "'one' is the name of node words already"),
        ({"colors": "x" * 60, "photo": "photo"}, "at most 64 characters"),
    ],
)
def test_what_cannot_be_named_is_refused_by_its_node(titles: dict[str, str], said: str) -> None:
    with pytest.raises(WorkflowError) as caught:
        find_ports(titled(workflow_of(**NODES), **titles))
    assert said in str(caught.value)


def test_a_workflow_without_a_named_node_says_what_to_do() -> None:
    nodes = {id_: NODES[id_] for id_ in ("words", "show")}
    with pytest.raises(WorkflowError, match="give such a node a title of one word"):
        find_ports(titled(workflow_of(**nodes), words="String (Multiline)"))
    film = ("LoadVideo", {"file": "me.mp4"})
    parts: dict[str, Any] = {"film": film, "parts": ("GetVideoComponents", {"video": ("film", 0)})}
    shown = workflow_of(**NODES | parts, end=("PreviewImage", {"images": ("parts", 0)}))
    with pytest.raises(WorkflowError, match="clip \\(LoadVideo\\): a pipeline's requests bring images and texts"):
        find_ports(titled(shown, words="prompt", photo="photo", film="clip"))
    both = {"image_a": ("colors", 0), "image_b": ("colors", 0)}
    compared = workflow_of(colors=NODES["colors"], end=("ImageCompare", both))
    with pytest.raises(WorkflowError, match="node end, ImageCompare: a pipeline gives images and texts"):
        find_ports(titled(compared, colors="size"))
