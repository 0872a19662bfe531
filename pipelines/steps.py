"""The KFP components: thin, each calls one function of `muster.pipelines.stages` inside the container it runs in.

Their source is shipped to the pod as text, so each imports what it needs in its body and uses nothing from this module.
"""

import os

from kfp import dsl

IMAGE = os.environ.get("MUSTER_BASE_IMAGE", "muster-base:0.1.0-python3.11")
"""The image of all steps; compile again with MUSTER_BASE_IMAGE set to use another registry."""


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def prepare(run_config: str, first: int, iterations: int) -> None:  # noqa: D103
    from muster.pipelines import stages

    stages.run("prepare", run_config, first=first, iterations=iterations)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def rollout(run_config: str, first: int, k: int, counts: dsl.Output[dsl.Metrics]) -> None:  # noqa: D103
    from muster.pipelines import stages

    stages.run("rollout", run_config, log_metric=counts.log_metric, iteration=first + k)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def assemble(run_config: str, first: int, k: int, counts: dsl.Output[dsl.Metrics]) -> None:  # noqa: D103
    from muster.pipelines import stages

    stages.run("assemble", run_config, log_metric=counts.log_metric, iteration=first + k)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def train(run_config: str, first: int, k: int, measures: dsl.Output[dsl.Metrics]) -> None:  # noqa: D103
    from muster.pipelines import stages

    stages.run("train", run_config, log_metric=measures.log_metric, iteration=first + k)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(run_config: str, first: int, k: int, measures: dsl.Output[dsl.Metrics]) -> None:  # noqa: D103
    from muster.pipelines import stages

    stages.run("evaluate", run_config, log_metric=measures.log_metric, version=first + k)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def report(run_config: str, page: dsl.Output[dsl.HTML]) -> None:  # noqa: D103
    from muster.pipelines import stages

    stages.run("report", run_config, page=page.path)
