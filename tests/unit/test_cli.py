"""The command line: exit codes, one line per error, nothing written on bad input."""

from __future__ import annotations

import errno
import json
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from muster import cli
from muster.config import RunConfig
from tests.unit.conftest import MakeConfig

MUSTER = str(Path(sys.executable).with_name("muster"))


def muster(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([MUSTER, *map(str, arguments)], capture_output=True, text=True, timeout=60, cwd=cwd)


def write(config: RunConfig, path: Path, **changes: object) -> Path:
    values = yaml.safe_load(config.dump())
    for key, value in changes.items():
        section, _, field = key.partition("__")
        values[section][field] = value
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_validate_prints_a_configuration_that_validates(make_config: MakeConfig, tmp_path: Path) -> None:
    first = muster("validate", "--config", write(make_config(), tmp_path / "run.yaml"))
    assert first.returncode == 0
    (tmp_path / "again.yaml").write_text(first.stdout, encoding="utf-8")
    assert muster("validate", "--config", tmp_path / "again.yaml").stdout == first.stdout


def test_a_configuration_with_three_faults_gets_three_lines(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("group: {n_samples: -1}\nmodel: {pth: x}\nalgorithm: grpoo\n", encoding="utf-8")
    done = muster("validate", "--config", tmp_path / "run.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 4  # model.path is missing besides
    assert all("run.yaml" in line for line in lines)
    assert "Traceback" not in done.stderr


def test_a_missing_prompt_file_ends_a_run_before_anything_starts(make_config: MakeConfig, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.jsonl"
    config = write(make_config(), tmp_path / "run.yaml", data__prompts=str(nowhere))
    for command in (("rollout", "--out", tmp_path / "out"), ("submit", "grpo", "--local")):
        done = muster(*command, "--config", config)
        assert done.returncode == 2, done.stderr
        assert f"{nowhere}: cannot read the prompt file" in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "run").rglob("*.parquet"))


@pytest.mark.parametrize("command", ["logs", "stop", "gc"])
def test_what_is_not_built_says_so_and_what_to_do_instead(command: str) -> None:
    done = muster(command, "some-run")
    assert done.returncode == 2
    assert f"muster {command} is not built yet; " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("compile", "grop", "--out", "x.yaml"), "no pipeline 'grop'"),
        (("compile", "grpo", "--out", "x.txt"), "must end in .yaml"),
        (("compile", "grpo", "--out", "nowhere/x.yaml"), "nowhere/x.yaml: No such file or directory; name one"),
        (("compile", "grpo", "--out", "/dev/null/x.yaml"), "/dev/null/x.yaml: Not a directory; a file is"),
        (("assemble",), "Missing"),
        (("no-such-command",), "No such command"),
        (("report", "/nonexistent"), "is not a run directory"),
        (("status", "/nonexistent"), "is not a run directory"),
        (("quickstart", "--failure-rate", "0.95"), "0.89"),
    ],
)
def test_wrong_arguments_end_with_2_and_say_why(arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    done = muster(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_quickstart_does_not_touch_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious", encoding="utf-8")
    done = muster("quickstart", "--dir", tmp_path)
    assert done.returncode == 2
    assert "thesis.tex" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_quickstart_on_a_full_disk_is_exit_4_and_is_not_taken_for_a_run(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a file system of its own, to be filled, needs root")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "muster-test", str(small)], check=True)
    try:
        done = muster("quickstart", "--dir", small / "run")
        assert done.returncode == 4, done.stderr
        assert "the storage failed: No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (small / "run" / "run.yaml").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_that_holds_a_model_is_not_taken_for_quickstarts_own(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("precious", encoding="utf-8")
    assert muster("quickstart", "--dir", tmp_path).returncode == 2
    assert (tmp_path / "model" / "model.safetensors").read_text(encoding="utf-8") == "precious"


def test_submitting_to_a_cluster_says_everything_that_cannot_work_there(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    values = yaml.safe_load(make_config().dump())
    values["storage"] = {"mount_path": "/muster"}
    values["rollout"] |= {"endpoints": [], "server": {}}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    done = muster("submit", "grpo", "--config", file, "--iterations", 30)
    assert done.returncode == 2
    for key in ("storage.pvc", "run.root", "rollout.server", "job.backend", "iterations"):
        assert any(line.startswith(key) for line in done.stderr.splitlines()), (key, done.stderr)


def test_an_api_that_is_away_is_exit_4(make_config: MakeConfig, tmp_path: Path) -> None:
    values = yaml.safe_load(make_config().dump())
    values["storage"] = {"mount_path": str(tmp_path), "pvc": "runs"}
    values["job"] |= {"backend": "pytorchjob", "image": "trainer:1", "namespace": "ml"}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    done = muster("submit", "grpo", "--config", file, "--host", "http://127.0.0.1:9")
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_every_command_of_the_contract() -> None:
    text = muster("--help").stdout
    names = ("quickstart", "validate", "rollout", "evaluate", "assemble", "compile", "submit", "report")
    for command in (*names, "status", "logs", "stop", "gc"):
        assert command in text


def failing(error: OSError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and text of a command that meets the error."""

    def fail(_path: Path) -> RunConfig:
        raise error

    monkeypatch.setattr(cli.configuration, "load", fail)
    monkeypatch.setattr(sys, "argv", ["muster", "validate", "--config", "run.yaml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert isinstance(ended.value.code, int)
    return ended.value.code, shown.err.strip()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, f"let user {os.geteuid()} read and write there"),
        (errno.EPERM, f"let user {os.geteuid()} read and write there"),
        (errno.ENOENT, "name one that exists"),
        (errno.EISDIR, "name a file"),
        (errno.ENOTDIR, "a file is where a folder must be"),
        (errno.EEXIST, "does not exist yet"),
        (errno.ENAMETOOLONG, "shorter"),
        (errno.ELOOP, "symbolic links"),
    ],
)
def test_a_path_that_cannot_be_used_is_the_users_to_mend(
    number: int, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = failing(OSError(number, os.strerror(number), "/muster/runs/x"), monkeypatch, capsys)
    assert code == 2
    assert text.startswith(f"/muster/runs/x: {os.strerror(number)}; ")
    assert remedy in text
    assert "storage" not in text


@pytest.mark.parametrize(
    "number",
    [
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ESTALE,
        errno.EROFS,
        errno.ENXIO,
        errno.EFBIG,
        # said by mounts whose server is away, not by sockets: they name a path
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.ECONNREFUSED,
        errno.ENOTCONN,
    ],
)
def test_storage_that_fails_is_exit_4_and_named(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = failing(OSError(number, os.strerror(number), "/muster/runs/x"), monkeypatch, capsys)
    assert found == (4, f"/muster/runs/x: the storage failed: {os.strerror(number)}")


def test_a_full_disk_is_storage_where_no_path_is_known_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert failing(error, monkeypatch, capsys) == (4, "the storage failed: No space left on device")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "a connection failed: Connection refused"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "a connection failed: Connection reset"),
        (TimeoutError("timed out"), "a connection failed: timed out"),
        (TimeoutError(), "a connection failed: timed out"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "a connection failed: No route to host"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "a connection failed: Network is unreachable"),
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "looking up a host name failed: Name or service not known",
        ),
        (ssl.SSLError(1, "CERTIFICATE_VERIFY_FAILED"), "a connection failed: CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_connection_that_fails_is_exit_4_and_not_called_storage(
    error: OSError, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = failing(error, monkeypatch, capsys)
    assert code == 4
    assert said.startswith(text)
    assert "storage" not in said


def test_a_connection_that_fails_is_told_with_its_other_end_where_the_error_knows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aiohttp.client_exceptions import ClientConnectorError
    from aiohttp.client_reqrep import ConnectionKey

    peer = ConnectionKey("fleet-0.fleet", 8000, False, True, None, None, None)
    error = ClientConnectorError(peer, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
    found = failing(error, monkeypatch, capsys)
    assert found == (4, "the connection to fleet-0.fleet:8000 failed: Connection refused")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EADDRINUSE, errno.EPERM])
def test_a_limit_of_the_machine_is_exit_4_and_not_called_storage(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(number, os.strerror(number))
    assert failing(error, monkeypatch, capsys) == (4, f"the machine refused: {os.strerror(number)}")


def test_an_output_below_a_file_is_invalid_input_that_names_it(make_config: MakeConfig, tmp_path: Path) -> None:
    row = {
        "group_id": "a",
        "n_samples": 4,
        "status": "usable",
        "prompt_ids": [3],
        "completion_ids": [4, 1],
        "logprobs": [-0.1, -0.2],
        "versions": [0, 0],
    }
    rows = [json.dumps({**row, "slot": slot, "reward": float(slot)}) for slot in range(4)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    config = write(make_config(), tmp_path / "run.yaml")
    out = tmp_path / "run.yaml" / "out"
    done = muster("assemble", tmp_path / "rollouts.jsonl", "--config", config, "--out", out)
    assert done.returncode == 2, done.stderr
    assert f"{out}: Not a directory; a file is where a folder must be" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_root_that_is_a_file_ends_a_step_with_2_and_names_it(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("precious", encoding="utf-8")
    code = "import sys; from muster.pipelines import stages; stages.run('assemble', sys.argv[1], iteration=0)"
    done = subprocess.run(
        [sys.executable, "-c", code, make_config().dump()], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert f"assemble: {tmp_path / 'run'}: File exists; name one that does not exist yet" in done.stderr
    assert "Traceback" not in done.stderr
