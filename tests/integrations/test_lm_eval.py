"""The adapter of lm-eval-harness, with the real package, a tiny random model and local tasks."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny_lm import forwards, tiny_qwen2, tiny_tokenizer
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc import fully_shard
from odc.errors import ConfigError, PeerLostError, UnsupportedError
from odc.eval import session
from odc.integrations._evaluation_harness import RequestsDone, characters, document_owners, spread_requests
from odc.integrations.lm_eval import evaluate

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: make test-integrations"
)
COLOURS = ["red", "green", "blue", "yellow", "violet", "brown"]


def documents(**unused: Any) -> Any:
    """Seven questions with two to five choices each."""
    from datasets import Dataset, DatasetDict

    rows = [
        {"question": f"what is colour {i}?" + " please" * i, "choices": COLOURS[: 2 + i % 4], "label": i % 2}
        for i in range(7)
    ]
    return DatasetDict(test=Dataset.from_list(rows))


def choice() -> dict[str, Any]:
    return {
        "task": "tiny_choice",
        "custom_dataset": documents,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def shuffled() -> dict[str, Any]:
    """Documents in an order that is drawn once, when the task is loaded."""
    order: list[int] = []

    def drawn(data: Any) -> Any:
        if not order:
            order.extend(random.sample(range(len(data)), len(data)))
        return data.select(order)

    return choice() | {"task": "tiny_shuffled", "process_docs": drawn}


def generation() -> dict[str, Any]:
    return {
        "task": "tiny_generation",
        "custom_dataset": documents,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "red",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }


def perplexity() -> dict[str, Any]:
    return {
        "task": "tiny_perplexity",
        "custom_dataset": documents,
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }


def tasks() -> list[Any]:
    return [choice(), generation(), perplexity()]


def wrapped(model: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=1, max_length=256)


@functools.cache
def manager() -> Any:
    """Without lm-eval's own tasks, whose thousands of files take a minute to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def essence(results: Any) -> Any:
    """Scores of each task, and its logged samples."""
    return results["results"], results["samples"]


def _evaluated(rank: int, world: int, limit: int | None) -> Any:
    """With odc, unpadded; and by this process alone, without odc."""
    from lm_eval import simple_evaluate

    model = tiny_qwen2(fully_shard)
    ran = forwards(model)
    with session(modules=[model], timeout_s=100.0) as peers:
        results = evaluate(wrapped(model), tasks(), peers, limit=limit, bootstrap_iters=0, task_manager=manager())
    if rank:
        return results, len(ran)
    whole = tiny_qwen2()
    alone = forwards(whole)
    expected = simple_evaluate(
        model=wrapped(whole), tasks=tasks(), limit=limit, bootstrap_iters=0, task_manager=manager()
    )
    return essence(results), len(ran), essence(expected), len(alone)


@needs_lm_eval
@pytest.mark.parametrize(("world", "limit"), [(2, None), (3, None), (3, 2)])
def test_the_results_of_one_process(ranks, world: int, limit: int | None):
    """Also with fewer documents than ranks."""
    (results, ran, expected, alone), *others = ranks(world).run(_evaluated, limit)
    scores, samples = results
    assert set(scores) == {"tiny_choice", "tiny_generation", "tiny_perplexity"}
    assert results == expected
    for some in samples.values():
        assert [sample["doc_id"] for sample in some] == list(range(limit or 7))
    assert [one for one, _ in others] == [None] * (world - 1)
    by_rank = [ran, *(count for _, count in others)]
    assert sum(by_rank) == alone, "a forward was run twice, or for nothing"
    assert len(set(by_rank)) > 1, "the case is not uneven"


def _shuffled(rank: int, world: int) -> Any:
    """With odc, from random states that differ by rank; and by this process alone."""
    from lm_eval import simple_evaluate

    options: dict[str, Any] = {"bootstrap_iters": 0, "task_manager": manager()}
    random.seed(rank + 100)
    with session(timeout_s=100.0) as peers:
        results = evaluate(wrapped(tiny_qwen2()), [shuffled()], peers, **options)
    if rank:
        return results
    return essence(results), essence(simple_evaluate(model=wrapped(tiny_qwen2()), tasks=[shuffled()], **options))


@needs_lm_eval
def test_tasks_draw_from_the_seed_of_the_harness(ranks):
    (results, expected), other = ranks(2).run(_shuffled)
    questions = [sample["doc"]["question"] for sample in expected[1]["tiny_shuffled"]]
    assert questions != sorted(questions), "the case is not shuffled"
    assert results == expected
    assert other is None


def _on_other_local_ranks(rank: int, world: int) -> Any:
    """As where the session's first rank is not the first of its host."""
    with pytest.MonkeyPatch.context() as patch, session(timeout_s=100.0) as peers:
        patch.setenv("LOCAL_RANK", str(rank + 1))
        results = evaluate(wrapped(tiny_qwen2()), [choice()], peers, bootstrap_iters=0, task_manager=manager())
        assert os.environ["LOCAL_RANK"] == str(rank + 1), "the variable is gone"
    return results and list(results["results"])


@needs_lm_eval
def test_the_sessions_first_rank_has_the_results(ranks):
    assert ranks(2).run(_on_other_local_ranks) == [["tiny_choice"], None]


def _scored(rank: int, world: int) -> Any:
    found = []
    for shard, pad in ((fully_shard, False), (fully_shard, True), (torch_fully_shard, True)):
        model, options = tiny_qwen2(shard), {"pad": pad, "bootstrap_iters": 0, "task_manager": manager()}
        ran = forwards(model)
        with session(modules=[model], timeout_s=100.0) as peers:
            scored = evaluate(wrapped(model), [choice()], peers, **options)
            forward_passes = len(ran)
            generated = evaluate(wrapped(model), [generation()], peers, limit=4, **options)
        found.append((None if rank else [essence(scored), essence(generated)], forward_passes, len(ran)))
    return found


@needs_lm_eval
@pytest.mark.parametrize("world", [2, 3])
def test_padded_and_unpadded_give_the_same_scores(ranks, world: int):
    """FSDP2 needs the pads, and transformers to generate in step; odc neither."""
    by_rank = ranks(world).run(_scored)
    unpadded, padded, fsdp2 = by_rank[0]
    assert unpadded[0] == padded[0] == fsdp2[0]
    scored, in_all = ([[one[way][field] for one in by_rank] for way in range(3)] for field in (1, 2))
    assert sum(scored[0]) == 23  # 7 documents with 2, 3, 4, 5, 2, 3, 4 choices
    assert scored[1] == scored[2] == [max(scored[1])] * world
    assert in_all[2] == [in_all[2][0]] * world
    assert sum(in_all[0]) < sum(in_all[1]) <= sum(in_all[2])


def _broken(rank: int, world: int) -> str:
    model = tiny_qwen2(fully_shard)
    lm = wrapped(model)
    if rank == 1:
        lm._model_call = lambda *_, **__: 1 / 0
    try:
        with session(modules=[model], timeout_s=100.0) as peers:
            evaluate(lm, [choice()], peers, task_manager=manager())
    except (PeerLostError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "well"


@needs_lm_eval
def test_a_rank_that_fails_ends_the_evaluation_of_all(ranks):
    first, second = ranks(2).run(_broken)
    assert second == "ZeroDivisionError: division by zero"
    assert first.startswith("PeerLostError: rank 0") and "rank 1 failed in the evaluation: ZeroDivision" in first


@needs_lm_eval
def test_what_cannot_work_on_ranks_is_refused():
    lm = wrapped(tiny_qwen2())
    with session() as peers:
        with pytest.raises(UnsupportedError, match=r"does not support use_cache='x': ranks would ask for different"):
            evaluate(lm, [choice()], peers, use_cache="x")
        lm._world_size = 4
        with pytest.raises(ConfigError, match="lm spreads requests over 4 ranks itself"):
            evaluate(lm, [choice()], peers, task_manager=manager())
    with pytest.raises(AttributeError):
        del lm.loglikelihood


def test_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with session() as peers, pytest.raises(ConfigError, match=r"pip install -e '.\[lm-eval\]'"):
        evaluate(None, [], peers)


def request(doc_id: int, length: int) -> Any:
    return SimpleNamespace(task_name="t", doc_id=doc_id, idx=0, args=("x" * length, len))


def test_requests_of_one_document_stay_together_and_work_is_even():
    lengths = [100, 1, 1, 1, 50, 49, 1]
    requests = [request(doc, length) for doc, length in enumerate(lengths) for _ in range(2)]
    owners = document_owners(requests, 2, characters)
    assert owners[::2] == owners[1::2]
    work = [sum(2 * n for n, owner in zip(lengths, owners[::2], strict=True) if owner == one) for one in (0, 1)]
    assert abs(work[0] - work[1]) <= 2
    assert document_owners(requests, 3, None)[::2] == [0, 1, 2, 0, 1, 2, 0]
    assert document_owners([], 3, characters) == []


def test_the_first_rank_may_compute_metrics_for_longer_than_the_timeout():
    longer: list[int] = []
    with session() as peers:
        peers.let_first_work = lambda: longer.append(1)  # type: ignore[method-assign]
        options: Any = {"pad": False, "cost": None, "after": lambda kind: None}
        with pytest.raises(RequestsDone), spread_requests(SimpleNamespace(), [], peers, **options):
            raise RequestsDone
    assert longer == [1]


class Delegating:
    """Answers generate_until through loglikelihood."""

    def loglikelihood(self, requests: list[Any], factor: int = 1) -> list[int]:
        return [factor * len(one.args[0]) for one in requests]

    def generate_until(self, requests: list[Any]) -> list[int]:
        return self.loglikelihood(requests, factor=10)


def _delegated(rank: int, world: int, documents: int, pad: bool) -> Any:
    lm, requests = Delegating(), [request(number, number + 1) for number in range(documents)]
    options: Any = {"pad": pad, "cost": None, "after": lambda kind: None}
    with (
        session(timeout_s=30.0) as peers,
        spread_requests(lm, ["loglikelihood", "generate_until"], peers, **options),
    ):
        return lm.generate_until(requests), lm.loglikelihood(requests)


@pytest.mark.parametrize("documents", [1, 7])
@pytest.mark.parametrize("pad", [False, True])
def test_a_kind_may_be_answered_through_another(ranks, documents: int, pad: bool):
    """On each rank by itself; the harness may still ask for the other one."""
    lengths = list(range(1, documents + 1))
    missing = [None] * documents
    assert ranks(2).run(_delegated, documents, pad) == [([10 * n for n in lengths], lengths), (missing, missing)]
