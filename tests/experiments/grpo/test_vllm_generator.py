"""`odc grpo --rollout vllm` without vLLM: what is refused, and what its engine is asked for."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.small_model import CONFIG, toy

from odc.errors import ConfigError, StaleVersionError
from odc.experiments.config import GrpoConfig
from odc.experiments.grpo import GrpoWorkload, vllm_generator
from odc.experiments.grpo.vllm_generator import VllmGenerator

PROMPTS = [[9, 10, 11, 12], [30, 31]]


class Engine:
    """Stands in for `vllm.LLM`: the first updates are overtaken, and every answer is its prompt's first token."""

    def __init__(self, overtaken: int = 0) -> None:
        self.overtaken, self.calls = overtaken, list[Any]()

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(request["init_info"]["handle"])

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: Any) -> None:
        self.calls.append(request["update_info"]["version"])
        self.overtaken -= 1
        if self.overtaken >= 0:
            raise RuntimeError(
                "Worker failed with error 'version 7 was published while version 6 was still to be read'"
            )

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def generate(self, prompts: Any, parameters: Any, use_tqdm: bool) -> list[Any]:
        self.calls.append(parameters)
        return [
            self._answer(one["prompt_token_ids"][0], how.max_tokens)
            for one, how in zip(prompts, parameters, strict=True)
        ]

    def _answer(self, token: int, length: int) -> Any:
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for _ in range(length)]
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=(token,) * length, logprobs=logprobs)])


def generator(monkeypatch: pytest.MonkeyPatch, config: GrpoConfig, engine: Engine) -> VllmGenerator:
    monkeypatch.setattr(vllm_generator, "_engine", lambda *unused: engine)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    return VllmGenerator(config, Path(config.model), range(8), "handle")


def test_an_update_that_was_overtaken_is_begun_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = Engine(overtaken=1)
    made = generator(monkeypatch, toy(tmp_path, rollout="vllm"), engine)
    versions = iter([5, 7])
    reader: Any = type("Newest", (), {"version": property(lambda self: next(versions))})()
    assert made.update(reader, 6) == 7
    assert engine.calls == ["handle", "start", 6, "start", 7, "finish"]
    engine.overtaken, versions = 100, iter([7] * 100)
    with pytest.raises(StaleVersionError, match="64 updates"):
        made.update(reader, 7)


def test_other_errors_of_an_update_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = Engine()
    monkeypatch.setattr(engine, "update_weights", Mock(side_effect=RuntimeError("another error")))
    made = generator(monkeypatch, toy(tmp_path, rollout="vllm"), engine)
    reader: Any = SimpleNamespace(version=1)
    with pytest.raises(RuntimeError, match="another error"):
        made.update(reader, 1)


def test_each_response_has_a_seed_and_the_reference_of_its_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = toy(tmp_path, rollout="vllm", lengths="drawn", kl=0.1)
    engine = Engine()
    made = generator(monkeypatch, config, engine)
    responses = made.respond(PROMPTS, 3)
    first = engine.calls[-1]
    assert [set(response.tokens) for response in responses] == [{9}] * 4 + [{30}] * 4
    assert len({len(response.tokens) for response in responses}) > 1, "lengths are drawn"
    for response in responses:
        assert response.reference is not None and len(response.reference) == len(response.tokens)
        assert response.log_probs == [-0.5] * len(response.tokens)
    assert made.respond(PROMPTS, 3) == responses
    seeds = [{one.seed for one in calls} for calls in (first, engine.calls[-1])]
    made.respond(PROMPTS, 4)
    assert seeds[0] == seeds[1] and len(seeds[0]) == 8 and not seeds[0] & {one.seed for one in engine.calls[-1]}
    assert all(not one.stop_token_ids for one in first)


def test_the_task_says_what_ends_a_response(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = toy(tmp_path, rollout="vllm")
    engine = Engine()
    made = generator(monkeypatch, config, engine)
    assert made.respond(PROMPTS, 0)[0].reference is None
    for one in engine.calls[-1]:
        assert (one.stop_token_ids, one.max_tokens, one.ignore_eos) == (list(range(8)), config.response_tokens, True)
    with pytest.raises(ConfigError, match="stop token 64"):
        VllmGenerator(config, Path(config.model), [64], "handle")


@pytest.mark.parametrize(
    ("heads", "there", "plugins", "message"),
    [
        (1, False, ["odc"], "needs vLLM 0.27 beside odc"),
        (1, True, ["other"], "installed .pip. in vLLM's environment"),
        (2, True, ["odc"], "heads of the model have 16 elements"),
        (1, True, ["other", "odc"], ""),
    ],
)
def test_what_is_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, heads: int, there: bool, plugins: list[str], message: str
) -> None:
    config = toy(tmp_path, rollout="vllm")
    Path(config.model).write_text(json.dumps(CONFIG | {"num_attention_heads": heads}))
    monkeypatch.setattr(vllm_generator, "find_spec", lambda name: there or None)
    monkeypatch.setattr(vllm_generator, "entry_points", lambda group: [SimpleNamespace(name=one) for one in plugins])
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        GrpoWorkload(config).check()


def test_arms_without_published_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollout vllm reads the weights of odc's ranks"):
        toy(tmp_path, rollout="vllm", arm="fsdp2")
