"""A cluster config, with what only the serving floor can check: that the functions of pipelines exist and fit."""

from __future__ import annotations

from pathlib import Path

from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config, located_problems
from deployments.pipelines.planning import check_pipeline


def load_checked_config(path: str | Path) -> ClusterConfig:
    """Load a cluster config, and import the functions that its pipelines name.

    Raises ConfigFileError with every problem that was found.
    """
    config = load_cluster_config(path)
    problems = [
        (("pipelines", index, *problem.location), problem.text)
        for index, pipeline in enumerate(config.pipelines)
        for problem in check_pipeline(pipeline)
    ]
    if problems:
        raise located_problems(Path(path), problems)
    return config
