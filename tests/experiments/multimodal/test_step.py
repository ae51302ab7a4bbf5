"""Whole multimodal jobs: balancing and transport change who computes what, never the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_job import complete
from support.tiny_multimodal import rank_job, run_job, tiny_job, write_examples

from odc.experiments.data.dataset import MinibatchSampler
from odc.experiments.multimodal.config import TRANSPORTS, MultimodalConfig
from odc.experiments.multimodal.examples import deal, read_examples
from odc.experiments.multimodal.model import load_config
from odc.experiments.multimodal.plan import BALANCES
from odc.experiments.multimodal.step import MultimodalResult

Pools = Callable[[int], Any]


def run_jobs(rank: int, world: int, configs: list[MultimodalConfig]) -> list[MultimodalResult]:
    return [run_job(rank, world, config) for config in configs]


# By collectives: what nothing, everything and all ranks' rows are moved by. On demand every balance.
SOME = [("fsdp2", "none"), ("fsdp2", "full"), ("fsdp2", "all-gather"), *(("odc", balance) for balance in BALANCES)]
EVERY = [(arm, balance) for arm in TRANSPORTS for balance in BALANCES]


@pytest.mark.parametrize("compared", [SOME, pytest.param(EVERY, marks=pytest.mark.thorough)], ids=["some", "every"])
def test_all_arms_train_alike(ranks: Pools, tmp_path: Path, compared: list[tuple[str, str]]) -> None:
    arms = [tiny_job(tmp_path, balance, arm=arm) for arm, balance in compared]
    by_rank = ranks(2).run(run_jobs, arms)
    reference = by_rank[0][0].steps
    assert len(reference) == 3 and reference[-1].loss < reference[0].loss
    for at, arm in enumerate(arms):
        mine, theirs = by_rank[0][at].steps, by_rank[1][at].steps
        assert [step.loss for step in mine] == [step.loss for step in theirs], arm.name
        assert [step.loss for step in mine] == pytest.approx([s.loss for s in reference], rel=2e-5), arm.name
        assert [step.norm for step in mine] == pytest.approx([s.norm for s in reference], rel=1e-4), arm.name
        moved = sum(
            count.far + count.near for result in by_rank for s in result[at].steps for count in s.phases.values()
        )
        assert bool(moved) == (arm.balance not in ("none", "llm-only")), arm.name
    _check_all_gather({arm.name: [results[at] for results in by_rank] for at, arm in enumerate(arms)})


def _check_all_gather(results: dict[str, list[MultimodalResult]]) -> None:
    """An all-gather follows the plan of `full` and holds the rows of all ranks, not only what it sends and receives."""
    full, everything = results["fsdp2/full"], results["fsdp2/all-gather"]
    for mine, theirs in zip(full, everything, strict=True):
        assert 0 < mine.exchange_bytes < theirs.exchange_bytes
        for one, other in zip(mine.steps, theirs.steps, strict=True):
            for phase, count in one.phases.items():
                assert (count.items, count.real) == (other.phases[phase].items, other.phases[phase].real)
                assert count.far <= other.phases[phase].far
    assert len({result.exchange_bytes for result in everything}) == 1, "every rank holds the rows of all"


def gradients(rank: int, world: int, config: MultimodalConfig) -> tuple[dict[str, torch.Tensor], list[list[str]]]:
    """Whole gradients of the first step, and for each rank's step the phases that it ran."""
    job = rank_job(config)
    kept: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        for tower, module in job.trainer.towers.items():
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    kept[f"{tower}.{name}"] = parameter.grad.full_tensor().clone()  # type: ignore[attr-defined]

    job.trainer.optimizer.register_step_pre_hook(keep)
    result = complete(job)
    return kept, [[phase for phase, count in step.phases.items() if count.computed] for step in result.steps]


def reference_gradients(config: MultimodalConfig) -> dict[str, torch.Tensor]:
    """By one backward through everything, every example alone, on plain unsharded towers."""
    from odc.experiments.multimodal.inputs import decode, encode, labels_of, text_rows
    from odc.experiments.multimodal.model import build_towers
    from odc.experiments.multimodal.plan import records

    model = load_config(config.job.model)
    towers = build_towers(model, config.job.seed)
    examples = read_examples(Path(config.job.data), model.geometry, max_tokens=config.job.max_tokens)
    total = sum(example.label_tokens for example in examples)
    for example in examples:
        features = [torch.zeros(0, model.geometry.width)]
        for modality in ("image", "audio"):
            for item in example.media(modality):  # type: ignore[arg-type]
                features.append(encode(towers[modality], decode(item, model.geometry), [item]))
        from odc.dispatch import Phase, plan_step

        plan = plan_step([records([example])], [Phase("image", None), Phase("audio", None)], Phase("llm", None))
        order, texts = torch.from_numpy(plan.interleaving(0)), text_rows(example)
        labels = labels_of(texts, order, [example.length])
        loss = towers["llm"](texts[:, 0].long(), torch.cat(features), order, labels, [example.length])
        (loss / total).backward()
    return {
        f"{tower}.{name}": parameter.grad
        for tower, module in towers.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


# No rank has audio in the last, and ranks have nothing at all where there are fewer examples.
MIXES = [
    (2, ["i", "", "ai", "", "a", "aa"]),
    (2, ["ii", "iai", "i", "", "", ""]),
    (2, ["ia"]),
    (2, ["i", "i", "", ""]),
    pytest.param(4, ["iiii", "", "a", "ia", "", "aai"], marks=pytest.mark.thorough),
    pytest.param(4, ["i", "i", "", ""], marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("world", "kinds"), MIXES)
@pytest.mark.parametrize(("arm", "balance"), [("odc", "full"), ("odc", "none"), ("fsdp2", "full")])
def test_gradients_are_those_of_every_example_alone(
    ranks: Pools, tmp_path: Path, world: int, kinds: list[str], arm: str, balance: str
) -> None:
    tiny_job(tmp_path)
    data = write_examples(tmp_path / "chosen", kinds)
    config = tiny_job(
        tmp_path, balance, arm=arm, data=str(data), ranks=world, minibatch_size=len(kinds), steps=1, clip=0.0
    )
    found = ranks(world).run(gradients, config)
    expected = reference_gradients(config)
    for kept, _ in found:
        assert kept.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(kept[name], gradient, rtol=1e-4, atol=1e-5 * scale + 1e-9, msg=name)
    if arm == "odc" and balance == "none":
        drawn = deal([kinds[i] for i in next(MinibatchSampler(len(kinds), len(kinds)))], world).drawn  # type: ignore[list-item]
        for (_, phases), mine in zip(found, drawn, strict=True):
            letters = "".join(mine)  # type: ignore[arg-type]
            has = {"image": "i" in letters, "audio": "a" in letters, "llm": bool(mine)}
            assert phases[0] == [phase for phase, there in has.items() if there]  # and nothing else was run
