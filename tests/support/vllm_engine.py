"""vLLM on the CPU, in processes of its own, that reads weights by the backend `odc`: an engine, and a server."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odc.errors import StaleVersionError
from support.ports import free_ports
from support.verl import save_tiny_tokenizer

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
    or the error. With each comes after how many groups it is overtaken, or None. A group is one parameter, so that
    what is one layer to vLLM comes in several.
    """
    os.environ |= ON_CPU | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM

    from odc.integrations import vllm as ours

    real, ours.GROUP_BYTES = ours.read_groups, 1
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
    while (asked := parent.recv()) is not None:
        published, most = asked
        ours.read_groups = functools.partial(overtaken, real, most)
        try:
            engine.start_weight_update()
            engine.update_weights({"update_info": {"version": published}})
            engine.finish_weight_update()
            parent.send(answered(engine))
        except Exception as error:
            parent.send(str(error))
    engine.llm_engine.engine_core.shutdown()


def overtaken(real: Any, most: int | None, *given: Any, **options: Any) -> Iterator[dict[str, Any]]:
    """`read_groups`, until a newer version comes after so many groups."""
    for number, group in enumerate(real(*given, **options)):
        if number == most:
            raise StaleVersionError("overtaken, as it were")
        yield group


def answered(engine: Any) -> tuple[list[int], list[float]]:
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=ANSWER, logprobs=1, ignore_eos=True)
    (found,) = engine.generate([{"prompt_token_ids": PROMPT}], wanted, use_tqdm=False)[0].outputs
    tokens = list(found.token_ids)
    return tokens, [one[token].logprob for one, token in zip(found.logprobs, tokens, strict=True)]


def save_model(folder: Path, layers: int = 2) -> None:
    """A Qwen2, and a tokenizer. Heads have 64 elements: the attention of vLLM on the CPU does not know
    smaller ones.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": save_tiny_tokenizer(folder), "max_position_embeddings": 64, "num_key_value_heads": 1}
    sizes |= {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 2}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(folder)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server with random weights, which takes those of training by the backend `odc`."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    options = {
        "model": folder,
        "host": "127.0.0.1",
        "port": port,
        "tokenizer": folder / "tokenizer",
        "weight-transfer-config": '{"backend": "odc"}',
        "load-format": "dummy",
        "dtype": "float32",
        "max-model-len": 64,
        "max-num-seqs": 8,
        "max-num-batched-tokens": 256,
        "kv-cache-memory-bytes": 16 << 20,
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": -1,
    }
    # "vllm serve" asks for the version of a distribution "vllm", which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with (folder / "server.log").open("w") as log:
        environment = {**os.environ, **ON_CPU, "VLLM_SERVER_DEV_MODE": "1"}
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            while not answers(f"{url}/health"):
                assert server.poll() is None, (folder / "server.log").read_text(errors="replace")[-8000:]
                time.sleep(0.5)
            yield url
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # and what it has started
            server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
