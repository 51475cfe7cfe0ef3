from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from astraflow.recipes.cli import parse_run, preset_name
from astraflow.recipes.config import (
    ConfigError,
    RunConfig,
    check,
    dataflow_config,
    merge,
    read_toml,
    resolve,
    to_toml,
    trained,
)
from astraflow.recipes.math_multi_agent import RECIPE, TINY
from astraflow.recipes.serve import serve_commands


def test_every_preset_can_be_run() -> None:
    for config in RECIPE.presets.values():
        check(config)


def test_a_configuration_survives_toml(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(to_toml(TINY))
    assert merge(RECIPE.presets["laptop"], read_toml(file), "file") == TINY


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown key trainer\.mini_batches; did you mean trainer\.minibatches\?"):
        merge(TINY, {"trainer": {"mini_batches": 2}}, "x.toml")


def test_a_value_of_the_wrong_type_names_the_place() -> None:
    with pytest.raises(ConfigError, match=r"x\.toml: Expected `int`, got `str` - at `\$\.steps`"):
        merge(TINY, {"steps": "many"}, "x.toml")


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("steps = = 3")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_toml(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_toml(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--debug", "--split"], "cannot be combined with --split"),
        (["--rollout.workers", "2"], "needs --split"),
        (["--rollout.engine", "transformer"], "did you mean transformers"),
        (["--trainer.backend", "none"], "no installed package registers it in astraflow.trainers; installed: torch"),
        (["--policies.solver.backend", "none"], "--policies.solver.backend none: no installed package"),
        (["--policies.solver.temperature", "0"], "greedy samples cannot be trained on"),
        (["--policies.solver.batch-size", "2"], "cannot be cut into"),
        (["--steps", "0"], "must be above 0"),
        (["--data.n-samples", "1"], "every group is constant"),
        (["--policies.verifier.max-new-tokens", "5000"], "leaves no room"),
        (["--trainer.loss.name", "m2p"], "loss.name 'm2p' is none of m2po"),
        (["--trainer.loss.correction", "mask"], "loss.proximal: set that too"),
        (["--data.selectors", "gresso"], "no Selector 'gresso'; did you mean 'greso'"),
        (["--data.filters", "overlong_penalty(longest=8)"], "the option 'cushion' is missing"),
    ],
)
def test_what_cannot_work_together_is_refused_with_the_reason(args: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_run(RECIPE, ["--preset", "tiny", *args])


def test_the_command_line_lies_over_the_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("steps = 7\n[trainer]\nlr = 0.5\n[policies.solver]\nbatch_size = 32\n")
    _, config = parse_run(RECIPE, ["--preset", "tiny", "--config", str(file), "--trainer.lr", "0.25", "--seed", "3"])
    assert (config.steps, config.trainer.lr, config.seed) == (7, 0.25, 3)
    assert config.policies["solver"].batch_size == 32
    assert config.policies["verifier"] == TINY.policies["verifier"]


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean laptop"):
        preset_name(RECIPE, ["--preset", "labtop"])


def test_an_unknown_option_ends_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_run(RECIPE, ["--trainer.rl", "1e-5"])
    assert "--trainer.lr" in capsys.readouterr().err


def test_debug_is_in_turn_in_fp32_and_without_deadlines() -> None:
    config = resolve(msgspec.structs.replace(TINY, debug=True))
    assert config.synchronous
    assert config.trainer.dtype == config.rollout.dtype == "float32"
    assert config.data.task_deadline_s > 1e6
    assert config.data.max_staleness == 0


def configured(args: list[str]) -> RunConfig:
    return parse_run(RECIPE, ["--preset", "tiny", *args])[1]


def test_a_frozen_policy_has_no_trainer() -> None:
    config = configured(["--policies.verifier.frozen"])
    assert trained(config) == ["solver"]
    flow = dataflow_config(config, "w")
    assert [feed.model_id for feed in flow.policies] == ["solver"]
    assert set(flow.sampling) == {"solver", "verifier"}
    assert list(serve_commands(trained(config), 1, Path("run"), "unix:x")) == ["dataflow", "worker-0", "trainer-solver"]
    with pytest.raises(ConfigError, match="every policy is frozen"):
        configured(["--policies.verifier.frozen", "--policies.solver.frozen"])


def test_evaluations_while_training_are_configured() -> None:
    config = configured(["--eval.every", "5", "--eval.share", "0.25", "--data.failures.retries", "1"])
    flow = dataflow_config(config, "w")
    assert (flow.evaluate_every, flow.evaluation_share, flow.failures.retries) == (5, 0.25, 1)
    without = configured(["--eval.problems", "0", "--eval.every", "5"])
    assert dataflow_config(without, "w").evaluate_every == 0
