"""Responses drawn by vLLM, inside the rollout process: `odc grpo --rollout vllm`.

vLLM reads the ranks' shards itself, by its weight transfer backend `odc` (`odc.integrations.vllm`, which vLLM finds by
the entry point of an installed odc). Nothing is gathered or sent, and the process holds one copy of the weights.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from odc.errors import ConfigError, StaleVersionError
from odc.experiments.config import GrpoConfig
from odc.experiments.grpo.generator import ReferenceModel, check_stops, drawn_lengths, initial_model
from odc.experiments.grpo.samples import Response
from odc.experiments.text.model import causal_config
from odc.handover import Reader

_TRIES = 64  # weights that the job may overtake before an update fails
_MOST_ROWS = 256  # that are drawn at once
_BLOCK = 128  # tokens; a row's keys and values take whole blocks
#: Elements of a head that vLLM's attention on CPUs takes (0.24 to 0.27).
_HEADS = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
_OVERTAKEN = ("was published while version", "overtaken by a newer version")  # in errors of vLLM's workers
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
#: Of a launcher of ranks: vLLM would take this process for one of them.
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def check_vllm(source: Path) -> None:
    """Raises ConfigError, naming a remedy, if vLLM cannot draw responses of the model here; does not load vLLM."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "rollout vllm needs vLLM 0.27 beside odc (docs/rl.md says how to install it for CPUs); or leave "
            "--rollout vllm out"
        )
    if not any(one.name == "odc" for one in entry_points(group="vllm.general_plugins")):
        raise ConfigError(
            "rollout vllm needs odc installed (pip) in vLLM's environment: by that vLLM finds its backend"
        )
    config = causal_config(source)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in _HEADS:
        raise ConfigError(
            f"rollout vllm: heads of the model have {size} elements, and vLLM's attention on CPUs takes "
            f"{', '.join(map(str, sorted(_HEADS)))}; take another model, as in --model qwen2-demo"
        )


class VllmGenerator:
    """An engine of vLLM in fp32, whose weights come from the ranks that `handle` names.

    Raises ConfigError if a stop token is not in the vocabulary, and what vLLM raises if it does not know the model.
    """

    def __init__(self, config: GrpoConfig, source: Path, stop_ids: Sequence[int], handle: str) -> None:
        self.config, self.stop_ids = config, list(stop_ids)
        of_model = causal_config(source)
        check_stops(self.stop_ids, of_model.vocab_size)
        self._reference = ReferenceModel(initial_model(config, source, stop_ids)) if config.kl else None
        self._engine = _engine(config, of_model)
        self._engine.init_weight_transfer_engine({"init_info": {"handle": handle, "timeout_s": config.timeout_s}})

    def update(self, reader: Reader, at_least: int) -> int:
        """As of any source. An update that the job has overtaken is begun again; StaleVersionError after many."""
        for _ in range(_TRIES):
            version = max(at_least, reader.version)
            self._engine.start_weight_update()
            try:
                self._engine.update_weights({"update_info": {"version": version}})
            except Exception as error:  # vLLM keeps the text of a worker's error, and not its type
                if not any(words in str(error) for words in _OVERTAKEN):
                    raise
                continue
            self._engine.finish_weight_update()
            return version
        raise StaleVersionError(f"{_TRIES} updates of vLLM's weights were each overtaken by a newer version")

    def respond(self, prompts: Sequence[Sequence[int]], step: int) -> list[Response]:
        rows = [list(prompt) for prompt in prompts for _ in range(self.config.group)]
        drawn = drawn_lengths(self.config, len(rows), step)
        made = self._engine.generate(
            [{"prompt_token_ids": row} for row in rows],
            [self._parameters(step, number, drawn) for number in range(len(rows))],
            use_tqdm=False,
        )
        outputs = [one.outputs[0] for one in made]
        responses = [list(one.token_ids) for one in outputs]
        reference = None if self._reference is None else self._reference.score(rows, responses)
        return [
            Response(
                tokens,
                [at[token].logprob for at, token in zip(output.logprobs, tokens, strict=True)],
                None if reference is None else reference[number],
            )
            for number, (output, tokens) in enumerate(zip(outputs, responses, strict=True))
        ]

    def _parameters(self, step: int, number: int, drawn: list[int] | None) -> Any:
        """Of response `number` of a step, with a seed of its own: vLLM draws each from a generator of its own."""
        from vllm import SamplingParams

        seed = np.random.SeedSequence([self.config.seed, step, number]).generate_state(1)[0]
        return SamplingParams(
            temperature=1.0,
            seed=int(seed),
            max_tokens=self.config.response_tokens if drawn is None else drawn[number],
            stop_token_ids=self.stop_ids if drawn is None else [],
            ignore_eos=True,  # the task says what ends a response
            logprobs=0,  # of the drawn token only
            detokenize=False,
        )


def _engine(config: GrpoConfig, of_model: Any) -> Any:
    """VLLM's engine inside this process; its worker is another, which ends with it."""
    for name in [*_LAUNCHERS, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    os.environ |= {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    rows = min(config.prompts * config.group, _MOST_ROWS)
    with tempfile.TemporaryDirectory() as folder:
        of_model.save_pretrained(folder)
        return LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",  # the first update brings the weights
            weight_transfer_config={"backend": "odc"},
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,  # what it keeps is of older weights
            max_model_len=config.longest,
            max_num_seqs=rows,
            kv_cache_memory_bytes=_cache_bytes(of_model, config.longest, rows),
        )


def _cache_bytes(of_model: Any, tokens: int, rows: int) -> int:
    """Keys and values in fp32 of so many rows of so many tokens."""
    heads = getattr(of_model, "num_key_value_heads", None) or of_model.num_attention_heads
    size = getattr(of_model, "head_dim", None) or of_model.hidden_size // of_model.num_attention_heads
    blocks = rows * -(-tokens // _BLOCK) + 2
    return int(2 * 4 * of_model.num_hidden_layers * heads * size * blocks * _BLOCK)
