"""An engine of vLLM on the CPU, in a process of its own, that reads weights by the backend `odc`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

PROMPT, ANSWER = [5, 9, 14, 33], 8  # tokens, and how many are answered
ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def serve(parent: Any, folder: Path, handle: str) -> None:
    """A process of its own, as vLLM leaves files open: for each version that comes, what vLLM answers after reading it,
    or the error.
    """
    os.environ |= ON_CPU
    from vllm import LLM

    engine = LLM(
        str(folder),
        tokenizer=str(folder / "tokenizer"),
        weight_transfer_config={"backend": "odc"},
        load_format="dummy",
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=16 << 20,
    )
    engine.init_weight_transfer_engine({"init_info": {"handle": handle, "timeout_s": 60.0}})
    while (published := parent.recv()) is not None:
        try:
            engine.start_weight_update()
            engine.update_weights({"update_info": {"version": published}})
            engine.finish_weight_update()
            parent.send(answered(engine))
        except Exception as error:
            parent.send(str(error))
    engine.llm_engine.engine_core.shutdown()


def answered(engine: Any) -> tuple[list[int], list[float]]:
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=ANSWER, logprobs=1, ignore_eos=True)
    (found,) = engine.generate([{"prompt_token_ids": PROMPT}], wanted, use_tqdm=False)[0].outputs
    tokens = list(found.token_ids)
    return tokens, [one[token].logprob for one, token in zip(found.logprobs, tokens, strict=True)]
