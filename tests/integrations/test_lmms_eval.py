"""The adapter of lmms-eval, with the real package, a tiny random model and local tasks."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from typing import Any

import pytest
import torch
from support.tiny_lm import forwards, tiny_qwen2, tiny_tokenizer

from odc import fully_shard
from odc.errors import ConfigError, UnsupportedError
from odc.eval import session
from odc.integrations.lmms_eval import evaluate

needs_lmms_eval = pytest.mark.skipif(
    importlib.util.find_spec("lmms_eval") is None, reason="needs lmms-eval: make test-integrations"
)
REPEATS = 3
NAMES = ["tiny_choice", "tiny_generation"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two tasks on seven questions about pictures of one colour, with two to five choices each, on disk."""
    from datasets import Dataset, DatasetDict
    from PIL import Image

    colours = ["red", "green", "blue", "yellow", "violet"]
    rows = [
        {
            "image": Image.new("RGB", (4, 4), colours[i % 5]),
            "question": f"what is colour {i}?" + " please" * i,
            "choices": colours[: 2 + i % 4],
            "label": i % 2,
        }
        for i in range(7)
    ]
    folder = tmp_path_factory.mktemp("lmms")
    DatasetDict(test=Dataset.from_list(rows)).save_to_disk(folder / "colours")
    for name, text in TASKS.items():
        (folder / name).write_text(text.replace("DATA", str(folder / "colours")).replace("REPEATS", str(REPEATS)))
    return str(folder)


TASKS = {
    "tiny_choice.yaml": """
task: tiny_choice
dataset_path: DATA
dataset_kwargs: {load_from_disk: true}
test_split: test
output_type: multiple_choice
doc_to_visual: !function functions.pictures
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
process_results: !function functions.right
metric_list: [{metric: right, aggregation: mean, higher_is_better: true}]
""",
    "tiny_generation.yaml": """
task: tiny_generation
dataset_path: DATA
dataset_kwargs: {load_from_disk: true}
test_split: test
output_type: generate_until
repeats: REPEATS
doc_to_visual: !function functions.pictures
doc_to_text: "{{question}}"
doc_to_target: red
generation_kwargs: {max_new_tokens: 6}
process_results: !function functions.vowels
metric_list: [{metric: vowels, aggregation: mean, higher_is_better: true}]
""",
    "functions.py": """
import ast

def right(doc, results):
    # lmms-eval 0.7.3 hands on each (log-probability, is greedy) as text, on which its own multiple choice fails.
    scores = [ast.literal_eval(text)[0] for text in results]
    return {"right": float(scores.index(max(scores)) == doc["label"])}

def pictures(doc):
    return [doc["image"]]

def vowels(doc, results):
    return {"vowels": float(sum(results[0].count(one) for one in "aeiou") >= 2)}
""",
}


def wrapped(model: Any, tokenizer: Any) -> Any:
    """As a user wraps a model of their own: the picture's brightness is given in words.

    Its answers are texts, or lmms-eval's own class around them, with and without counts of tokens.
    """
    from lmms_eval.api.instance import GenerationResult, TokenCounts
    from lmms_eval.api.model import lmms

    class Tiny(lmms):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.device, self.asked = model, torch.device("cpu"), 0

        def _tokens(self, text: str, visuals: list[Any]) -> torch.Tensor:
            seen = " ".join(str(picture.convert("L").getpixel((0, 0))) for picture in visuals)
            return tokenizer(f"{seen} {text}", return_tensors="pt").input_ids

        def _visuals(self, doc_to_visual: Any, doc_id: int, task: str, split: str) -> list[Any]:
            return doc_to_visual(self.task_dict[task][split][doc_id])

        @torch.no_grad()
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            found = []
            for context, continuation, doc_to_visual, doc_id, task, split in (one.args for one in requests):
                prompt = self._tokens(context, self._visuals(doc_to_visual, doc_id, task, split))
                tokens = tokenizer(continuation, return_tensors="pt").input_ids
                logits = self.model(torch.cat([prompt, tokens], 1)).logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1)
                greedy = bool((logits.argmax(-1) == tokens[0]).all())
                found.append((float(logits.gather(-1, tokens[0, :, None]).sum()), greedy))
            return found

        @torch.no_grad()
        def generate_until(self, requests: list[Any]) -> list[Any]:
            answers: list[Any] = []
            for number, (context, options, doc_to_visual, doc_id, task, split) in enumerate(r.args for r in requests):
                prompt = self._tokens(context, self._visuals(doc_to_visual, doc_id, task, split))
                torch.manual_seed(100 * doc_id + number % REPEATS)  # runs of one document differ, on any rank alike
                out = self.model.generate(
                    prompt, max_new_tokens=options["max_new_tokens"], do_sample=True, pad_token_id=1
                )
                text = tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)
                counted = TokenCounts(prompt.shape[1], out.shape[1] - prompt.shape[1])
                answers.append([text, GenerationResult(text), GenerationResult(text, counted)][doc_id % 3])
            return answers

        def generate_until_multi_round(self, requests: list[Any]) -> list[str]:
            raise NotImplementedError

    return Tiny()


@functools.cache
def manager(folder: str) -> Any:
    """Without lmms-eval's own tasks, whose thousands of files take long to read."""
    from lmms_eval.tasks import TaskManager

    return TaskManager("ERROR", include_path=folder, include_defaults=False)


def essence(results: Any) -> Any:
    """Scores of each task, and of its logged samples what was asked and answered."""
    kept = ("doc_id", "target", "resps", "filtered_resps", "token_counts", "right", "vowels")
    return results["results"], {
        task: [{key: sample[key] for key in kept if key in sample} for sample in some]
        for task, some in results["samples"].items()
    }


OPTIONS: dict[str, Any] = {"bootstrap_iters": 0, "verbosity": "ERROR"}


def _evaluated(rank: int, world: int, folder: str, limit: int | None) -> Any:
    """With odc, unpadded; and by one process alone, without odc. As under torchrun, ranks are in the environment."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    from lmms_eval.evaluator import simple_evaluate

    model = tiny_qwen2(fully_shard)
    ran, lm = forwards(model), wrapped(model, tiny_tokenizer())
    with session(modules=[model], timeout_s=100.0) as peers:
        results = evaluate(lm, NAMES, peers, task_manager=manager(folder), limit=limit, **OPTIONS)
    assert os.environ["WORLD_SIZE"] == str(world) and lm.model is model
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    torch.distributed.barrier()
    whole = tiny_qwen2()
    alone, lm = forwards(whole), wrapped(whole, tiny_tokenizer())
    # On every rank: lmms-eval has a barrier wherever there is a process group.
    expected = simple_evaluate(lm, tasks=NAMES, task_manager=manager(folder), limit=limit, **OPTIONS)
    return results and essence(results), len(ran), essence(expected), len(alone)


@needs_lmms_eval
@pytest.mark.parametrize(("world", "limit"), [(2, None), (3, None), (3, 2)])
def test_the_results_of_one_process(ranks, folder: str, world: int, limit: int | None):
    """Also with fewer documents than ranks, and several runs of each document."""
    by_rank = ranks(world).run(_evaluated, folder, limit)
    results, _, expected, alone = by_rank[0]
    scores, samples = results
    assert set(scores) == {"tiny_choice", "tiny_generation"}
    assert results == expected
    runs = [sample["resps"][0] for sample in samples["tiny_generation"]]
    counted = [bool(sample["token_counts"][0]) for sample in samples["tiny_generation"]]
    assert counted == [number % 3 == 2 for number in range(limit or 7)]
    assert {len(some) for some in runs} == {REPEATS} and any(len(set(some)) > 1 for some in runs)
    for some in samples.values():
        assert [sample["doc_id"] for sample in some] == list(range(limit or 7))
    assert [one[0] for one in by_rank[1:]] == [None] * (world - 1)
    counts = [one[1] for one in by_rank]
    assert sum(counts) == alone, "a forward was run twice, or for nothing"
    assert len(set(counts)) > 1, "the case is not uneven"


@needs_lmms_eval
def test_what_cannot_work_on_ranks_is_refused():
    with session() as peers, pytest.raises(UnsupportedError, match="does not support max_tokens=5: only one rank"):
        evaluate(None, [], peers, max_tokens=5)


def test_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lmms_eval.evaluator", None)
    with session() as peers, pytest.raises(ConfigError, match=r"pip install -e '.\[lmms-eval\]'"):
        evaluate(None, [], peers)
