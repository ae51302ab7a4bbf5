"""Scenarios, studies of them, and sweeps."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odc.arms import ARMS, arm_named
from odc.errors import ConfigError
from odc.simulate.catalog import MODELS, config_named, parameter_counts
from odc.simulate.scenario import Scenario, scenario_from_yaml
from odc.simulate.study import AXES, study, sweep, usual_values
from odc.simulate.workload import even_model

SMALL = Scenario(minibatches=3, ranks=4, arms=("fsdp2", "odc-equal", "odc"))


def test_a_study_adds_up_and_can_be_repeated() -> None:
    done = study(SMALL)
    assert done["fsdp2"].speedup == 1.0
    assert done["odc"].speedup == pytest.approx(done["fsdp2"].step_s / done["odc"].step_s)
    for row in done.arms:
        assert row.bubble == pytest.approx(row.transfer + row.waiting, abs=1e-9)
        assert row.step_s >= done.bound_s
        assert len(row.steps_s) == 3
    assert study(SMALL) == done
    assert json.loads(json.dumps(done.to_dict()))["arms"]["odc"]["step_s"] == done["odc"].step_s
    assert study(SMALL.with_(seed=1)) != done


def test_the_bound_is_that_of_the_ranks_as_fast_as_they_are() -> None:
    """Of ranks that are twice as fast no step may take less than the bound, which is half as long."""
    scenario = SMALL.with_(machine="a100-free", minibatches=1, arms=("odc",))
    fast = study(scenario.with_(slow=dict.fromkeys(range(4), 0.5)))
    assert fast.bound_s == pytest.approx(study(scenario).bound_s / 2)
    assert fast["odc"].step_s >= fast.bound_s


def test_arms_of_one_plan_compute_the_same() -> None:
    done = study(SMALL.with_(machine="a100-free"))
    busy = [row.step_s * (1 - row.bubble) for row in done.arms]
    assert busy == pytest.approx([busy[0]] * 3)
    assert done["odc-equal"].step_s <= done["fsdp2"].step_s


@pytest.mark.parametrize("name", ARMS)
def test_only_arms_that_say_so_plan_with_equal_sample_counts(name: str) -> None:
    """One giant beside many short samples: a planner that is free to gives its rank fewer of them."""
    lengths = [60_000] + [3_000] * 31
    plan = arm_named(name).plan(lengths, 4, 65_536, SMALL.cost(), 0)
    samples = [sum(map(len, own)) for own in plan.ranks]
    microbatches = {len(own) for own in plan.ranks}
    if name.endswith("-equal-samples"):
        assert samples == [8] * 4 and len(microbatches) == 1
    elif arm_named(name).splits:
        assert [split.sample for split in plan.splits] == [0]
    elif not name.endswith("-localsort"):
        assert samples[[[0] in own for own in plan.ranks].index(True)] < 8


@pytest.mark.parametrize("arm", ["fsdp2", "odc"])
def test_a_microbatch_holds_as_many_longest_samples_as_the_packing_ratio_says(arm: str) -> None:
    """Eight samples a rank fit into eight, at most, and into one where it may hold eight times the longest."""
    done = sweep(SMALL.with_(samples_per_rank=8, arms=(arm,)), "packing_ratio", [1, 2, 32])
    microbatches = [one[arm].microbatches for one in done]
    assert 8 >= microbatches[0] > microbatches[1] > microbatches[2] == 1


def test_recomputation_is_a_second_forward_inside_backward() -> None:
    """Backward computes twice what forward does, and of the layers with recomputation three times."""
    plain, again = (SMALL.with_(checkpointing=on) for on in (False, True))
    assert 1.2 < again.cost()(5000) / plain.cost()(5000) < 4 / 3
    for scenario, share in ((plain, 1 / 3), (again, 1 / 4)):
        uses = scenario.units().uses()
        assert sum(use.share for use in uses if not use.backward) == pytest.approx(share)
        assert sum(use.share for use in uses) == pytest.approx(1)
    forward = [
        sum(use.share for use in even_model(2, 1.0, checkpointing=on).uses() if not use.backward) * seconds
        for on, seconds in ((False, 3.0), (True, 4.0))
    ]
    assert forward == pytest.approx([1.0, 1.0]), "forward itself takes as long with recomputation as without"


@pytest.mark.parametrize("axis", AXES)
def test_sweeps_change_one_field(axis: str) -> None:
    values = usual_values(SMALL, axis)[:2]
    studies = sweep(SMALL.with_(minibatches=1, arms=("odc",)), axis, values)
    assert [getattr(one.scenario, axis) for one in studies] == values
    with pytest.raises(ConfigError, match="samples_per_rank"):
        sweep(SMALL, "colour", [1])


def test_a_sweep_has_no_fewer_ranks_than_the_slow_one_needs() -> None:
    assert usual_values(SMALL, "ranks") == [2, 4, 8, 16, 32]
    assert usual_values(SMALL.with_(slow={3: 1.5}), "ranks") == [4, 8, 16, 32]
    assert usual_values(SMALL.with_(ranks=64, slow={40: 1.5}), "ranks") == [64]
    assert usual_values(SMALL.with_(ranks=12, ranks_per_node=6), "ranks") == [2, 4, 12], "nodes are whole"


def test_a_sweep_of_lengths_ends_at_the_longest_that_there_is(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("100 4000 800")
    assert usual_values(SMALL.with_(lengths=str(tmp_path / "lengths.txt")), "max_length")[-1] == 4000
    assert usual_values(SMALL.with_(max_length=512), "max_length")[-1] == 512


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("changes", [{"max_length": 100}, {"max_length": 16, "owner_skew": 4.0}])
def test_every_usual_value_can_be_had(axis: str, changes: dict[str, Any]) -> None:
    scenario = SMALL.with_(**changes)
    values = usual_values(scenario, axis)
    assert getattr(scenario, axis) in values
    for value in values:
        scenario.with_(**{axis: value})


def test_a_picture_of_sweeps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    from odc.simulate.report import draw_sweeps

    studies = sweep(SMALL.with_(minibatches=1), "ranks", [1, 2])
    draw_sweeps(tmp_path / "a.png", {"ranks": studies}, "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_yaml_fills_a_scenario(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="needs the simulate extra")
    path = tmp_path / "a.yaml"
    path.write_text("ranks: 4\narms: [odc]\nslow: {1: 1.5}\n")
    scenario = Scenario(**scenario_from_yaml(path))
    assert (scenario.ranks, scenario.arms, scenario.cluster().slow) == (4, ("odc",), {1: 1.5})
    path.write_text("intra_bandwidth: 300e9\nlink_ms: 5e-1\nranks: '64'\nslow: '40:1.5'\narms: odc,fsdp2\n")
    scenario = Scenario(**scenario_from_yaml(path))
    assert (scenario.intra_bandwidth, scenario.link_ms, scenario.ranks) == (300e9, 0.5, 64)
    assert (scenario.arms, scenario.slow) == (("odc", "fsdp2"), {40: 1.5})
    path.write_text("arms: fsdp2, odc\nslow: '1: 1.5, 2:2'\n")
    scenario = Scenario(**scenario_from_yaml(path))
    assert (scenario.arms, scenario.slow) == (("fsdp2", "odc"), {1: 1.5, 2: 2.0})
    for text in ("slow: '3'", "slow: a:2", "slow: 1:2:3"):
        path.write_text(f"{text}\n")
        with pytest.raises(ConfigError, match="slow must be RANK:FACTOR"):
            Scenario(**scenario_from_yaml(path))
    path.write_text("ranks: many\n")
    with pytest.raises(ConfigError, match="ranks must be a number, not 'many'"):
        scenario_from_yaml(path)
    path.write_text("rank: 4\n")
    with pytest.raises(ConfigError, match="unknown rank"):
        scenario_from_yaml(path)
    path.write_text("- 4\n")
    with pytest.raises(ConfigError, match="mapping"):
        scenario_from_yaml(path)
    with pytest.raises(ConfigError, match="cannot read"):
        scenario_from_yaml(tmp_path / "b.yaml")


@pytest.mark.parametrize("text", [b"ranks: 4 # \xe9", b"[" * 10_000, b"ranks: 2026-13-45"])
def test_yaml_that_cannot_be_read(tmp_path: Path, text: bytes) -> None:
    pytest.importorskip("yaml", reason="needs the simulate extra")
    (tmp_path / "a.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match="cannot read"):
        scenario_from_yaml(tmp_path / "a.yaml")


def test_a_cap_may_be_larger_than_any_count() -> None:
    for changes in ({"packing_ratio": 1e308}, {"max_length": 10**30}):
        drawn, max_tokens = SMALL.with_(**changes).draw()
        assert drawn == SMALL.draw()[0] and max_tokens >= 2**63 - 1


def test_a_named_distribution_has_its_mean_at_the_widest() -> None:
    lengths, _ = SMALL.with_(sigma=5.0, minibatches=1, samples_per_rank=50_000).draw()
    assert np.mean(lengths) == pytest.approx(16_500, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks"),
        ({"packing_ratio": 0.5}, "packing_ratio"),
        ({"efficiency": 0.0}, "efficiency"),
        ({"arms": ("fsdp3",)}, "fsdp3"),
        ({"arms": ()}, "arms"),
        ({"machine": "abacus"}, "abacus"),
        ({"max_length": 3}, "max_length"),
        ({"slow": {9: 2.0}}, "rank 9"),
        ({"collective": "star"}, "ring"),
        ({"ranks_per_node": 0}, "ranks_per_node must be a whole number, 1 or more, not 0"),
        ({"intra_bandwidth": 0}, "intra_bandwidth must be above 0"),
        ({"inter_bandwidth": 0.0}, "inter_bandwidth must be above 0"),
        ({"checkpointing": "false"}, "checkpointing must be true or false, not 'false'"),
        ({"efficiency": [0.4]}, "efficiency must be a number"),
        ({"efficiency": True}, "efficiency must be a number"),
        ({"slow": 3}, "slow must be RANK:FACTOR"),
        ({"slow": {"a": 2}}, "slow must be RANK:FACTOR"),
        ({"model": 7}, "model must be a text"),
        ({"lengths": 5}, "lengths must be a text"),
        ({"seed": -1}, "seed must be a whole number, 0 or more"),
        ({"max_length": 512.5}, "max_length must be a whole number"),
        ({"arms": "odc"}, "arms"),
        ({"arms": [3]}, "arms"),
        ({"arms": None}, "arms"),
        ({"arms": ("fsdp2", "odc", "odc")}, "arms must be different arms, not fsdp2, odc, odc"),
        ({"sigma": 5.1}, "sigma must be above 0 and at most 5, not 5.1"),
        ({"sigma": 1e300}, "sigma must be above 0 and at most 5"),
        ({"sigma": 0.0}, "sigma must be above 0"),
    ],
)
def test_scenarios_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SMALL.with_(**changes)


@pytest.mark.parametrize(("name", "billions"), [("1.5b", 1.54), ("7b", 7.62), ("14b", 14.77), ("32b", 32.76)])
def test_models_have_the_parameters_in_their_names(name: str, billions: float) -> None:
    # Qwen2.5 1.5B ties its embedding to its head, R1-Distill's does not: one matrix apart.
    config = MODELS[f"qwen2.5-{name}"]
    layers, root = parameter_counts(config)
    tied = root / 2 if name == "1.5b" else 0.0
    assert layers + root - tied == pytest.approx(billions * 1e9, rel=0.01)


def test_a_head_may_be_the_embedding_and_an_mlp_have_two_matrices() -> None:
    sizes = MODELS["qwen2.5-7b"]
    layers, root = parameter_counts(sizes)
    assert parameter_counts(sizes | {"model_type": "gemma2"}) == (layers, root / 2)
    assert parameter_counts(sizes | {"model_type": "gemma2", "tie_word_embeddings": False}) == (layers, root)
    fewer, _ = parameter_counts(sizes | {"model_type": "starcoder2"})
    assert layers - fewer == 28 * 3584 * 18944


def test_models_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2.5-7b"]))
    assert config_named(str(tmp_path)) == MODELS["qwen2.5-7b"]
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        config_named(str(tmp_path))
    with pytest.raises(ConfigError, match=r"qwen2\.5-7b"):
        config_named("qwen3")
    with pytest.raises(ConfigError, match=r"qwen2\.5-7b"):
        config_named("q" * 300)  # longer than the name of a file may be
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not JSON"):
        config_named(str(tmp_path))

    def refuses(path: Path, **_: str) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuses)
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: Permission denied"):
        config_named(str(tmp_path))


def test_numbers_of_numpy_are_numbers() -> None:
    scenario = Scenario(max_length=np.int64(512), efficiency=np.float32(0.5))  # type: ignore[arg-type]
    assert scenario.max_length == 512 and scenario.efficiency == 0.5
