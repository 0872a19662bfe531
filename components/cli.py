"""The command line. Each command reads its arguments, calls one function of a room, and shows what came of it.

Results go to stdout, progress and errors to stderr; exit codes are those of the contract.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from muster import config as configuration
from muster.errors import Interrupted, InvalidInput, MusterError, NotBuilt, os_error
from muster.process import terminable

app = typer.Typer(
    name="muster",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Reinforcement-learning post-training on Kubeflow that trains safely on incomplete groups.",
    epilog="Exit codes: 0 done, 2 invalid input, 3 stalled or nothing trainable, 4 a dependency died, 130 interrupted.",
)

ConfigOption = Annotated[Path, typer.Option("--config", help="The run configuration, run.yaml.")]
OutOption = Annotated[Path, typer.Option("--out", help="Where the result goes; must not exist.")]


@app.command()
def quickstart(
    directory: Annotated[
        Path, typer.Option("--dir", help="The run directory. One that holds an unfinished quickstart is continued.")
    ] = Path("quickstart-run"),
    seed: Annotated[int, typer.Option(help="Of the model, the data and the sampling.", min=0)] = 0,
    failure_rate: Annotated[float, typer.Option(help="Share of samples to lose, for real.", min=0.0, max=0.89)] = 0.25,
) -> None:
    """Runs the whole system on this machine: a policy learns while a quarter of its samples is lost.

    Makes a tiny model, starts a real vLLM server behind a proxy that cuts and delays requests, and runs the shipped
    pipeline: rollout, assemble, train on two ranks, publish with proof. About five minutes on two cores.
    """
    from muster.quickstart.command import run_quickstart

    run_quickstart(directory, seed, failure_rate)


@app.command()
def validate(config: ConfigOption) -> None:
    """Prints the resolved configuration, or every error at once."""
    print(configuration.load(config).dump(), end="")


@app.command()
def rollout(
    config: ConfigOption,
    out: OutOption,
    prompts: Annotated[Path | None, typer.Option(help="Prompt file; data.prompts by default.")] = None,
    endpoint: Annotated[
        list[str] | None, typer.Option(help="Server to use, repeatable; rollout.endpoints by default.")
    ] = None,
    version: Annotated[int, typer.Option(help="Weight version that the servers serve.", min=0)] = 0,
) -> None:
    """Collects one batch of groups from servers that run already."""
    from muster.rollout.collect import collect
    from muster.telemetry.metrics import Metrics, serve

    resolved = _with_sources(config, prompts, endpoint)
    metrics = Metrics(resolved.run.id if resolved.run else "rollout")
    with serve(metrics, resolved.telemetry.port, "127.0.0.1"):
        state = collect(resolved, version=version, name=f"v{version:04d}", position=0, out=out, metrics=metrics)
    print(json.dumps(state.as_json(), indent=1))


@app.command()
def evaluate(
    config: ConfigOption,
    policy: Annotated[Path, typer.Option(help="Weights directory with probe.json: published first, with proof.")],
    prompts: Annotated[Path, typer.Option(help="Held-out prompt file.")],
    samples: Annotated[int, typer.Option(help="Samples per prompt, the k of pass@k.", min=1)] = 1,
) -> None:
    """Scores a policy on held-out prompts: mean reward and pass@k, as JSON.

    Uses rollout.endpoints; with rollout.server, a server is started for it.
    """
    import contextlib

    from muster.rollout.evaluate import evaluate as score
    from muster.rollout.server import publish, started
    from muster.telemetry.metrics import Metrics

    resolved = configuration.load(config)
    resolved.require("model", "data", "rollout")
    assert resolved.rollout
    assert resolved.model
    with contextlib.ExitStack() as stack:
        if resolved.rollout.server is not None:
            log = Path(f"{policy}.server.log")
            limit = resolved.rollout.startup_timeout
            server = stack.enter_context(started(resolved.rollout.server, policy, resolved.model.dtype, limit, log))
            ours = resolved.rollout.model_copy(update={"endpoints": [server.endpoint], "server": None})
            resolved = resolved.model_copy(update={"rollout": ours})
        assert resolved.rollout
        publish(resolved.rollout, policy, 0, Metrics("evaluate"))
        result = score(resolved, version=0, prompts=prompts, samples=samples)
    print(json.dumps({**result.as_json(), "version": None}, indent=1))


@app.command()
def assemble(
    rollouts: Annotated[list[Path], typer.Argument(help="Rollout files or directories.")],
    config: ConfigOption,
    out: OutOption,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json.")] = False,
) -> None:
    """Turns groups into a training batch: batch.parquet and summary.json."""
    from muster.assembly.command import run

    run(rollouts, config, out, as_json)


@app.command("compile")
def compile_pipeline(
    name: Annotated[str, typer.Argument(help="Pipeline, such as grpo.")],
    out: Annotated[Path, typer.Option("--out", help="The YAML file to write.")],
) -> None:
    """Compiles a pipeline to KFP IR, ready to upload in the Kubeflow UI.

    The image of its steps is taken from the environment variable MUSTER_BASE_IMAGE.
    """
    from muster.pipelines.cluster import compile_to

    compile_to(name, out)
    print(out)


@app.command()
def submit(
    name: Annotated[str, typer.Argument(help="Pipeline, such as grpo.")],
    config: ConfigOption,
    local: Annotated[bool, typer.Option("--local", help="Run it on this machine instead of a cluster.")] = False,
    host: Annotated[str | None, typer.Option(help="Address of the KFP API.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Profile namespace of the run.")] = None,
    experiment: Annotated[str | None, typer.Option(help="Experiment to file the run under.")] = None,
    service_account: Annotated[str | None, typer.Option(help="Account the steps run as.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with a bearer token for the API.")] = None,
    ca_cert: Annotated[Path | None, typer.Option(help="Certificate authority of the API.")] = None,
    iterations: Annotated[int | None, typer.Option(help="How many; training.steps by default.", min=1)] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has ended.")] = False,
) -> None:
    """Starts a run and prints its address; with --local, runs it here to its end."""
    resolved = configuration.load(config)
    count = iterations or resolved.training.steps
    if local:
        from muster.pipelines.local import run_local
        from muster.telemetry.progress import RunProgress

        with RunProgress(Console(stderr=True), count) as progress:
            run_local(name, resolved, iterations=count, on_event=progress.on_event)
        assert resolved.run
        print(resolved.run.root / "report.html")
        return
    from muster.pipelines.cluster import Target, submit_to

    target = Target(host, namespace, experiment, service_account, token_file, ca_cert)
    print(submit_to(name, resolved, count, target, wait=wait))


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Run directory.")]) -> None:
    """Rebuilds report.html and result.json of a run."""
    from muster.telemetry.report import write_report

    print(write_report(run))


@app.command()
def status(run: Annotated[Path, typer.Argument(help="Run directory.")]) -> None:
    """Says what a run is doing, from its diary."""
    from muster.telemetry.status import describe

    for line in describe(run):
        print(line)


@app.command()
def logs(run: str) -> None:
    """Logs of a run by role (not built yet)."""
    raise NotBuilt("muster logs", f"look at the files named log and server.log below {run}, or at the pods' logs")


@app.command()
def stop(run: str) -> None:
    """Ends a run (not built yet)."""
    raise NotBuilt("muster stop", f"press Ctrl-C where {run} runs, or terminate it in the Kubeflow UI")


@app.command()
def gc(run: str) -> None:
    """Removes what a run left (not built yet)."""
    raise NotBuilt("muster gc", f"delete the directory {run}, or the run in the Kubeflow UI")


def main() -> None:
    """Entry point of the console script: turns explained errors into their exit codes."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        with terminable():
            code = app(standalone_mode=False)  # typer turns Ctrl-C and typer.Exit into a code that it returns
    except (KeyboardInterrupt, typer.Abort):
        code = Interrupted.exit_code
    except MusterError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        explained = os_error(error)
        print(explained, file=sys.stderr)
        sys.exit(explained.exit_code)
    except Exception as error:
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        print(f"{usage()}; see muster --help", file=sys.stderr)
        sys.exit(InvalidInput.exit_code)
    if code == Interrupted.exit_code:
        print("interrupted; what was collected is kept, the same command goes on from there", file=sys.stderr)
    sys.exit(code or 0)


def _with_sources(config: Path, prompts: Path | None, endpoints: list[str] | None) -> configuration.RunConfig:
    """The configuration with prompt file and servers of the command line in place of its own."""
    resolved = configuration.load(config)
    resolved.require("model", "data", "rollout")
    changed = resolved.model_dump(mode="json")
    if prompts is not None:
        changed["data"]["prompts"] = str(prompts)
    if endpoints:
        changed["rollout"] |= {"endpoints": endpoints, "server": None}
    return configuration.parse(json.dumps(changed), where=str(config))
