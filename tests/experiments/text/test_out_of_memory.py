"""A rank that runs out of memory costs `odc train` one attempt, then one step, never the job."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_job import complete, rank_job, tiny_job

from odc.experiments.config import JobConfig
from odc.experiments.device import out_of_memory
from odc.experiments.results import JobResult
from odc.experiments.text.step import TextStep

pytest.importorskip("transformers", reason="needs the train extra")

Pools = Callable[[int], Any]
BAD_STEP = 1  # from 0


def short_of_memory(
    rank: int, world: int, config: JobConfig, fits: int | None
) -> tuple[JobResult[TextStep], list[float]]:
    """The job with a rank 1 whose backward fails in step `BAD_STEP` wherever a microbatch has over `fits` tokens.

    None: over half of what the job allows, if the longest document is no longer. Also returns the sum of all
    parameters after each step.
    """
    job = rank_job(config)
    sums: list[float] = []
    run = job.trainer.run

    limit = 0

    def fail(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if rank == 1 and len(sums) == BAD_STEP and kwargs["input_ids"].shape[1] > limit:
            output.register_hook(no_memory)

    def no_memory(gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("tried to allocate more than there is")

    def noted(*args: Any) -> Any:
        nonlocal limit
        longest = max(len(job.trainer.dataset.documents[i]) for i in args[1])
        limit = max(config.max_tokens // 2, longest) if fits is None else fits
        record = run(*args)
        sums.append(sum(float(p.full_tensor().double().sum()) for p in job.trainer.model.parameters()))
        return record

    blocks = [m for m in job.trainer.model.modules() if type(m).__name__.endswith("DecoderLayer")]
    job.trainer.model.register_forward_pre_hook(lambda m, a, k: taken.update(k), with_kwargs=True)
    taken: dict[str, Any] = {}
    blocks[0].register_forward_hook(
        lambda m, a, k, output: fail(m, a, taken, output if isinstance(output, torch.Tensor) else output[0]),
        with_kwargs=True,
    )
    job.trainer.run = noted
    return complete(job), sums


@pytest.mark.parametrize("arm", ["odc", "odc-dynamic"])
def test_a_minibatch_that_does_not_fit_is_run_in_smaller_microbatches(ranks: Pools, tmp_path: Path, arm: Any) -> None:
    config = tiny_job(
        tmp_path,
        arm=arm,
        reproducible=True,
        output=str(tmp_path / "out"),
        save_every=1,
        max_tokens=160,
        minibatch_size=14,
    )
    clean, _ = ranks(2).run(short_of_memory, replace(config, output=None, save_every=0), 10_000)[0]
    rows = ranks(2).run(short_of_memory, config, None)
    for result, _ in rows:
        assert not result.skipped
        assert [step.loss for step in result.steps] == pytest.approx([step.loss for step in clean.steps], rel=1e-5)
        retried = [step.retried for step in result.steps]
        assert [text is not None for text in retried] == [False, True, False] or arm == "odc-dynamic"
        if retried[BAD_STEP] is not None:
            assert "rank 1: out of memory in a microbatch of" in retried[BAD_STEP]
            assert sum(result.steps[BAD_STEP].counts) > sum(clean.steps[BAD_STEP].counts)


def test_what_fits_in_no_way_is_skipped_on_every_rank_and_named(ranks: Pools, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for result, sums in ranks(2).run(short_of_memory, tiny_job(tmp_path, arm="odc", output=str(output)), 0):
        assert [(skip.step, "rank 1: out of memory" in skip.reason) for skip in result.skipped] == [(2, True)]
        assert [step.step for step in result.steps] == [1, 3]
        assert sums[0] == sums[1] != sums[2], "the skipped step has changed weights, or the others have not"
        assert "1 steps skipped" in result.summary()
    lines = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert "out of memory" in lines[1]["reason"] and "loss" not in lines[1]


def test_only_a_lack_of_memory_is_taken_for_one() -> None:
    assert out_of_memory(MemoryError()) and out_of_memory(torch.OutOfMemoryError("no"))
    with pytest.raises(RuntimeError) as host:
        torch.empty(1 << 60)
    assert out_of_memory(host.value)
    assert not out_of_memory(RuntimeError("shapes differ")) and not out_of_memory(ValueError("DefaultCPUAllocator"))
