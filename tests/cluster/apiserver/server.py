"""A real Kubernetes API server with its controller manager and etcd, on loopback, for tests.

Builds the programs on first use (`build.sh`, minutes) and keeps them in the user's cache folder, for all checkouts.
No scheduler and no kubelet run: a test plays the operator and patches status, and a small server answers for a node's
container logs.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import http.server
import os
import secrets
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client as k8s
from kubernetes.client.exceptions import ApiException

from muster.process import Child, end_tree, free_port, spawn, tail

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "muster" / "apiserver"
CRDS = HERE.parent / "crds"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")


class UnavailableError(Exception):
    """The programs cannot be built on this machine."""


def binaries(build_seconds: float = 1500) -> Path:
    """The folder with the programs, built if they are not there yet (once, whoever asks at the same time)."""
    stamp = hashlib.sha256((HERE / "build.sh").read_bytes()).hexdigest()[:12]
    folder = CACHE / stamp
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if all((folder / program).exists() for program in PROGRAMS):
            return folder
        partial = CACHE / f"{stamp}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        log = CACHE / "build.log"
        log.unlink(missing_ok=True)
        build = spawn(["bash", str(HERE / "build.sh"), str(partial)], env=dict(os.environ), log=log)
        try:
            code = build.wait(build_seconds)
        finally:
            end_tree(build, 5)
        if code == 2:
            raise UnavailableError(tail(log, 3))
        if code != 0:
            raise RuntimeError(f"building the API server failed with {code}:\n{tail(log)}")
        partial.rename(folder)
    return folder


class ApiServer:
    """The three processes, their certificates and tokens, in a temporary folder."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="muster-apiserver-"))
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.tokens = {"admin": secrets.token_hex(16), "step": secrets.token_hex(16)}
        self.certificate, self.key = self.folder / "tls.crt", self.folder / "tls.key"
        self.api: Child | None = None
        self._others: list[Child] = []
        self._etcd = ""
        self._has_crds = False
        self._programs = Path()

    def start(self) -> None:
        """Starts everything and waits until it serves."""
        self._programs = binaries()
        self._make_credentials()
        client_port, peer_port = free_port(), free_port()
        self._etcd = f"http://127.0.0.1:{client_port}"
        self._others.append(
            self._spawn(
                "etcd",
                "--unsafe-no-fsync",
                f"--data-dir={self.folder / 'etcd'}",
                f"--listen-client-urls={self._etcd}",
                f"--advertise-client-urls={self._etcd}",
                f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            )
        )
        self.start_api()
        self._create_crds()
        # After the definitions: its garbage collector looks for new kinds every 30 s only.
        self._others.append(
            self._spawn(
                "kube-controller-manager",
                f"--kubeconfig={self.kubeconfig('admin')}",
                "--controllers=garbagecollector,namespace,serviceaccount,serviceaccount-token,root-ca-cert-publisher",
                "--leader-elect=false",
                "--port=0",
                "--secure-port=0",
                f"--root-ca-file={self.certificate}",
                f"--service-account-private-key-file={self.key}",
                "--concurrent-gc-syncs=2",
            )
        )

    def start_api(self) -> None:
        """Starts kube-apiserver, the first time or after `stop_api`."""
        self.api = self._spawn(
            "kube-apiserver",
            f"--etcd-servers={self._etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--insecure-port=0",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            f"--tls-cert-file={self.certificate}",
            f"--tls-private-key-file={self.key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.key}",
            f"--service-account-signing-key-file={self.key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--request-timeout=300s",
        )
        api = self.api

        def ready() -> bool:
            if api.poll() is not None:
                raise RuntimeError(f"kube-apiserver exited with {api.returncode}:\n{tail(api.log)}")
            with contextlib.suppress(ApiException, urllib3.exceptions.HTTPError, OSError):
                namespaces = k8s.CoreV1Api(self.client()).list_namespace().items
                if self._has_crds:  # a restarted server knows custom resources a little later than its own
                    k8s.CustomObjectsApi(self.client()).list_cluster_custom_object("kubeflow.org", "v1", "pytorchjobs")
                return any(item.metadata.name == "default" for item in namespaces)
            return False

        wait_for(ready, 60)

    def stop_api(self) -> None:
        """Ends kube-apiserver alone, as in an upgrade of the control plane."""
        assert self.api is not None
        end_tree(self.api, 0)

    def stop(self) -> None:
        """Ends everything and removes its files."""
        for child in [*reversed(self._others), *([self.api] if self.api else [])]:
            end_tree(child, 0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def client(self, user: str = "admin") -> Any:
        """An ApiClient for `admin` (may do everything) or `step` (may do what a test binds it)."""
        settings = k8s.Configuration()
        settings.host, settings.ssl_ca_cert = self.url, str(self.certificate)
        settings.api_key = {"authorization": f"Bearer {self.tokens[user]}"}
        settings.retries = False
        return k8s.ApiClient(settings)

    def kubeconfig(self, user: str) -> Path:
        """A kubeconfig file of a user."""
        path = self.folder / f"{user}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.tokens[user]}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def compact(self) -> None:
        """Makes etcd forget old revisions, so that watches from them are answered with 410."""
        pool = urllib3.PoolManager()
        status = pool.request("POST", f"{self._etcd}/v3/maintenance/status", json={}).json()
        body = {"revision": status["header"]["revision"], "physical": True}
        answer = pool.request("POST", f"{self._etcd}/v3/kv/compaction", json=body)
        assert answer.status == 200, answer.data

    @contextlib.contextmanager
    def node(self, name: str, logs: dict[str, str]) -> Iterator[None]:
        """A node whose "kubelet" answers for container logs, by pod name."""

        class Kubelet(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = logs.get(self.path.split("?")[0].split("/")[3])
                self.send_response(200 if text is not None else 404)
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, *_: Any) -> None:
                pass

        kubelet = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Kubelet)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        kubelet.socket = context.wrap_socket(kubelet.socket, server_side=True)
        threading.Thread(target=kubelet.serve_forever, daemon=True).start()
        core = k8s.CoreV1Api(self.client())
        core.create_node({"metadata": {"name": name}})
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
        endpoints = {"kubeletEndpoint": {"Port": kubelet.server_address[1]}}
        core.patch_node_status(name, {"status": {"addresses": addresses, "daemonEndpoints": endpoints}})
        try:
            yield
        finally:
            core.delete_node(name)
            kubelet.shutdown()
            kubelet.server_close()

    def _spawn(self, program: str, *arguments: str) -> Child:
        argv = [str(self._programs / program), *arguments]
        return spawn(argv, env=dict(os.environ), cwd=self.folder, log=self.folder / f"{program}.log")

    def _make_credentials(self) -> None:
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
                *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(self.key), "-out", str(self.certificate)),
            ],
            check=True,
            capture_output=True,
            timeout=60,
        )
        users = f'{self.tokens["admin"]},admin,admin,"system:masters"\n{self.tokens["step"]},step,step\n'
        (self.folder / "tokens.csv").write_text(users)

    def _create_crds(self) -> None:
        api = k8s.ApiextensionsV1Api(self.client())
        for definition in (pytorchjob_crd(), yaml.safe_load((CRDS / "argoproj.io_workflows.yaml").read_text())):
            api.create_custom_resource_definition(definition)
            name = definition["metadata"]["name"]

            def established(name: str = name) -> bool:
                conditions = api.read_custom_resource_definition(name).status.conditions or []
                return any(item.type == "Established" and item.status == "True" for item in conditions)

            wait_for(established, 30)
        self._has_crds = True


def pytorchjob_crd() -> dict[str, Any]:
    """The operator's own definition of PyTorchJob."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with gzip.open(CRDS / "kubeflow.org_pytorchjobs.yaml.gz") as file:
        return dict(yaml.load(file, Loader=loader))


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Waits until a condition holds and returns its value; fails when the time is over."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not true within {seconds:g} s: {getattr(condition, '__name__', condition)}")
        time.sleep(0.05)
