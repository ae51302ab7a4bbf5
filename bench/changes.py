"""Fine-tuning on two hosts, which read each other's shards whole or as their changes: bytes and seconds of a step.

Run as root, as `OMP_NUM_THREADS=1 python -m bench.changes --results bench/results`, on a machine with nothing else to
do (a quarter of an hour on two cores). Hosts are network namespaces of this machine; both ends of the link are limited
by `tbf`.

A Qwen2 of 36M parameters, in bf16 with fp32 shards, is trained on the sources of Python's standard library: first some
steps at a high rate, then at each rate of the table, by AdamW. Every arm trains a model of its own, and all take their
steps in turn. `whole` is Settings(changes="off"), which reads every shard anew; `changes` packs always, `auto` where it
expects to be faster, and `int8` packs always and has sums cross by sums_dtype="int8". `alone` is what a rank computes
in a step, by plain torch: no parameter, gradient or sum leaves it. What an arm takes beyond `alone` is its exchange.
`lora` trains adapters of rank 16 alone, beside `lora-whole`; `lora-int8` has sums cross as `int8` does. Their model has
two layers of Qwen2.5-1.5B's shape and 100M parameters: the wider a model, the less of it are adapters.

With `--demo` only `whole`, `changes` and `auto` train, the model of `odc compare --demo`; it is stored as changes_demo.

"weights" are the bytes that a host sends in the step less those of the sums, where those cross in fp32.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.script import Script
from odc import Settings, fully_shard

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the hosts are those of the tests

RATES = (1e-6, 1e-5, 1e-4)
ARMS = ("whole", "changes", "auto", "int8", "alone")
DEMO = ARMS[:3]
LORA = ("lora-whole", "lora", "lora-int8")
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}
LORA_SHAPE = SHAPE | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
HIGH_RATE, _RANK = 1e-3, 16
_BEFORE = 9  # steps at a rate that are not measured: `auto` looks at every unit anew within eight
_made: dict[str, Trained] = {}  # of this process, by arm


def demo_shape() -> dict[str, Any]:
    """That of the demo's model, for the words of `text`."""
    from odc.experiments.text.model import config_of, shipped_config

    config = config_of(shipped_config("qwen2-demo"))
    return {key: config.get(key, value) for key, value in SHAPE.items()} | {"vocab_size": SHAPE["vocab_size"]}


def qwen2(shape: dict[str, Any] = SHAPE) -> Any:
    """A model of this shape, with the same weights in every arm."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**shape))


class Trained:
    """One arm's model, trained on text that depends on the step and the rank."""

    def __init__(
        self, arm: str, ids: torch.Tensor, tokens: int, address: str = "", shape: dict[str, Any] = SHAPE
    ) -> None:
        lora = arm.startswith("lora")
        self.model: Any = qwen2(LORA_SHAPE if lora else shape)
        if lora:
            from peft import LoraConfig, get_peft_model

            targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            self.model = get_peft_model(self.model, LoraConfig(r=_RANK, target_modules=targets)).base_model.model
        self._ids, self._tokens, self._step = ids, tokens, 0
        changes: Any = {"whole": "off", "lora-whole": "off", "changes": "on", "int8": "on"}.get(arm, "auto")
        sums: Any = "int8" if arm.endswith("int8") else "accumulator"
        settings = Settings(
            changes=changes, sums_dtype=sums, trace=False, check_protocol=False, engine="sockets", address=address
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (*self.model.model.layers, self.model):
            fully_shard(layer, settings=settings, mp_policy=policy)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, HIGH_RATE)
        self.sums = 4 * sum(parameter.numel() for parameter in trained)
        self.whole = 2 * sum(parameter.numel() for parameter in self.model.parameters())

    def step(self, rate: float, rank: int, world: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        at = (self._step * world + rank) * self._tokens % (len(self._ids) - self._tokens - 1)
        batch = self._ids[at : at + self._tokens + 1].unsqueeze(0).long()
        self._update(batch)
        self._step += 1

    def _update(self, batch: torch.Tensor) -> None:
        """`batch` is int64 [1, tokens]."""
        with self.model.minibatch():
            self.model.set_is_last_backward(True)
            self.model(input_ids=batch, labels=batch).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class Alone(Trained):
    """What a rank computes of a step: the model in bf16 by plain torch, and AdamW on its share of each parameter."""

    def __init__(self, world: int, ids: torch.Tensor, tokens: int) -> None:
        self.model = qwen2().bfloat16()
        self._ids, self._tokens, self._step = ids, tokens, 0
        self.sums = self.whole = 0
        self._shares = [
            (parameter, torch.nn.Parameter(parameter.detach().view(-1)[: -(-parameter.numel() // world)].float()))
            for parameter in self.model.parameters()
        ]
        self._optimizer = torch.optim.AdamW([share for _, share in self._shares], HIGH_RATE)

    def _update(self, batch: torch.Tensor) -> None:
        self.model(input_ids=batch, labels=batch).loss.backward()
        for parameter, share in self._shares:
            assert parameter.grad is not None
            share.grad = parameter.grad.view(-1)[: share.numel()].float()
        self._optimizer.step()
        for parameter, share in self._shares:
            parameter.detach().view(-1)[: share.numel()].copy_(share.detach())
            parameter.grad = None


def build(
    rank: int, world: int, arm: str, ids: torch.Tensor, tokens: int, steps: int, shape: dict[str, Any]
) -> tuple[int, int]:
    """Make an arm and train it at the high rate; returns bytes of its parameters in bf16, and of its sums in fp32."""
    made = _made[arm] = Alone(world, ids, tokens) if arm == "alone" else Trained(arm, ids, tokens, shape=shape)
    for _ in range(steps):
        made.step(HIGH_RATE, rank, world)
    dist.barrier()
    return made.whole, made.sums


def measure(rank: int, world: int, arm: str, rate: float) -> tuple[float, float]:
    """Seconds of a step from barrier to barrier, and seconds that this rank's threads computed."""
    dist.barrier()
    computed, begin = time.process_time(), time.perf_counter()
    _made[arm].step(rate, rank, world)
    dist.barrier()
    return time.perf_counter() - begin, time.process_time() - computed


def text() -> torch.Tensor:
    """int32 [n]: ids of the standard library's sources, by a tokenizer trained on them."""
    from odc.experiments.data.bpe import cached_bpe
    from odc.experiments.data.sources import read_source, stdlib_source

    documents = read_source(stdlib_source())
    tokenizer = cached_bpe(documents, SHAPE["vocab_size"], Path("runs/cache"))
    return torch.cat([torch.from_numpy(tokenizer.encode(str(one.content))) for one in documents[:400]])


def rows_of(link: str, given: Any, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Every arm at every rate, over one kind of link."""
    from support.host_ranks import HostPool
    from support.hosts import Hosts

    rows: list[dict[str, Any]] = []
    with Hosts(2) as hosts:
        if link != "none":
            hosts.shape(link)  # before the first step: `auto` takes up to 64 of them to see that a link has changed
        pool = HostPool(hosts, given.per_host)
        arms = DEMO if given.demo else (*ARMS, *LORA[: 0 if given.no_lora else None])
        shape = demo_shape() if given.demo else SHAPE
        sizes = {arm: pool.run(build, arm, ids, given.tokens, given.warmup, shape)[0] for arm in arms}
        for rate in RATES:
            found: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
            for repeat in range(_BEFORE + given.repeats):
                for arm in arms:
                    before = [host.counted()[0] for host in hosts]
                    took = pool.run(measure, arm, rate)
                    out = max(host.counted()[0] - then for host, then in zip(hosts, before, strict=True))
                    if repeat >= _BEFORE:
                        found[arm].append((max(s for s, _ in took), sum(cpu for _, cpu in took), out))
            rows += [_row(link, rate, arm, found, sizes[arm]) for arm in arms]
        pool.close()
    return rows


def _row(
    link: str, rate: float, arm: str, found: dict[str, list[tuple[float, float, int]]], sizes: tuple[int, int]
) -> dict[str, Any]:
    seconds, computed, out = (median(column) for column in zip(*found[arm], strict=True))
    base = "lora-whole" if arm.startswith("lora") else "whole"
    base_s, base_cpu, base_out = (median(column) for column in zip(*found[base], strict=True))
    whole, sums = (size / 2 for size in sizes)  # half of the shards, and of the sums, are another host's
    row = {
        "link": link if link != "none" else "not limited",
        "learning rate": rate,
        "arm": arm,
        "MB out": out / 1e6,
        "out of whole": out / base_out,
        "weights of whole": max(0.0, out - sums) / whole if whole and not arm.endswith("int8") else "",
        "seconds": seconds,
        "seconds of whole": seconds / base_s,
        "CPU of whole": computed / base_cpu,
    }
    print(f"{row['link']} {rate:g} {arm}: {row['MB out']:.1f} MB, {seconds:.2f} s", file=sys.stderr, flush=True)
    return row


def main() -> None:
    script = Script(
        __doc__,
        repeats=(5, "measured steps of each arm at each rate"),
        warmup=(20, "steps at the high rate"),
        tokens=(32, "of a rank and step"),
        per_host=(1, "ranks"),
        links=("1gbit,none", "as tc has them, with commas between them"),
        no_lora=(False, "leave the LoRA arms out, which need peft"),
        demo=(False, "train the demo's model"),
    )
    ids, rows = text(), list[dict[str, Any]]()
    for link in script.given.links.split(","):
        rows += rows_of(link, script.given, ids)
    script.store(
        "changes_demo" if script.given.demo else "changes", "Hosts that read only what has changed of a shard", rows
    )


if __name__ == "__main__":
    main()
