"""GRPO, stepwise: (rollout -> assemble -> train) x iterations, every step in the Kubeflow UI.

KFP has no loops: the iterations are unrolled to MAX_ITERATIONS nested conditions, and a run-time parameter says how
many of them run. Steps find and leave everything in the run directory, so a run that is submitted again goes on where
it was.
"""

from typing import Any

from kfp import dsl, kubernetes

from muster.pipelines import steps

MAX_ITERATIONS = 20
MOUNT_PATH = "/muster"
ADMIN_SECRET, ADMIN_PATH = "muster-admin", "/etc/muster/admin"
"""The Secret with the fleet's admin token, where there is one, and where `rollout.admin.token_file` finds it."""


def _task(task: dsl.PipelineTask, pvc: Any) -> dsl.PipelineTask:
    """What all steps share: no caching (they act on the run directory), the volume, their pod's name, their label."""
    task.set_caching_options(False)
    kubernetes.mount_pvc(task, pvc_name=pvc, mount_path=MOUNT_PATH)
    kubernetes.use_field_path_as_env(task, env_name="POD_NAME", field_path="metadata.name")
    # the fleet's network policy and the monitors select pods by it
    kubernetes.add_pod_label(task, label_key="muster.dev/role", label_value="launcher")
    return task


def _with_fleet(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Steps that publish weights may use the fleet's admin port."""
    kubernetes.use_secret_as_volume(task, secret_name=ADMIN_SECRET, mount_path=ADMIN_PATH, optional=True)
    return task


@dsl.pipeline(name="muster-grpo-iterations", description="(rollout -> assemble -> train), one after the other.")
def iterate(run_config: str, iterations: int, first_iteration: int, pvc: str) -> None:
    """The unrolled loop: iteration k runs if `iterations` is above k."""

    def unroll(k: int, before: dsl.PipelineTask | None) -> None:
        with dsl.If(iterations > k, name=f"iteration-{k}"):
            rollout = _with_fleet(_task(steps.rollout(run_config=run_config, first=first_iteration, k=k), pvc))
            if before is not None:
                rollout.after(before)
            assemble = _task(steps.assemble(run_config=run_config, first=first_iteration, k=k), pvc).after(rollout)
            train = _task(steps.train(run_config=run_config, first=first_iteration, k=k), pvc).after(assemble)
            if k + 1 < MAX_ITERATIONS:
                unroll(k + 1, train)

    unroll(0, None)


@dsl.pipeline(
    name="muster-grpo",
    description="Reinforcement learning that trains safely on incomplete groups: rollout -> assemble -> train.",
)
def grpo(run_config: str, iterations: int = 10, first_iteration: int = 0, pvc: str = "muster-runs") -> None:
    """Trains a policy.

    Args:
        run_config: the text of a `run.yaml`; `run.root` is below the mount path of the volume.
        iterations: how many to run, at most 20; longer runs are continued with `first_iteration`.
        first_iteration: 0, or how many iterations the run has behind it.
        pvc: the ReadWriteMany volume claim that holds run directories, mounted at /muster.
    """
    report = _task(steps.report(run_config=run_config), pvc)
    with dsl.ExitHandler(report, name="run"):
        prepare = _task(steps.prepare(run_config=run_config, first=first_iteration, iterations=iterations), pvc)
        before = _task(steps.evaluate(run_config=run_config, first=first_iteration, k=0), pvc).after(prepare)
        _with_fleet(before).set_display_name("evaluate-before")
        loop: Any = iterate(run_config=run_config, iterations=iterations, first_iteration=first_iteration, pvc=pvc)
        loop.after(before)
        after = _task(steps.evaluate(run_config=run_config, first=first_iteration, k=iterations), pvc).after(loop)
        _with_fleet(after).set_display_name("evaluate-after")
