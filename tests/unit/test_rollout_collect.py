"""Collecting a batch: every slot accounted for, resumption, the stall bound, dead servers, signals, a full disk."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from muster import assembly, trajectory
from muster.config import RunConfig
from muster.errors import DependencyDied, InvalidInput, Stalled
from muster.rollout.client import SlotFailure
from muster.rollout.collect import Collection, collect
from muster.rollout.prompts import order
from muster.rollout.workflow import ContractError, Row, Slot, row_of
from muster.telemetry.metrics import Metrics, load_snapshot
from tests.unit.conftest import DROP, MakeConfig, ScriptedServer, good


def run(config: RunConfig, out: Path, metrics: Metrics | None = None, **options: Any) -> Collection:
    return collect(config, version=3, name="0003", position=0, out=out, metrics=metrics or Metrics("test"), **options)


def on(server: ScriptedServer, **settings: Any) -> dict[str, Any]:
    return {
        "endpoints": [server.endpoint],
        "max_new_tokens": 8,
        "request_timeout": 5,
        "slot_timeout": 10,
        "reward": [{"name": "muster.quickstart.task:reward"}],
        "stall": {"min_rounds": 3, "min_seconds": 0},
        **settings,
    }


def test_every_slot_is_written_once_usable_or_failed_with_a_reason(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    scripted.behave = lambda _body, n: (good([3, 4, 1]), DROP, 500, good([5, 6, 1]))[n % 4]
    metrics = Metrics("test")
    state = run(make_config(rollout=on(scripted), data={"groups_per_batch": 5}), tmp_path / "out", metrics)
    table = trajectory.read(tmp_path / "out").table.to_pylist()
    slots = Counter((row["group_id"], row["slot"]) for row in table)
    assert state.slots == len(slots) == len(table)
    assert set(slots.values()) == {1}
    reasons = Counter(row["failure"] for row in table if row["status"] == "failed")
    assert reasons == state.failures
    assert state.usable == sum(row["status"] == "usable" for row in table)
    assert {version for row in table for version in row["versions"]} == {3}
    counted = {
        (sample.labels["outcome"], sample.labels["reason"]): sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "muster_rollout_slots_total"
    }
    assert counted == {("usable", ""): state.usable, **{("failed", r): n for r, n in reasons.items()}}


def test_rejected_groups_are_replaced_and_still_written(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    scripted.behave = lambda _body, n: 500 if n < 8 else good([3, 4, 1])
    config = make_config(rollout=on(scripted, max_concurrent=4), data={"groups_per_batch": 4})
    state = run(config, tmp_path / "out")
    assert state.trainable == 4
    assert state.groups["empty"] == 2
    assert state.rounds == 2
    batch = assembly.assemble(trajectory.read(tmp_path / "out"), config)
    assert batch.summary["groups"]["trainable"] == 4
    assert batch.summary["groups"]["target"] == 6


def test_what_the_collector_counts_is_what_assembly_trains_on(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    scripted.behave = lambda _body, n: 500 if n % 3 == 0 else good([3 + n % 5, 4, 1])
    config = make_config(rollout=on(scripted), data={"groups_per_batch": 6})
    state = run(config, tmp_path / "out")
    summary = assembly.assemble(trajectory.read(tmp_path / "out"), config).summary
    assert summary["groups"]["trainable"] == state.trainable
    assert summary["slots"]["usable"] == state.usable
    assert summary["failures"] == state.failures
    assert summary["reward"]["mean"] == pytest.approx(state.reward)


def test_a_dynamic_batch_takes_what_came(scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path) -> None:
    scripted.behave = lambda _body, n: 500 if n < 8 else good([3, 4, 1])
    config = make_config(rollout=on(scripted, max_concurrent=4), data={"groups_per_batch": 4, "dynamic_batch": True})
    state = run(config, tmp_path / "out")
    assert (state.trainable, sum(state.groups.values()), state.rounds) == (2, 4, 1)


def test_finished_groups_of_an_interrupted_collection_are_kept_and_not_asked_for_again(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    def stop_after_three(state: Collection) -> None:
        if sum(state.groups.values()) == 3:
            raise Stop

    config = make_config(rollout=on(scripted, max_concurrent=4), data={"groups_per_batch": 6})
    with pytest.raises(Stop):
        run(config, tmp_path / "out", on_group=stop_after_three)
    assert not (tmp_path / "out").exists()
    kept = pq.read_table(tmp_path / "out.partial")
    assert len(set(kept["group_id"].to_pylist())) == 3
    asked = len(scripted.requests)
    state = run(config, tmp_path / "out")
    assert state.resumed_groups == 3
    assert len(scripted.requests) - asked == 3 * 4
    rows = trajectory.read(tmp_path / "out").table.to_pylist()
    assert len({row["group_id"] for row in rows}) == 6
    assert (state.slots, state.usable) == (24, 24)


def test_a_broken_part_file_and_one_of_another_version_are_collected_again(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(rollout=on(scripted))
    collect(config, version=2, name="0003", position=0, out=tmp_path / "old", metrics=Metrics("test"))
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (tmp_path / "old" / "part-00000.parquet").rename(partial / "part-00000.parquet")
    (partial / "part-00001.parquet").write_bytes(b"PAR1 cut off")
    state = run(config, tmp_path / "out")
    assert state.resumed_groups == 0
    assert state.trainable == 4


def test_existing_rollouts_are_never_overwritten(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidInput, match="exists"):
        run(make_config(rollout=on(scripted)), tmp_path / "out")


def test_a_stall_ends_with_counts_and_keeps_what_was_collected(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    scripted.behave = lambda _body, n: good([3, 4, 1]) if n < 8 else 500
    config = make_config(rollout=on(scripted, max_concurrent=4), data={"max_attempts_per_prompt": 100})
    with pytest.raises(Stalled, match=r"collected 2, required 4.*3 rounds.*server_error 32") as caught:
        run(config, tmp_path / "out")
    assert caught.value.exit_code == 3
    assert len(set(pq.read_table(tmp_path / "out.partial")["group_id"].to_pylist())) == 4 + 3 * 2


def test_both_stall_bounds_must_pass(scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path) -> None:
    """A burst of quick rejections, as after a weight update, is survived."""
    scripted.behave = lambda _body, n: 500 if n < 4 * 4 * 10 else good([3, 4, 1])
    settings = on(scripted, max_concurrent=16, stall={"min_rounds": 3, "min_seconds": 60})
    state = run(make_config(rollout=settings, data={"max_attempts_per_prompt": 100}), tmp_path / "out")
    assert state.trainable == 4
    assert state.rounds == 11


def test_f23_a_prompt_that_always_fails_is_retired_and_the_batch_goes_on(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    bad: list[int] = []

    def behave(body: dict[str, Any], n: int) -> Any:
        if n == 0:
            bad.extend(body["token_ids"])
        return 500 if body["token_ids"] == bad else good([3, 4, 1])

    scripted.behave = behave
    settings = on(scripted, max_concurrent=4, stall={"min_rounds": 50, "min_seconds": 60})
    config = make_config(rollout=settings, data={"groups_per_batch": 40, "max_attempts_per_prompt": 2})
    state = run(config, tmp_path / "out")
    assert state.trainable == 40
    assert state.groups["empty"] <= 4  # those in flight when it was retired


def test_all_prompts_retired_is_a_stall_that_names_them(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    scripted.behave = lambda _body, _n: 500
    settings = on(scripted, stall={"min_rounds": 500, "min_seconds": 600})
    with pytest.raises(Stalled, match=r"every prompt was retired after 3 attempts.*prompts \[0, 1, 2"):
        run(make_config(rollout=settings), tmp_path / "out")


def test_a_dead_server_ends_the_collection(scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path) -> None:
    def behave(_body: dict[str, Any], n: int) -> Any:
        if n == 20:
            scripted.healthy = False
        return good([3, 4, 1]) if n < 20 else DROP

    scripted.behave = behave
    settings = on(scripted, max_concurrent=4, stall={"min_rounds": 1000000, "min_seconds": 60})
    config = make_config(rollout=settings, data={"groups_per_batch": 1000, "max_attempts_per_prompt": 10**6})
    with pytest.raises(DependencyDied, match="health check answered 503") as caught:
        run(config, tmp_path / "out")
    assert caught.value.exit_code == 4
    assert any((tmp_path / "out.partial").iterdir())


class OneRaises:
    async def run(self, slot: Slot) -> list[Row]:
        if slot.index == 1:
            raise ValueError("a bug in the workflow")
        return [Row((3,), (4, 1), (True, True), (-0.1, -0.2), (3, 3), float(slot.index))]


def test_an_exception_in_one_slot_fails_that_slot_only(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    state = run(make_config(rollout=on(scripted)), tmp_path / "out", workflow=OneRaises())
    assert state.failures == {"workflow_error": 4}
    assert state.usable == 12


class WrongLengths:
    async def run(self, slot: Slot) -> list[Row]:
        return [Row((3,), (4, 1), (True, True), (-0.1,), (3, 3), 1.0)]


def test_a_contract_error_stops_the_run_and_names_the_remedy(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ContractError, match="logprobs has 1 entries for 2 completion tokens; give one a token"):
        run(make_config(rollout=on(scripted)), tmp_path / "out", workflow=WrongLengths())


class VersionFromTheFuture:
    async def run(self, slot: Slot) -> list[Row]:
        return [Row((3,), (4, 1), (True, True), (-0.1, -0.2), (3, 4), 1.0)]


def test_a_version_that_no_server_has_yet_is_a_contract_error(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ContractError, match="a token of version 4, but the servers sample from version 3; record"):
        run(make_config(rollout=on(scripted)), tmp_path / "out", workflow=VersionFromTheFuture())


class TwoRewards:
    """Rows of one slot with different rewards and no rollout_reward: no group statistic can be taken (rule 12)."""

    def __init__(self) -> None:
        self.calls = 0

    async def run(self, slot: Slot) -> list[Row]:
        self.calls += 1
        return [Row((3,), (4, 1), (True, True), (-0.1, -0.2), (3, 3), reward) for reward in (0.0, 1.0)]


def test_rows_that_no_rule_can_interpret_stop_the_run_at_once_and_are_not_retried(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    workflow = TwoRewards()
    config = make_config(rollout=on(scripted))
    with pytest.raises(InvalidInput, match="set the same finite rollout_reward on every row") as caught:
        run(config, tmp_path / "out", workflow=workflow)
    assert caught.value.exit_code == 2
    assert workflow.calls <= 4 * 4  # one batch's worth, never a second round
    assert not (tmp_path / "out").exists()


class Straggler:
    async def run(self, slot: Slot) -> list[Row]:
        if slot.index == 0:
            await asyncio.sleep(60)
        if slot.index == 1:
            raise SlotFailure("aborted", "asked for")
        return [Row((3,), (4, 1), (True, True), (-0.1, -0.2), (3, 3), float(slot.index))]


def test_f24_a_straggler_times_out_and_its_group_goes_on(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    settings = on(scripted, slot_timeout=0.3)
    state = run(make_config(rollout=settings), tmp_path / "out", workflow=Straggler())
    assert state.failures == {"timeout": 4, "aborted": 4}
    assert state.groups == {"incomplete": 4}


class Aborting:
    """Every fourth generation goes on until it is aborted by its id, and then has two tokens; others end at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._ended: dict[str, threading.Event] = {}

    def __call__(self, body: dict[str, Any], _n: int) -> Any:
        for name in body.get("request_ids", ()):
            self._ended[name].set()
        if "request_ids" in body:
            return ""
        with self._lock:
            self._begun += 1
            endless = self._begun % 4 == 1
            ended = self._ended[f"generate-tokens-{body['request_id']}"] = threading.Event()
        if not endless:
            return good([3, 4, 1])
        ended.wait(20)
        return good([5, 6], finish="abort")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much grace as there is at most, however short the time limits."""
    monkeypatch.setattr("muster.rollout.client.GRACE_SHARE", 100.0)


class Ungraded:
    """One request, and a reward that takes no time to find."""

    async def run(self, slot: Slot) -> list[Row]:
        done = await slot.client.generate(slot.prompt.ids, group_id=slot.group_id, seed=slot.segment_seed())
        return [row_of(slot.prompt.ids, done, 1.0)]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("limits", [{"request_timeout": 1.0}, {"slot_timeout": 1.0}])
def test_slots_that_timed_out_have_their_tokens_and_can_be_counted_as_a_reward(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path, limits: dict[str, float]
) -> None:
    scripted.behave = Aborting()
    config = make_config(rollout=on(scripted, **limits), group={"n_samples": 4, "failures": {"timeout": -0.5}})
    state = run(config, tmp_path / "out", workflow=Ungraded())
    assert (state.usable, state.slots, state.failures, state.groups) == (16, 16, {}, {"complete": 4})
    rows = trajectory.read(tmp_path / "out").table.to_pylist()
    late = [row for row in rows if row["failure"] == "timeout"]
    assert len(late) == 4
    for row in late:
        assert (row["status"], row["completion_ids"], row["finish_reason"]) == ("failed", [5, 6], "abort")
        assert (row["logprobs"], row["versions"], row["reward"]) == ([-0.5, -0.5], [3, 3], None)
        assert row["prompt_ids"]
    batch = assembly.assemble(trajectory.read(tmp_path / "out"), config)
    assert (batch.summary["slots"]["usable"], batch.summary["slots"]["trainable"]) == (16, 16)
    assert batch.summary["reward"]["mean"] == pytest.approx(state.reward)
    assert batch.table["reward"].to_pylist().count(-0.5) == 4


@pytest.mark.usefixtures("patient")
def test_slots_that_timed_out_are_dropped_by_default_and_their_length_is_evidence(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    scripted.behave = Aborting()
    config = make_config(rollout=on(scripted, slot_timeout=1.0))
    state = run(config, tmp_path / "out", workflow=Ungraded())
    assert (state.usable, state.failures) == (12, {"timeout": 4})
    summary = assembly.assemble(trajectory.read(tmp_path / "out"), config).summary
    assert summary["failures"] == {"timeout": 4}
    assert summary["bias"]["failed_mean_length"] == 2


class TwoTurns:
    """Asks twice, the second time with what was answered."""

    async def run(self, slot: Slot) -> list[Row]:
        first = await slot.client.generate(slot.prompt.ids, group_id=slot.group_id, seed=slot.segment_seed())
        asked = (*slot.prompt.ids, *first.ids, 15)
        second = await slot.client.generate(asked, group_id=slot.group_id, seed=slot.segment_seed(1))
        return [row_of(slot.prompt.ids, first, 0.0), row_of(asked, second, 0.0)]


@pytest.mark.usefixtures("patient")
def test_what_a_later_turn_had_sampled_is_kept_with_the_prompt_of_that_turn(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    endless = threading.Event()

    def behave(body: dict[str, Any], _n: int) -> Any:
        if "request_ids" in body:
            endless.set()
            return ""
        if body["token_ids"][-1:] == [15] and body["token_ids"][-4:-1] == [3, 4, 1]:
            endless.wait(20)
            return good([5, 6], finish="abort")
        return good([3, 4, 1])

    scripted.behave = behave
    config = make_config(rollout=on(scripted, slot_timeout=1.0), data={"dynamic_batch": True})
    run(config, tmp_path / "out", workflow=TwoTurns())
    rows = trajectory.read(tmp_path / "out").table.to_pylist()
    assert [(row["failure"], row["completion_ids"]) for row in rows] == [("timeout", [5, 6])] * 16
    assert all(row["prompt_ids"][-4:] == [3, 4, 1, 15] for row in rows)


class SlowGrader:
    """Returns its rows when the slot's time is up already."""

    async def run(self, slot: Slot) -> list[Row]:
        if slot.index == 0:
            await asyncio.sleep(1.0)
        return [Row((3,), (4, 1), (True, True), (-0.1, -0.2), (3, 3), float(slot.index))]


@pytest.mark.usefixtures("patient")
def test_rows_that_come_after_the_slots_time_are_those_of_a_timeout(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(rollout=on(scripted, slot_timeout=0.5))
    state = run(config, tmp_path / "out", workflow=SlowGrader())
    assert (state.failures, state.usable) == ({"timeout": 4}, 12)
    late = [row for row in trajectory.read(tmp_path / "out").table.to_pylist() if row["failure"]]
    assert [(row["slot"], row["completion_ids"], row["reward"]) for row in late] == [(0, [4, 1], None)] * 4


def test_prompt_order_uses_each_prompt_once_an_epoch() -> None:
    for epoch in range(3):
        assert sorted(order(7, 5, True, epoch * 7 + i) for i in range(7)) == list(range(7))
    assert [order(7, 5, True, i) for i in range(7)] != [order(7, 5, True, 7 + i) for i in range(7)]
    assert [order(7, 5, False, i) for i in range(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


COLLECT = """
import sys
from pathlib import Path
from muster import config
from muster.errors import MusterError
from muster.rollout.collect import collect
from muster.telemetry.metrics import Metrics
try:
    collect(config.load(sys.argv[1]), version=3, name="0003", position=0, out=Path(sys.argv[2]), metrics=Metrics("t"))
except MusterError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start(config: RunConfig, out: Path) -> subprocess.Popen[str]:
    file = out.with_name("run.yaml")
    file.write_text(config.dump(), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-c", COLLECT, str(file), str(out)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_collection_with_130_and_keeps_finished_groups(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path, number: signal.Signals
) -> None:
    def slow(_body: dict[str, Any], n: int) -> Any:
        time.sleep(0.02)
        return good([3, 4, 1])

    scripted.behave = slow
    config = make_config(rollout=on(scripted, max_concurrent=4), data={"groups_per_batch": 5000})
    child = start(config, tmp_path / "out")
    deadline = time.monotonic() + 20
    while len(scripted.requests) < 40 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child.pid, number)
    _, text = child.communicate(timeout=15)
    assert child.returncode == 130, text
    kept = set(pq.read_table(tmp_path / "out.partial")["group_id"].to_pylist())
    assert len(kept) >= 9
    assert f"{len(kept)} finished groups are kept" in text
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_named_and_leaves_nothing_under_the_final_name(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("a file system of its own, to be filled, needs root")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "muster-test", str(small)], check=True)
    try:
        config = make_config(rollout=on(scripted), data={"groups_per_batch": 200})
        file = tmp_path / "run.yaml"
        file.write_text(config.dump(), encoding="utf-8")
        (small / "filler").write_bytes(b"x" * 60_000)
        done = subprocess.run(
            [sys.executable, "-c", COLLECT, str(file), str(small / "out")], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 4, done.stderr
        assert "No space left on device" in done.stderr
        assert str(small) in done.stderr
        assert not (small / "out").exists()
        assert not [p for p in small.rglob("*.parquet") if not p.name.startswith(".")]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_missing_and_a_broken_prompt_file_are_explained(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.jsonl: cannot read the prompt file"):
        run(make_config(data={"prompts": str(tmp_path / "nowhere.jsonl")}), tmp_path / "out")
    broken = tmp_path / "broken.jsonl"
    lines = ['{"prompt": "s:1="}', "{", '{"text": 1}', "[]", '{"prompt_ids": ["a"]}', '{"prompt": ""}']
    broken.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(InvalidInput) as caught:
        run(make_config(data={"prompts": str(broken)}), tmp_path / "out")
    assert [f"line {n}" in fault for n, fault in zip(range(2, 7), caught.value.faults, strict=True)] == [True] * 5
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match="no prompts in it"):
        run(make_config(data={"prompts": str(empty)}), tmp_path / "out")


def ages(metrics: Metrics) -> dict[str, float]:
    """Observed ages: how many, their sum, and how many up to each bound."""
    return {
        sample.labels.get("le", sample.name.rpartition("_")[2]): sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name.startswith("muster_rollout_staleness_versions")
    }


def test_the_age_of_every_usable_slot_is_observed_once_when_the_batch_is_cut(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    def stop_after_two(state: Collection) -> None:
        if sum(state.groups.values()) == 2:
            raise Stop

    scripted.behave = lambda _body, n: 500 if n % 4 == 0 else good([3, 4, 1])
    config = make_config(rollout=on(scripted, max_concurrent=4))
    first = Metrics("test")
    with pytest.raises(Stop):
        run(config, tmp_path / "out", first, on_group=stop_after_two)
    assert ages(first)["count"] == 0  # nothing has been cut
    first.save_snapshot(tmp_path)
    second = Metrics("test", load_snapshot(tmp_path))
    state = run(config, tmp_path / "out", second)
    assert state.resumed_groups == 2
    usable = [row for row in trajectory.read(tmp_path / "out").table.to_pylist() if row["status"] == "usable"]
    assert state.usable == len(usable) < state.slots
    found = ages(second)
    assert (found["count"], found["sum"]) == (len(usable), 0)  # sampled from the version that is trained


class OlderRows:
    """Slots whose rows begin under older weights; the last one fails."""

    async def run(self, slot: Slot) -> list[Row]:
        if slot.index == 3:
            raise SlotFailure("aborted", "asked for")
        versions = [((3, 3), (3, 3)), ((3, 3), (2, 3)), ((0, 1), (3, 3))][slot.index]
        mask = (slot.index < 2, True)  # what the last slot sampled under version 0 is no valid token
        return [Row((3,), (4, 1), mask, (-0.1, -0.2), told, 1.0) for told in versions]


def test_the_age_of_a_slot_is_that_of_the_oldest_valid_token_of_all_its_rows(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    metrics = Metrics("test")
    config = make_config(rollout=on(scripted, max_staleness=4), data={"groups_per_batch": 5})
    state = run(config, tmp_path / "out", metrics, workflow=OlderRows())
    assert state.ages == {0: 5, 1: 5, 2: 5}
    found = ages(metrics)
    assert (found["count"], found["sum"]) == (15, 15)
    assert (found["0.0"], found["1.0"], found["2.0"]) == (5, 10, 15)


def test_a_slot_older_than_max_staleness_fails_as_stale_and_keeps_its_tokens_without_a_reward(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    metrics = Metrics("test")
    config = make_config(rollout=on(scripted, max_staleness=1), data={"groups_per_batch": 5, "dynamic_batch": True})
    state = run(config, tmp_path / "out", metrics, workflow=OlderRows())
    assert dict(state.failures) == {"stale": 5, "aborted": 5}
    assert state.ages == {0: 5, 1: 5}
    assert (ages(metrics)["count"], ages(metrics)["sum"]) == (10, 5)
    stale = [row for row in trajectory.read(tmp_path / "out").table.to_pylist() if row["failure"] == "stale"]
    assert len(stale) == 10
    for row in stale:
        assert (row["slot"], row["status"], row["completion_ids"]) == (2, "failed", [4, 1])
        assert row["reward"] is None
        assert row["rollout_reward"] is None
    counted = metrics.registry.get_sample_value("muster_rollout_slots_total", {"outcome": "failed", "reason": "stale"})
    assert counted == 5


class OldRows:
    """Every slot was sampled two versions ago."""

    async def run(self, slot: Slot) -> list[Row]:
        return [Row((3,), (4, 1), (True, True), (-0.1, -0.2), (1, 1), 1.0)]


def test_groups_whose_slots_are_all_too_old_end_as_stale(
    scripted: ScriptedServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(rollout=on(scripted, max_staleness=1), data={"groups_per_batch": 2, "dynamic_batch": True})
    state = run(config, tmp_path / "out", workflow=OldRows())
    assert dict(state.groups) == {"stale": 2}
    assert (state.usable, state.trainable) == (0, 0)
