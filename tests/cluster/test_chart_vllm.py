"""The arguments that the chart gives to vLLM and the paths that its gate opens, as the pinned vLLM has them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys

import pytest
import yaml

from tests.cluster import tools

READ = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
given = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))
names = ("model", "host", "port", "dtype", "max_model_len", "logprobs_mode", "generation_config", "shutdown_timeout")
print("READ", json.dumps({name: given[name] for name in (*names, "enable_scale_out", "tensor_parallel_size")}))
"""

ROUTES = """
import json
from vllm.entrypoints.scale_out.token_in_token_out.api_router import router
print("READ", json.dumps({route.path: sorted(route.methods) for route in router.routes}))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ENVIRONMENT = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def test_vllm_understands_its_arguments() -> None:
    chart = tools.ROOT / "charts" / "muster"
    show = ("--show-only", "templates/fleet/statefulset.yaml", "--set", "fleet.gpus=4")
    rendered = tools.run(tools.helm(), "template", "rl", chart, *show)
    assert rendered.returncode == 0, rendered.stderr
    [vllm] = yaml.safe_load(rendered.stdout)["spec"]["template"]["spec"]["containers"]
    done = tools.run(sys.executable, "-c", READ, *vllm["args"], env=ENVIRONMENT, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    read = json.loads(done.stdout.partition("READ ")[2])
    assert read == {
        "model": "/muster/models/policy",
        "host": "127.0.0.1",
        "port": 8100,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "shutdown_timeout": 120,
        "enable_scale_out": True,
        "tensor_parallel_size": 4,
    }


def test_the_gate_opens_the_token_paths_that_vllm_has() -> None:
    chart = tools.ROOT / "charts" / "muster"
    rendered = tools.run(tools.helm(), "template", "rl", chart, "--show-only", "templates/fleet/gate.yaml")
    assert rendered.returncode == 0, rendered.stderr
    opened = set(re.findall(r"location = (/inference/\S+)", yaml.safe_load(rendered.stdout)["data"]["nginx.conf"]))
    done = tools.run(sys.executable, "-c", ROUTES, env=ENVIRONMENT, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    routes = json.loads(done.stdout.partition("READ ")[2])
    assert opened == {"/inference/v1/generate", "/inference/v1/abort_requests"}
    assert {path: routes[path] for path in opened} == {path: ["POST"] for path in opened}
