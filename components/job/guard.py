"""The first process of a job's container: runs its command, and ends it when nobody watches the job any more.

`python -m muster.job.guard COMMAND...`. Whoever waits for a job renews its lease (`MUSTER_LEASE`, "namespace/name").
When the renewals stop for longer than the lease lasts, the guard sends SIGTERM to the command, which writes a
checkpoint and ends: GPUs are not held for a run that is gone. Where the lease cannot be read, only the job's deadline
bounds it.

No Kubernetes client: one GET with the pod's own token.
"""

from __future__ import annotations

import logging
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

log = logging.getLogger("muster.job.guard")

CHECK_SECONDS = 30.0
GRACE_SECONDS = 100.0
"""From the SIGTERM to the command until SIGKILL."""
ABANDONED = 143
"""Exit code after the guard has ended the command: that of a process ended by SIGTERM."""

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass
class Watch:
    """Decides from successive looks at a lease whether it has run out.

    Time is this machine's monotonic clock since a renewal was first seen, so clocks of two machines are never compared.
    """

    renewed: str | None = None
    seen_at: float = 0.0
    duration: float = 0.0

    def look(self, lease: dict[str, Any] | None, now: float) -> bool:
        """Takes one look.

        Args:
            lease: the Lease's `spec`, or None if it could not be read this time.
            now: monotonic seconds.

        Returns:
            Whether a lease that was seen once has not been renewed for its whole duration.
        """
        if lease is not None:
            renewed = f"{lease.get('holderIdentity')} {lease.get('renewTime')}"
            if renewed != self.renewed:
                self.renewed, self.seen_at = renewed, now
            self.duration = float(lease.get("leaseDurationSeconds") or 0)
            return self.duration > 0 and now - self.seen_at > self.duration
        return False


def guard(
    command: list[str],
    read: Callable[[], dict[str, Any] | None],
    *,
    check_seconds: float = CHECK_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
) -> int:
    """Runs a command to its end, or to the end of the lease.

    Args:
        command: program and arguments; standard streams are this process's own.
        read: gives the Lease's `spec`, or None when it cannot be read.
        check_seconds: time between two looks.
        grace_seconds: how long the command may take to end after SIGTERM.

    Returns:
        The exit code to end with.
    """
    # Handlers first: the kernel drops signals to the first process of a container that has none for them.
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        if child is None:
            raise SystemExit(128 + number)
        child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    child = subprocess.Popen(command)
    watch = Watch()
    while True:
        try:
            code = child.wait(check_seconds)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            if watch.look(read(), time.monotonic()):
                break
    log.error("the lease was not renewed for %g s: nobody watches this job any more, ending it", watch.duration)
    child.terminate()
    try:
        child.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return ABANDONED


def cluster_lease(lease: str, account: Path = _ACCOUNT) -> Callable[[], dict[str, Any] | None]:
    """Reads a Lease of this cluster with the pod's own account.

    Args:
        lease: "namespace/name".
        account: the folder with the account's token and the cluster's certificate.
    """
    namespace, _, name = lease.partition("/")
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    shown = f"[{host}]" if ":" in host else host
    url = f"https://{shown}:{port}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
    complaint = ""

    def read() -> dict[str, Any] | None:
        nonlocal complaint
        try:
            token = (account / "token").read_text(encoding="ascii").strip()
            trust = ssl.create_default_context(cafile=str(account / "ca.crt"))
            answer = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, verify=trust, timeout=10)
            answer.raise_for_status()
            spec = answer.json().get("spec")
            return spec if isinstance(spec, dict) else None
        except (OSError, ValueError, httpx.HTTPError) as error:
            if str(error) != complaint:
                complaint = str(error)
                log.warning("cannot read lease %s, only the job's deadline bounds it now: %s", lease, error)
            return None

    return read


def main() -> int:
    """The command line."""
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    if len(sys.argv) < 2:
        sys.stderr.write("usage: python -m muster.job.guard COMMAND...\n")
        return 2
    lease = os.environ.get("MUSTER_LEASE", "")
    return guard(sys.argv[1:], cluster_lease(lease) if lease else lambda: None)


if __name__ == "__main__":
    sys.exit(main())
