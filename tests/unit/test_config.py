"""The configuration: all faults at once, hints, presets, the round trip."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.config import PRESETS, load, parse
from muster.errors import InvalidInput


def faults(text: str) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        parse(text)
    assert caught.value.exit_code == 2
    return caught.value.faults


def test_three_faults_in_three_sections_are_reported_together() -> None:
    found = faults("group: {n_samples: 0}\ntraining: {optimizer: {lr: fast}}\nrollout: {temprature: 1}")
    assert len(found) == 3
    assert any("group.n_samples" in f and "greater than or equal to 1, not 0" in f for f in found)
    assert any("training.optimizer.lr" in f and '"fast"' in f for f in found)
    assert any("rollout.temprature: unknown key; did you mean 'temperature'?" in f for f in found)


def test_cross_field_faults_are_reported_beside_others() -> None:
    found = faults("group: {n_samples: 4, min_usable_group_size: 1}\ndata: {prompts: p, seeed: 1}")
    assert any("min_usable_group_size" in f and "2..4" in f for f in found)
    assert any("did you mean 'seed'?" in f for f in found)


def test_unknown_names_get_the_nearest_known_one() -> None:
    assert any("did you mean 'rollout'" in f for f in faults("rolout: {}"))
    assert any("did you mean 'dapo'" in f for f in faults("algorithm: dapp"))
    assert any("did you mean 'timeout'" in f for f in faults("group: {failures: {time_out: drop}}"))
    assert any("did you mean 'upper'" in f for f in faults("training: {rejection: {uper: 2}}"))


@pytest.mark.parametrize("text", ["", "- a", "just text", "a: [", "algorithm: [grpo]"])
def test_text_that_is_no_configuration_is_explained(text: str) -> None:
    assert faults(text)


def test_nan_and_infinity_are_refused() -> None:
    assert any("rollout.temperature" in f for f in faults("rollout: {temperature: .nan}"))
    assert any("training.loss.clip_low" in f for f in faults("training: {loss: {clip_low: .inf}}"))


def test_endpoints_and_server_exclude_each_other() -> None:
    assert any("not both" in f for f in faults("rollout: {endpoints: ['http://a:1'], server: {}}"))


@pytest.mark.parametrize("algorithm", sorted(PRESETS))
def test_every_preset_resolves_and_survives_a_round_trip(algorithm: str) -> None:
    config = parse(f"algorithm: {algorithm}")
    assert parse(config.dump()) == config


def test_a_field_overrides_its_preset_and_leaves_the_rest() -> None:
    config = parse("algorithm: dapo\ntraining: {loss: {clip_high: 0.3}}\nestimator: {reward_norm: {std_level: null}}")
    assert (config.training.loss.clip_low, config.training.loss.clip_high) == (0.2, 0.3)
    assert config.estimator.reward_norm is not None
    assert (config.estimator.reward_norm.mean_level, config.estimator.reward_norm.std_level) == ("group", None)


def test_null_removes_what_the_preset_sets() -> None:
    assert parse("algorithm: grpo\nestimator: {reward_norm: null}").estimator.reward_norm is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml")


def test_absent_sections_are_named_when_needed() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse("algorithm: grpo").require("model", "data")
    assert len(caught.value.faults) == 2


def test_checkpoints_at_another_interval_are_not_built_and_say_so_beside_other_faults() -> None:
    found = faults("training: {checkpoint: {every: 5}, n_mbs: 0}")
    assert len(found) == 2
    [line] = [f for f in found if "training.checkpoint.every: 5 is not built yet" in f]
    assert "writes a checkpoint each iteration" in line
    assert "leave it out" in line
    assert any("greater than or equal to 1" in f for f in faults("training: {checkpoint: {every: 0}}"))


def test_a_resolved_configuration_with_the_default_interval_is_accepted() -> None:
    config = parse("training: {checkpoint: {keep: 3}}")
    assert "every: 10" in config.dump()
    assert parse(config.dump()) == config
