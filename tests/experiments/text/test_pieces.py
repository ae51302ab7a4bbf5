"""Jobs whose long samples run as pieces on both ranks, against the same jobs with whole samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.ranks import RanksFailed
from support.tiny_job import CONFIG, complete, rank_job, run_job, tiny_job

from odc.errors import DataError, UnsupportedError
from odc.experiments.config import JobConfig
from odc.experiments.results import JobResult
from odc.experiments.text.step import TextStep, TextWorkload
from odc.split import SamplePiece
from odc.trace import MICROBATCH, WAIT, load_spans, piece_of

pytest.importorskip("transformers", reason="needs the train extra")

Pools = Callable[[int], Any]


def split_job(folder: Path, **changes: Any) -> JobConfig:
    return tiny_job(folder, **{"arm": "odc-split", "least_piece": 4, "minibatch_size": 2} | changes)


@pytest.mark.parametrize(
    ("changes", "rel"),
    [
        ({"minibatch_size": 3}, 2e-5),
        ({"activation_checkpointing": True}, 2e-5),
        ({"precision": "bf16"}, 2e-2),
    ],
)
def test_losses_and_norms_are_those_of_whole_samples(
    ranks: Pools, tmp_path: Path, changes: dict[str, Any], rel: float
) -> None:
    split, whole = (ranks(2).run(run_job, split_job(tmp_path, arm=arm, **changes)) for arm in ("odc-split", "odc"))
    assert any(step.pieces for step in split[0].steps) and not any(step.pieces for step in whole[0].steps)
    for mine, theirs, expected in zip(split[0].steps, split[1].steps, whole[0].steps, strict=True):
        same = {"step_s": 0.0, "bubble": None}
        assert replace(mine, **same) == replace(theirs, **same), "ranks disagree on a step"
        assert (mine.samples, mine.tokens, mine.label_tokens) == (
            expected.samples,
            expected.tokens,
            expected.label_tokens,
        )
        assert mine.loss == pytest.approx(expected.loss, rel=rel)
        assert mine.norm == pytest.approx(expected.norm, rel=rel)
        assert mine.dummies == 0 and (mine.plan_bubble < expected.plan_bubble) == bool(mine.pieces)


def test_samples_above_the_cap_train_in_pieces(ranks: Pools, tmp_path: Path) -> None:
    capped = split_job(tmp_path, max_tokens=60)
    split = ranks(2).run(run_job, capped)[0].steps
    whole = ranks(2).run(run_job, split_job(tmp_path, arm="odc"))[0].steps
    assert [step.loss for step in split] == pytest.approx([step.loss for step in whole], rel=2e-5)
    with pytest.raises(DataError, match="more than the cap of 60"):
        TextWorkload(capped.with_(arm="odc")).prepare()
    with pytest.raises(DataError, match="more than the cap of 80"):  # two pieces of 40
        TextWorkload(capped.with_(max_tokens=40)).prepare()
    assert capped.with_(long="drop").longest == 60, "what is dropped is the same under every arm"


def test_a_job_resumes_at_its_split_samples(ranks: Pools, tmp_path: Path) -> None:
    through = split_job(tmp_path, output=str(tmp_path / "through"), steps=4, save_every=2)
    losses = [step.loss for step in ranks(2).run(run_job, through)[0].steps]
    first = tmp_path / "through" / "checkpoints" / "step-00000002"
    resumed = ranks(2).run(run_job, split_job(tmp_path, steps=4, resume=str(first)))[0].steps
    assert [step.loss for step in resumed] == pytest.approx(losses[2:], rel=1e-6) and resumed[0].step == 3


def test_pieces_and_their_waits_are_in_the_trace(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(run_job, split_job(tmp_path, spans=str(tmp_path)))
    for rank in range(2):
        spans = load_spans(tmp_path / f"rank-{rank}.jsonl")
        pieces = [span for span in spans if span.category == MICROBATCH and span.unit]
        waits = [span for span in spans if span.category == WAIT and span.peer == 1 - rank]
        assert {span.unit for span in pieces} <= {piece_of(0), piece_of(1)} and pieces
        for piece in pieces:
            inside = [one for one in waits if piece.start_ns <= one.start_ns and one.end_ns <= piece.end_ns]
            layers = {one.unit for one in inside}
            assert {"kv0", "kv1"} <= layers and any(name.startswith("dkv") for name in layers)


def without_memory(rank: int, world: int, config: JobConfig, failing: int) -> JobResult[TextStep]:
    """The job whose rank 1 runs out of memory in the first `failing` of its pieces, once each is in its backward."""
    job, failures = rank_job(config), [failing if rank == 1 else 0]

    def fail(module: Any, args: Any, given: dict[str, Any], output: Any) -> None:
        piece = getattr(given.get("odc_piece"), "attend", None)  # the check on first use runs backward, too
        if failures[0] and isinstance(getattr(piece, "__self__", None), SamplePiece) and output.requires_grad:
            failures[0] -= 1
            output.register_hook(no_memory)

    def no_memory(gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("tried to allocate more than there is")

    job.trainer.model.model.layers[0].register_forward_hook(fail, with_kwargs=True)
    result: JobResult[TextStep] = complete(job)
    return result


@pytest.mark.parametrize(("failing", "skipped"), [(1, 0), (2, 1)])
def test_a_piece_that_does_not_fit_costs_an_attempt_then_a_step(
    ranks: Pools, tmp_path: Path, failing: int, skipped: int
) -> None:
    config = split_job(tmp_path, max_tokens=90)
    result = ranks(2).run(without_memory, config, failing)
    for rank in range(2):
        assert len(result[rank].skipped) == skipped and len(result[rank].steps) == 3 - skipped
    if not skipped:
        expected = ranks(2).run(run_job, config)[0].steps
        first = result[0].steps[0]
        assert first.pieces and "rank 1: out of memory in piece of sample" in str(first.retried)
        assert [s.loss for s in result[0].steps] == pytest.approx([s.loss for s in expected], rel=2e-5)


def test_a_host_with_too_few_ranks_for_the_longest_document_says_so(ranks: Pools, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"does not fit in 1 pieces of 60 tokens, one on each rank of a host"):
        ranks(2).run(on_small_hosts, split_job(tmp_path, max_tokens=60))


def on_small_hosts(rank: int, world: int, config: JobConfig) -> None:
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="1"):
        rank_job(config)


def test_a_model_that_cannot_be_split_is_refused_before_ranks_start(tmp_path: Path) -> None:
    config = split_job(tmp_path)
    scaled = CONFIG | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    Path(config.model).write_text(json.dumps(scaled))
    with pytest.raises(UnsupportedError, match="rotary embedding .dynamic."):
        TextWorkload(config).prepare()
    TextWorkload(config.with_(arm="odc")).prepare()
