"""Scenarios, studies of them, and sweeps."""

from __future__ import annotations

import json
from pathlib import Path

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
    path.write_text("rank: 4\n")
    with pytest.raises(ConfigError, match="unknown rank"):
        scenario_from_yaml(path)
    path.write_text("- 4\n")
    with pytest.raises(ConfigError, match="mapping"):
        scenario_from_yaml(path)
    with pytest.raises(ConfigError, match="cannot read"):
        scenario_from_yaml(tmp_path / "b.yaml")


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


def test_models_from_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2.5-7b"]))
    assert config_named(str(tmp_path)) == MODELS["qwen2.5-7b"]
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        config_named(str(tmp_path))
    with pytest.raises(ConfigError, match=r"qwen2\.5-7b"):
        config_named("qwen3")
