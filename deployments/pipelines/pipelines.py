"""The pipelines of a cluster: their names, their signatures, and running them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from cluster.registry.directory import ModelRecord
from configs.cluster import LimitsConfig
from configs.pipeline import PipelineConfig, nearest_name
from configs.workflow import WorkflowConfig
from deployments.pipelines.edge_types import Batch, batch_of, tensor_of
from deployments.pipelines.planning import DEFAULT_MAX_BATCH_SIZE, PipelineUnusable, plan_pipeline
from deployments.pipelines.plans import PipelinePlan
from deployments.pipelines.records import PipelineRequest, PipelineResult, Signature
from deployments.pipelines.runner import ModelCalls, OnStage, PipelineRun
from deployments.records.errors import InvalidRequest, ModelUnavailable, UnknownModel
from deployments.records.tasks import Deadline


class ModelRecords(Protocol):
    """The models that a cluster has."""

    @property
    def records(self) -> Mapping[str, ModelRecord]:
        """Return all of them as they are now, by id."""


class Pipelines:
    """The pipelines of a config. Plans follow the models: these are looked up for every request.

    `limits` bound the items of one request, `max_timeout_s` how long any takes.
    """

    def __init__(
        self,
        configs: Sequence[PipelineConfig],
        ask: ModelCalls,
        models: ModelRecords,
        *,
        max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
        limits: LimitsConfig | None = None,
        max_timeout_s: float | None = None,
    ) -> None:
        self._configs = {config.id: config for config in configs}
        self._ask = ask
        self._models = models
        self._max_batch_size = max_batch_size
        self._limits = limits or LimitsConfig()
        self._max_timeout_s = max_timeout_s
        self._plans: dict[str, tuple[dict[str, ModelRecord], PipelinePlan]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._configs or (isinstance(name, str) and self._workflow(name) is not None)

    def names(self) -> list[str]:
        """Return the names in the order of the config, unusable pipelines included, then registered workflows."""
        registered = [id_ for id_ in self._models.records if id_ not in self._configs and self._workflow(id_)]
        return [*self._configs, *registered]

    @property
    def configured(self) -> Collection[str]:
        """The names of the config's own pipelines."""
        return self._configs.keys()

    def problem(self, name: str) -> str | None:
        """Return the reason why the pipeline cannot run now; None if it can."""
        try:
            self.plan(name)
        except ModelUnavailable as error:
            return error.message
        return None

    def signature(self, name: str) -> Signature:
        """Return the inputs and outputs, which depend on the models.

        Raises UnknownModel, or ModelUnavailable with the reasons.
        """
        return self.plan(name).signature

    def labels(self, name: str) -> dict[str, Sequence[str]]:
        """Return the names of the classes that each output scores, by output. Raises as `signature` does."""
        plan, models = self.plan(name), self._models.records
        used = {stage.target for stage in plan.stages() if stage.action in ("head", "score")} & models.keys()
        known = {id_: models[id_].features.labels for id_ in used}
        return {output: plan.labels_of(output, known) for output in plan.outputs}

    def description(self, name: str) -> str:
        """Return the config's description of the pipeline. Raises UnknownModel."""
        return self.config(name).description

    def plan(self, name: str) -> PipelinePlan:
        """Return the plan, renewed after a change of its models. Raises UnknownModel, ModelUnavailable."""
        config = self.config(name)
        models = self._models.records
        used = {stage.model or stage.tokenizer or "" for stage in config.stages} & models.keys()
        facts = {id_: models[id_] for id_ in used}
        known = self._plans.get(name)
        if known is None or known[0] != facts:
            try:
                known = facts, plan_pipeline(config, models, self._max_batch_size)
            except PipelineUnusable as error:
                raise ModelUnavailable(str(error), "model") from None
            self._plans[name] = known
        return known[1]

    async def run_pipeline(self, request: PipelineRequest, on_stage: OnStage = lambda _: None) -> PipelineResult:
        """Run a pipeline; `on_stage` is called with its stages.

        Raises the ServiceErrors of `deployments.records.errors`; those of a stage begin with its name.
        """
        plan = self.plan(request.pipeline)
        inputs, num_items = self._inputs(plan, request)
        if request.timeout_s is not None and not 0 < request.timeout_s < float("inf"):
            raise InvalidRequest(f"timeout_s must be a positive number of seconds, got {request.timeout_s}", "timeout")
        priority, timeout_s = request.priority, request.timeout_s
        run = PipelineRun(plan, inputs, num_items, self._ask, priority=priority, timeout_s=timeout_s, on_stage=on_stage)
        async with Deadline(self._max_timeout_s if timeout_s is None else None).bounding():  # its own says more
            await run.run_stages()
        outputs = {
            spec.name: tensor_of(spec.name, run.values[plan.outputs[spec.name]], plan.output_types[spec.name])
            for spec in plan.signature.outputs
        }
        return PipelineResult(outputs, run.timings_ms, run.warnings)

    def _most_items(self, plan: PipelinePlan) -> int:
        """Return the most items of one request: each is a request of its own for models that make images or text."""
        limits = self._limits
        per_action = dict.fromkeys(("generate", "upscale", "workflow"), limits.max_images)
        per_action["write"] = limits.max_prompts
        return min(per_action.get(stage.action, limits.max_pipeline_items) for stage in plan.stages())

    def config(self, name: str) -> PipelineConfig:
        """Return the config of a pipeline. Raises UnknownModel."""
        if name in self._configs:
            return self._configs[name]
        if (workflow := self._workflow(name)) is None:
            raise UnknownModel(f"unknown pipeline {name!r}{nearest_name(name, self.names())}", "model")
        return workflow.as_pipeline()

    def _workflow(self, name: str) -> WorkflowConfig | None:
        record = self._models.records.get(name)
        return None if record is None else record.workflow

    def _inputs(self, plan: PipelinePlan, request: PipelineRequest) -> tuple[dict[str, Batch], int]:
        """Return batches of one length, and the length. An input of one item is repeated."""
        for name in request.inputs:
            if name not in plan.inputs:
                known = nearest_name(name, plan.inputs)
                raise InvalidRequest(f"pipeline {plan.id!r} has no input {name!r}{known}", name)
        missing = [spec.name for spec in plan.signature.inputs if not spec.optional and spec.name not in request.inputs]
        if missing:
            raise InvalidRequest(f"pipeline {plan.id!r} needs input {', '.join(missing)}", missing[0])
        batches = {name: batch_of(tensor, plan.inputs[name]) for name, tensor in request.inputs.items()}
        counts = {name: len(batch) for name, batch in batches.items()}
        num_items = max(counts.values(), default=1)
        wrong = {name: count for name, count in counts.items() if count not in (1, num_items)}
        if 0 in counts.values() or wrong:
            found = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise InvalidRequest(f"inputs must have as many items as each other, or one, and not none; got {found}")
        limit = self._most_items(plan)
        if num_items > limit:
            raise InvalidRequest(f"pipeline {plan.id!r} takes at most {limit} items in one request, got {num_items}")
        return {name: _repeated(batch, num_items) for name, batch in batches.items()}, num_items


def _repeated(batch: Batch, num_items: int) -> Batch:
    if len(batch) == num_items:
        return batch
    return np.repeat(batch, num_items, axis=0) if isinstance(batch, np.ndarray) else list(batch) * num_items  # type: ignore[return-value]
