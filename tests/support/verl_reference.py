"""Makes whole RL runs of verl comparable on CPU ranks: its own engine beside odc's, and the same batches in both.

verl loads this module into each of its processes (`VERL_USE_EXTERNAL_MODULES=support.verl_reference`), and its
classes by its own settings. Without them two runs differ by luck: vLLM draws from one generator in the order in which
requests arrive, and rows lie in the order in which answers were finished, which decides what is in each minibatch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import zlib
from pathlib import Path
from typing import Any

import torch
import transfer_queue

# isort: off
import odc.integrations.verl.plugin  # noqa: F401  first: verl's engines ask for a platform
import verl.utils.model
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from odc.integrations.verl.engine import OdcEngine
from support.leaks import processes_of
# isort: on

EngineRegistry.register("language_model", ["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
EngineRegistry.register("value_model", ["fsdp2"], device="cpu")(FSDPEngineWithValueHead)
if not torch.cuda.is_available():  # verl's own reference model lies in pinned memory, which needs a driver
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def note(name: str, what: Any) -> None:
    """Append a line of JSON to a file of the folder that the test reads."""
    with (Path(os.environ["ODC_TEST_NOTES"]) / name).open("a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def note_minibatches(engine: Any) -> None:
    """Note, by rank, how many rows each microbatch of a minibatch of training has; 0 is a piece of one."""
    whole = engine.forward_backward_batch

    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        self.rows = []
        found = whole(self, data, loss_function, forward_only)
        if not forward_only:
            note(f"rows.{torch.distributed.get_rank()}", self.rows)
        return found

    engine.forward_backward_batch = forward_backward_batch


def forward_step(self: Any, micro_batch: Any, *args: Any, **options: Any) -> Any:
    self.rows.append(len(micro_batch) if getattr(self, "_piece", None) is None else 0)
    return one_forward(self, micro_batch, *args, **options)


def load_critic(*given: Any, **named: Any) -> Any:
    torch.manual_seed(0)  # the value head is new
    return critic_of_verl(*given, **named)


def build_lora(*given: Any, **named: Any) -> Any:
    torch.manual_seed(0)  # and so are adapters
    return lora_of_verl(*given, **named)


lora_of_verl, FSDPEngine._build_lora_module = FSDPEngine._build_lora_module, build_lora
critic_of_verl, verl.utils.model.load_valuehead_model = verl.utils.model.load_valuehead_model, load_critic
one_forward, FSDPEngineWithLMHead.forward_step = FSDPEngineWithLMHead.forward_step, forward_step
for engine in (FSDPEngine, OdcEngine):
    note_minibatches(engine)


class SeededAgentLoop(SingleTurnAgentLoop):
    """verl's single turn, with a seed and a largest length of its own for each answer; lengths have a long tail.

    verl's `rollout.full_determinism` gives one seed to all answers of a group: they are equal, and advantages 0.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        seed = zlib.crc32("/".join(str(kwargs[key]) for key in ("global_steps", "index", "session_id")).encode())
        most = min(self.response_length, 1 + int(random.Random(seed).lognormvariate(2.5, 1)))
        return await super().run({**sampling_params, "seed": seed, "max_tokens": most}, **kwargs)


class DeadlyAgentLoop(SeededAgentLoop):
    """As that, but before the second step's first answer a vLLM server is killed."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        if int(kwargs["global_steps"]) == 2 and not (Path(os.environ["ODC_TEST_NOTES"]) / "killed").exists():
            session = os.getsid(0)  # of all processes of the run
            titles = {pid: Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8") for pid in processes_of([session])}
            server = min(pid for pid, title in titles.items() if "vLLMHttpServer" in title)
            note("killed", [server, session])
            os.kill(server, signal.SIGKILL)
        return await super().run(sampling_params, **kwargs)


class OrderedReplayBuffer(ReplayBuffer):
    """verl's buffer, with the answers of a step in the order of prompts; notes the order in which they came."""

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: Any) -> Any:
        keys = [key for key in partition_snapshot if key.split("_")[0] in set(selected_prompt_uids)]
        found = transfer_queue.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["index"])
        rows = [int(index) for index in found["index"]]
        place = {key: (row, int(key.split("_")[1])) for key, row in zip(keys, rows, strict=True)}
        note("arrived", [place[key] for key in keys])
        ordered = {key: partition_snapshot[key] for key in sorted(keys, key=place.__getitem__)}
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)
