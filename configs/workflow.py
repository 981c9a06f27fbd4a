"""A workflow of ComfyUI that is served as a pipeline: what it takes and gives, by name, and its nodes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from configs.model import ModelId, StrictModel
from configs.pipeline import Name, PipelineConfig


class WorkflowInput(StrictModel):
    """A value of a node that requests may give, as a type of a pipeline's input; else it is what the workflow says."""

    node: str
    input: str
    type: Literal["text", "int", "float", "BOOL[-1]", "image"]
    required: bool = False


class WorkflowOutput(StrictModel):
    """What a node saves or shows."""

    node: str
    type: Literal["text", "image"]


class WorkflowConfig(StrictModel):
    """A registered workflow. `nodes` is a document of the API's form; whoever knows its nodes has checked it."""

    id: ModelId
    nodes: dict[str, Any]
    inputs: dict[Name, WorkflowInput] = Field(min_length=1)
    outputs: dict[Name, WorkflowOutput] = Field(min_length=1)
    description: str = ""

    def as_pipeline(self) -> PipelineConfig:
        """Return the pipeline of one stage that runs it."""
        stage = "workflow"
        while stage in self.inputs:
            stage += "_"
        types = {name: one.type if one.required else f"optional {one.type}" for name, one in self.inputs.items()}
        stages = [{"name": stage, "model": self.id, "inputs": {name: f"${name}" for name in self.inputs}}]
        outputs = {name: f"${stage}.{name}" for name in self.outputs}
        about = {"id": self.id, "description": self.description}
        return PipelineConfig.model_validate(about | {"inputs": types, "stages": stages, "outputs": outputs})
