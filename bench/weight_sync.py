"""Weight sync of a model in bf16, from two training ranks to one process of their host, against memcpy of its bytes.

`OMP_NUM_THREADS=1 python -m bench.weight_sync --results bench/results`, in an environment that has verl; it takes
about 10 GiB of memory. The model is a Qwen2 with random weights: 0.49 billion parameters with the default sizes.

All actions take turns, and are timed from the order to the ranks until the reading process has all weights in tensors
of its own, which exist already:

* "memcpy": the reading process copies as many bytes within its memory, on one thread, tensor by tensor.
* "odc, read": weights that the ranks have published are read (`odc.handover.Reader`).
* "odc, publish and read": the ranks publish, which casts their fp32 shards to bf16, and all is read.
* "odc, verl's checkpoint engine": as `rollout.checkpoint_engine.backend=odc` does it, bucket by bucket.
* "verl, gather and bucket": what verl does under strategy `fsdp2`, by verl's own functions. `get_per_tensor_param`
  gathers one parameter after the other over gloo, in fp32, and `BucketedWeightSender` hands them over in shared memory.

The handover to vLLM's own tensors is left out of all of them alike. Before anything is timed, each way's tensors are
compared with those of the first.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
import tempfile
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.handover import MIB, Outsider
from bench.script import Script
from bench.turns import in_turns
from odc.bench.ranks import RankPool, held
from odc.provenance import versions_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the engines are built as in the tests

RANKS = 2
_BF16 = {"mixed_precision": {"param_dtype": "bf16"}}


def save_model(folder: Path, layers: int, hidden: int, words: int) -> int:
    """A Qwen2 with random weights in bf16, and a tokenizer; returns the number of parameters."""
    from support.verl import save_tiny_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    save_tiny_tokenizer(folder)
    heads = max(1, hidden // 64)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4), "vocab_size": words}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=False, **sizes)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def bucket_transfer() -> Any:
    """Verl's module of bucketed transfers, loaded without its package, which asks for vLLM."""
    import verl.workers.rollout as package

    path = Path(package.__path__[0]) / "vllm_rollout" / "bucketed_weight_transfer.py"
    spec = spec_from_file_location("bucketed_weight_transfer", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# on the ranks ---------------------------------------------------------------------------------------------------------


def build_engines(folder: Path, bucket: int) -> Any:
    """An engine of each strategy, with the same weights; on rank 0 what a rollout process has to know of odc's."""
    from support.verl import import_verl, join_as_verl
    from support.verl_engine import build

    rank = dist.get_rank()
    join_as_verl(rank, dist.get_world_size())
    import_verl("odc.integrations.verl.checkpoint_engine")
    from verl.checkpoint_engine import CheckpointEngineRegistry

    held.verl = build(folder, "fsdp2", **_BF16)
    held.odc = build(folder, "odc", **_BF16)
    held.sync = CheckpointEngineRegistry.new("odc", bucket_size=bucket, is_master=rank == 0)
    return held.sync.prepare()


def publish() -> Any:
    """As verl's checkpoint engine does it; on rank 0 what a rollout process has to know."""
    return held.sync.prepare()


def gather_and_send(socket: str, bucket: int) -> None:
    """Verl's own: every rank gathers, and rank 0, which has the rollout, sends."""
    weights, _ = held.verl.get_per_tensor_param()
    if dist.get_rank() == 0:
        asyncio.run(
            bucket_transfer().BucketedWeightSender(socket, bucket // MIB, use_shm=True).async_send_weights(weights)
        )
    else:
        for _ in weights:
            pass


# in the reading process -----------------------------------------------------------------------------------------------


class SyncedWeights:
    """Tensors in bf16, as a rollout has them, and the ways by which they are brought up to date."""

    def __init__(self, published: Any, bucket: int, socket: str) -> None:
        from support.verl import import_verl

        import_verl("odc.integrations.verl.checkpoint_engine")
        from verl.checkpoint_engine import CheckpointEngineRegistry

        from odc.handover import Reader

        self._reader, self._socket = Reader(published.handle), socket
        self._engine: Any = CheckpointEngineRegistry.new("odc", bucket_size=bucket)
        self._into = self._reader.read().tensors
        self._source = {name: tensor.clone() for name, tensor in self._into.items()}

    def memcpy(self) -> None:
        for name, tensor in self._into.items():
            ctypes.memmove(tensor.data_ptr(), self._source[name].data_ptr(), tensor.nbytes)

    def read(self, version: int) -> None:
        self._reader.read(self._into, at_least=version)

    def by_checkpoint_engine(self, published: Any) -> None:
        async def receive() -> None:
            async for name, tensor in self._engine.receive_weights():
                self._into[name].copy_(tensor)

        self._engine.init_process_group(published)
        asyncio.run(receive())

    def by_bucket(self) -> None:
        bucket_transfer().BucketedWeightReceiver(self._socket, torch.device("cpu"), use_shm=True).receive_weights(
            self._load
        )

    def _load(self, weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        for name, tensor in weights:
            self._into[name].copy_(tensor)

    def forget(self) -> None:
        """Zeros, so that nothing of another way is left."""
        for tensor in self._into.values():
            tensor.zero_()

    def changed(self) -> list[str]:
        """Names of the tensors that are not what they were at first."""
        return [name for name, tensor in self._into.items() if not torch.equal(tensor, self._source[name])]

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._into.values())


def follow(pipe: Connection, *given: Any) -> None:
    """Carries out orders, (name of a method, its arguments), until "end"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    weights = SyncedWeights(*given)
    pipe.send("ready")
    while (order := pipe.recv()) != "end":
        name, *arguments = order
        pipe.send(getattr(weights, name)(*arguments))


# the driver -----------------------------------------------------------------------------------------------------------


def ways(pool: RankPool, rollout: Outsider, bucket: int, socket: str) -> dict[str, Callable[[], Any]]:
    """What takes turns, by name; each returns once the rollout has the weights."""
    newest = pool.each(publish)[0]

    def publish_and_read() -> None:
        nonlocal newest
        newest = pool.each(publish)[0]
        rollout.ask(("read", newest.version))

    def by_checkpoint_engine() -> None:
        nonlocal newest
        newest = pool.each(publish)[0]
        rollout.ask(("by_checkpoint_engine", newest))

    def by_verl() -> None:
        rollout.pipe.send(("by_bucket",))
        pool.each(gather_and_send, socket, bucket)
        rollout.answer("by_bucket")

    return {
        "memcpy": lambda: rollout.ask(("memcpy",)),
        "odc, read": lambda: rollout.ask(("read", newest.version)),
        "odc, publish and read": publish_and_read,
        "odc, verl's checkpoint engine": by_checkpoint_engine,
        "verl, gather and bucket": by_verl,
    }


def compare(rollout: Outsider, actions: dict[str, Callable[[], Any]]) -> None:
    """Ends the program unless every way brings the same weights."""
    for name, action in actions.items():
        rollout.ask(("forget",))
        action()
        if wrong := rollout.ask(("changed",)):
            raise SystemExit(f"{name} brought other weights: {', '.join(wrong[:3])} and so on, {len(wrong)} tensors")


def rows_of(times: dict[str, list[float]], nbytes: int) -> list[dict[str, Any]]:
    """The table, the fastest first."""
    seconds = {name: median(each) for name, each in times.items()}
    return [
        {
            "way": name,
            "seconds": taken,
            "over memcpy": taken / seconds["memcpy"],
            "GB/s": nbytes / taken / 1e9,
            "least, s": min(times[name]),
            "most, s": max(times[name]),
        }
        for name, taken in sorted(seconds.items(), key=lambda one: one[1])
    ]


def checked(script: Script) -> Any:
    """The options; ends the program if they cannot be, or verl is missing."""
    given = script.given
    largest = 4 * given.hidden * max(given.words, 4 * given.hidden)
    script.need_verl()
    if given.hidden % 64:
        script.parser.error(f"--hidden must be a multiple of 64, not {given.hidden}")
    if given.bucket * MIB < largest:
        script.parser.error(f"--bucket {given.bucket}: the largest parameter has {largest / MIB:.0f} MiB in fp32")
    return given


def main() -> None:
    script = Script(
        __doc__,
        layers=(28, "of the model"),
        hidden=(1024, "elements of its hidden state"),
        words=(32_000, "of its vocabulary"),
        bucket=(512, "MiB of a bucket, of verl and of odc's checkpoint engine; holds the largest parameter in fp32"),
        rounds=(7, "of each way"),
    )
    given = checked(script)
    bucket = given.bucket * MIB
    with tempfile.TemporaryDirectory() as folder, RankPool(RANKS, timeout_s=600) as pool:
        parameters = save_model(Path(folder), given.layers, given.hidden, given.words)
        socket = f"ipc://{folder}/weights.sock"
        published = pool.each(build_engines, Path(folder), bucket)[0]
        rollout = Outsider(follow, published, bucket, socket)
        rollout.answer("the start")
        actions = ways(pool, rollout, bucket, socket)
        compare(rollout, actions)
        nbytes = rollout.ask(("nbytes",))
        rows = rows_of(in_turns(actions, given.rounds, warm=1), nbytes)
        rollout.end()
    for row in rows:
        print(f"{row['way']}: {row['seconds']:.3f} s, {row['over memcpy']:.2f} of memcpy", file=sys.stderr)
    title = f"Weights of {parameters / 1e9:.2f} billion parameters in bf16 from two ranks to one process of their host"
    script.store(
        "weight_sync",
        title,
        rows,
        MB=nbytes / 1e6,
        bucket_MiB=given.bucket,
        libraries=versions_of(("verl", "transformers")),
    )


if __name__ == "__main__":
    main()
