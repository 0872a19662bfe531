"""The chart as a user renders it: golden renders of the values profiles, schemas, guards, rights, hardening."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.config import parse
from muster.job.pytorchjob import JOB_RBAC_RULES, RBAC_RULES
from tests.cluster import tools

CHART = tools.ROOT / "charts" / "muster"
GOLDEN = Path(__file__).parent / "golden"
PROFILES = ("default", "existing", "monitoring", "profile")
MONITORING = "monitoring.coreos.com/v1"
REWRITE = "MUSTER_REWRITE_GOLDEN"


def template(*arguments: str) -> subprocess.CompletedProcess[str]:
    return tools.run(tools.helm(), "template", "rl", CHART, "--namespace", "team-a", *arguments)


def render(*arguments: str) -> str:
    done = template(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(*arguments: str) -> str:
    done = template(*arguments)
    assert done.returncode != 0, "this should have been refused"
    return done.stderr


def objects(text: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(text) if item]


def one(items: list[dict[str, Any]], kind: str, end: str = "") -> dict[str, Any]:
    found = [item for item in items if item["kind"] == kind and item["metadata"]["name"].endswith(end)]
    assert len(found) == 1, [item["metadata"]["name"] for item in found]
    return found[0]


def profile(name: str) -> str:
    return render("--values", str(CHART / "ci" / f"{name}-values.yaml"), "--api-versions", MONITORING)


@pytest.fixture(scope="module")
def renders() -> dict[str, str]:
    return {name: profile(name) for name in PROFILES}


def pods(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for item in items:
        if item["kind"] in ("StatefulSet", "Deployment", "Job"):
            yield item["spec"]["template"]


@pytest.mark.parametrize("name", PROFILES)
def test_renders_are_as_recorded(renders: dict[str, str], name: str) -> None:
    """Rewrite them with MUSTER_REWRITE_GOLDEN=1 and look at the difference."""
    text = re.sub(r"(?m)^  token: \S+$", "  token: <random>", renders[name])
    # the pipeline is compared elsewhere
    text = re.sub(r"(?ms)^  grpo\.yaml: \|\n.*?^(?=---)", "  grpo.yaml: <the pipeline>\n", text)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get(REWRITE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_lint_is_clean() -> None:
    for name in PROFILES:
        done = tools.run(tools.helm(), "lint", "--strict", CHART, "--values", CHART / "ci" / f"{name}-values.yaml")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_kubernetes_knows_every_field(renders: dict[str, str], tmp_path: Path) -> None:
    """Against the schemas of a release, unknown fields refused; PodMonitors are not among them."""
    for name, text in renders.items():
        known = [item for item in objects(text) if item["kind"] != "PodMonitor"]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(known), encoding="utf-8")
    validate = Path(sys.executable).parent / "kubernetes-validate"
    done = tools.run(validate, "-k", "1.37.0", "--strict", *sorted(tmp_path.glob("*.yaml")))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pipeline_in_the_chart_is_the_compiled_one(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "MUSTER_BASE_IMAGE"}
    muster = Path(sys.executable).parent / "muster"
    done = tools.run(muster, "compile", "grpo", "--out", tmp_path / "grpo.yaml", env=environment)
    assert done.returncode == 0, done.stderr
    shipped = (CHART / "files" / "grpo.yaml").read_text(encoding="utf-8")
    assert (tmp_path / "grpo.yaml").read_text(encoding="utf-8") == shipped, "run make chart"


def test_the_installed_pipeline_names_what_is_installed(renders: dict[str, str]) -> None:
    shipped = (CHART / "files" / "grpo.yaml").read_text(encoding="utf-8")
    config = one(objects(renders["default"]), "ConfigMap", "-pipeline")
    assert config["data"]["grpo.yaml"] == shipped

    changed = one(objects(renders["existing"]), "ConfigMap", "-pipeline")["data"]["grpo.yaml"]
    spec, platform = yaml.safe_load_all(changed)
    images = {e["container"]["image"] for e in spec["deploymentSpec"]["executors"].values()}
    assert images == {"registry.example/rl/muster-base@sha256:" + 64 * "0"}
    assert spec["root"]["inputDefinitions"]["parameters"]["pvc"]["defaultValue"] == "team-volume"
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values()
    secrets = {volume["secretName"] for executor in executors for volume in executor.get("secretAsVolume", [])}
    assert secrets == {"fleet-token"}


def test_rights_are_those_that_the_code_asks_for(renders: dict[str, str]) -> None:
    for name, accounts in (("default", ["pipeline-runner"]), ("profile", ["default-editor"])):
        items = objects(renders[name])
        assert one(items, "Role", "-launcher")["rules"] == RBAC_RULES
        assert one(items, "Role", "-job")["rules"] == JOB_RBAC_RULES
        bound = one(items, "RoleBinding", "-launcher")
        assert [subject["name"] for subject in bound["subjects"]] == accounts
        assert [subject["name"] for subject in one(items, "RoleBinding", "-job")["subjects"]] == ["muster-job"]
        assert not [item for item in items if item["kind"].startswith("Cluster")]


def test_pods_fit_into_restricted_namespaces(renders: dict[str, str]) -> None:
    seen = 0
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for name, text in renders.items():
        for pod in pods(objects(text)):
            spec = pod["spec"]
            assert spec["securityContext"]["runAsNonRoot"] is True, name
            assert spec["securityContext"]["runAsUser"] > 0
            assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
            for volume in spec["volumes"]:
                assert set(volume) - {"name"} <= allowed
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                seen += 1
                security = container["securityContext"]
                assert security["allowPrivilegeEscalation"] is False
                assert security["capabilities"] == {"drop": ["ALL"]}
                assert security["readOnlyRootFilesystem"] is True
                assert security["runAsNonRoot"] is True
                assert security["runAsUser"] > 0
                assert security["seccompProfile"] == {"type": "RuntimeDefault"}
                assert container["resources"]["limits"]["memory"]
    assert seen >= 10


def test_servers_drain_before_they_are_killed(renders: dict[str, str]) -> None:
    spec = one(objects(renders["default"]), "StatefulSet")["spec"]["template"]["spec"]
    vllm = spec["containers"][0]
    drain = next(int(a.split("=")[1]) for a in vllm["args"] if a.startswith("--shutdown-timeout="))
    stop = vllm["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > stop + drain > drain > 0
    # slow to start is not dead, busy is not dead
    startup = vllm["startupProbe"]["periodSeconds"] * vllm["startupProbe"]["failureThreshold"]
    liveness = vllm["livenessProbe"]["periodSeconds"] * vllm["livenessProbe"]["failureThreshold"]
    assert startup >= 2700 > liveness >= 120


def test_vllm_is_reached_through_the_gate_only(renders: dict[str, str]) -> None:
    items = objects(renders["existing"])
    spec = one(items, "StatefulSet")["spec"]["template"]["spec"]
    vllm, gate = spec["containers"][0], spec["initContainers"][-1]
    assert "--host=127.0.0.1" in vllm["args"]
    assert "ports" not in vllm
    assert "--tensor-parallel-size=2" in vllm["args"]
    assert vllm["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert {m["mountPath"]: m.get("readOnly", False) for m in vllm["volumeMounts"]}["/muster"] is True
    assert gate["restartPolicy"] == "Always"
    assert [port["name"] for port in gate["ports"]] == ["generate", "metrics", "admin"]
    assert one(items, "Service")["spec"]["clusterIP"] == "None"
    assert not [item for item in items if item["kind"] == "HorizontalPodAutoscaler"]


def test_only_launchers_reach_the_admin_port(renders: dict[str, str]) -> None:
    rules = one(objects(renders["default"]), "NetworkPolicy")["spec"]["ingress"]
    peers = {rule["ports"][0]["port"]: rule.get("from") for rule in rules}
    assert set(peers) == {8000, 8001, 8002}
    assert peers[8002] == [{"podSelector": {"matchLabels": {"muster.dev/role": "launcher"}}}]
    assert peers[8001] is None
    # and that is the label that steps carry
    platform = list(yaml.safe_load_all((CHART / "files" / "grpo.yaml").read_text(encoding="utf-8")))[1]
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values()
    assert all(executor["podMetadata"]["labels"] == {"muster.dev/role": "launcher"} for executor in executors)


def test_an_admin_token_is_made_where_none_is_given(renders: dict[str, str]) -> None:
    tokens = set()
    for text in (renders["default"], profile("default")):
        secret = one(objects(text), "Secret")
        assert secret["metadata"]["name"] == "muster-admin"
        tokens.add(base64.b64decode(secret["data"]["token"]).decode())
    assert len(tokens) == 2, "it must be random"
    assert all(re.fullmatch(r"[A-Za-z0-9]{48}", token) for token in tokens)
    assert not [item for item in objects(renders["existing"]) if item["kind"] == "Secret"]


def test_a_new_chart_does_not_restart_servers(renders: dict[str, str], tmp_path: Path) -> None:
    """A restarted server serves the wrong weights in the middle of a run."""
    copy = tmp_path / "muster"
    done = tools.run("cp", "-r", CHART, copy)
    assert done.returncode == 0
    chart = (copy / "Chart.yaml").read_text(encoding="utf-8").replace("0.1.0", "0.2.0")
    (copy / "Chart.yaml").write_text(chart, encoding="utf-8")
    newer = tools.run(tools.helm(), "template", "rl", copy, "--namespace", "team-a")
    assert newer.returncode == 0, newer.stderr
    before, after = (one(objects(text), "StatefulSet") for text in (renders["default"], newer.stdout))
    assert before["metadata"] != after["metadata"]
    assert before["spec"] == after["spec"]


def test_the_claim_is_shared_and_survives(renders: dict[str, str]) -> None:
    claim = one(objects(renders["default"]), "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not [item for item in objects(renders["existing"]) if item["kind"] == "PersistentVolumeClaim"]
    for name, wanted in (("default", "muster-runs"), ("existing", "team-volume")):
        volumes = one(objects(renders[name]), "StatefulSet")["spec"]["template"]["spec"]["volumes"]
        assert volumes[0]["persistentVolumeClaim"]["claimName"] == wanted


def relabelled(rules: list[dict[str, Any]], container: str, ip: str) -> str | None:
    """The address that Prometheus asks, by its rules for relabelling; None if it asks none."""
    labels = {"__meta_kubernetes_pod_container_name": container, "__meta_kubernetes_pod_ip": ip, "__address__": ip}
    for rule in rules:
        match = re.fullmatch(rule["regex"], labels[rule["sourceLabels"][0]])
        if rule.get("action") == "keep":
            if not match:
                return None
        elif match:
            labels[rule["targetLabel"]] = match.expand(rule["replacement"].replace("$", "\\"))
    return labels["__address__"]


def test_monitors_find_what_they_are_for(renders: dict[str, str]) -> None:
    monitors = {m["metadata"]["name"]: m for m in objects(renders["profile"]) if m["kind"] == "PodMonitor"}
    assert set(monitors) == {"rl-muster-fleet", "rl-muster-trainer", "rl-muster-launcher"}
    fleet = one(objects(renders["profile"]), "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert monitors["rl-muster-fleet"]["spec"]["selector"]["matchLabels"].items() <= fleet.items()
    assert monitors["rl-muster-trainer"]["spec"]["selector"]["matchLabels"] == {"muster.dev/role": "trainer"}
    [endpoint] = monitors["rl-muster-launcher"]["spec"]["podMetricsEndpoints"]
    assert relabelled(endpoint["relabelings"], "main", "10.0.0.7") == "10.0.0.7:9464"
    assert relabelled(endpoint["relabelings"], "main", "fd00::7") == "[fd00::7]:9464"
    assert relabelled(endpoint["relabelings"], "wait", "10.0.0.7") is None
    names = [m["metadata"]["name"] for m in objects(renders["monitoring"]) if m["kind"] == "PodMonitor"]
    assert names == ["rl-muster-trainer", "rl-muster-launcher"]


def test_uploads_as_the_profile_wants_it(renders: dict[str, str]) -> None:
    job = one(objects(renders["profile"]), "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "post-install,post-upgrade"
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "default-editor"
    assert "--namespace=team-a" in pod["containers"][0]["args"]
    token = next(volume for volume in pod["volumes"] if volume["name"] == "token")
    assert token["projected"]["sources"][0]["serviceAccountToken"]["audience"] == "pipelines.kubeflow.org"
    assert (
        one(objects(renders["default"]), "Job")["spec"]["template"]["spec"]["serviceAccountName"] == "pipeline-runner"
    )


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("fleet.replica=2", "additional properties 'replica' not allowed"),
        ("fleet.replicas=-1", "minimum"),
        ("fleet.ports.admin=80", "minimum"),
        ("fleet.model.dtype=fp8", "must be one of"),
        ("pipeline.host=ml-pipeline:8888", "does not match pattern"),
        ("images.base.digest=latest", "does not match pattern"),
        ("storage.size=lots", "does not match pattern"),
        ("fleet.userId=0", "minimum"),
    ],
)
def test_wrong_values_are_refused(setting: str, said: str) -> None:
    error = refusal("--set", setting)
    assert said in error
    assert "/" + setting.partition("=")[0].replace(".", "/").rpartition("/")[0] in error


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["fleet.shutdown.gracePeriodSeconds=60"], "at least preStopSeconds + drainSeconds + 30 = 165"),
        (["fleet.ports.admin=8000"], "must be four different ports"),
        (["fleet.model.path=/models/x"], "must be below /muster"),
        (["rbac.pipelineAccounts={muster-job}"], "give them an account of their own"),
        (["rbac.pipelineAccounts=null"], "name the account that uploads the pipeline"),
        (["monitoring.enabled=true"], "install the Prometheus operator first, or set monitoring.enabled=false"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(settings: list[str], said: str) -> None:
    assert said in refusal(*(part for setting in settings for part in ("--set", setting)))


def test_every_value_is_described_and_checked() -> None:
    """The schema knows exactly the keys of values.yaml, and lets no others in."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def resolved(part: dict[str, Any]) -> dict[str, Any]:
        return dict(schema["$defs"][part["$ref"].rpartition("/")[2]]) if "$ref" in part else part

    def compare(given: dict[str, Any], part: dict[str, Any], where: str) -> None:
        part = resolved(part)
        if "properties" not in part:
            return
        assert part["additionalProperties"] is False, where
        assert set(given) == set(part["properties"]) - {"global"}, where
        for key, value in given.items():
            if isinstance(value, dict):
                compare(value, part["properties"][key], f"{where}.{key}")

    compare(values, schema, "values")
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    placement = {
        "nodeSelector",
        "tolerations",
        "affinity",
        "topologySpreadConstraints",
        "priorityClassName",
        "resources",
    }
    for number, line in enumerate(lines):
        key = re.match(r"\s*(\w+):", line)
        section = key and not line.partition(":")[2].strip()
        if key and not section and key[1] not in placement | {"requests", "limits"}:
            assert lines[number - 1].strip().startswith("#"), f"values.yaml:{number + 1}: {key[1]} has no comment"


def test_notes_tell_what_to_do_next() -> None:
    done = tools.run(tools.helm(), "install", "rl", CHART, "--dry-run=client", "--namespace", "team-a")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "http://rl-muster-fleet-0.rl-muster-fleet.team-a.svc:8000" in notes
    assert "token_file: /etc/muster/admin/token" in notes
    assert "rollout status statefulset/rl-muster-fleet" in notes
    assert "/metrics" in notes


def test_the_guide_shows_values_and_a_run_that_are_valid(tmp_path: Path) -> None:
    guide = (tools.ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    values, run = re.findall(r"(?s)```yaml\n(.*?)```", guide)
    (tmp_path / "values.yaml").write_text(values, encoding="utf-8")
    done = tools.run(tools.helm(), "template", "muster", CHART, "-n", "team-a", "--values", tmp_path / "values.yaml")
    assert done.returncode == 0, done.stderr
    items = objects(done.stdout)

    config = parse(run)
    assert config.rollout is not None
    assert config.storage is not None
    service, fleet = one(items, "Service"), one(items, "StatefulSet")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    name = service["metadata"]["name"]
    assert config.rollout.endpoints == [
        f"http://{name}-{n}.{name}.team-a.svc:{ports['generate']}" for n in range(fleet["spec"]["replicas"])
    ]
    assert config.rollout.admin.port == ports["admin"]
    assert config.storage.pvc == one(items, "PersistentVolumeClaim")["metadata"]["name"]
    assert config.job.service_account == one(items, "ServiceAccount")["metadata"]["name"]
    assert config.rollout.admin.token_file is not None
    pipeline = (CHART / "files" / "grpo.yaml").read_text(encoding="utf-8")
    assert f"mountPath: {config.rollout.admin.token_file.parent}\n" in pipeline
