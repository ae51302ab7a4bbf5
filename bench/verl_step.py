"""verl's update of the actor on four ranks and long-tailed answers: odc against fsdp2, with *emulated* compute.

`OMP_NUM_THREADS=1 python -m bench.verl_step --results bench/results`, in an environment that has verl.

Steps are those of verl's own engines, arranged as verl's trainer and worker do it: all answers of a step are dealt to
the ranks by verl's `get_seqlen_balanced_partitions`, equally many to each; a rank cuts its rows into minibatches in
that order; `train_batch` runs each with dynamic microbatches, optimizer included. What comes before in a step
(answers, rewards, log-probabilities) is the same under every strategy and left out.

The model is tiny, does not attend, and computes one token in SHARE, by whose number all lengths and caps are divided;
verl's and odc's cost functions are given whole lengths. In place of the rest a microbatch sleeps for as long as the
cost curve of a 7B model gives, scaled down; its layers share that, a third in forward and two in backward.
Prompts are all of one length; those of answers are "grpo" of `odc.simulate.lengths`: lognormal, sigma 1, cut at 8192.

A case is a number of minibatches that a step's answers make. `control` has equal rows: what is left there is the cost
of communication on this machine, and no gain of balancing.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.script import Script
from bench.slept import COST, Slept
from odc.balance import quadratic
from odc.bench.ranks import RankPool, held
from odc.provenance import versions_of
from odc.simulate.lengths import NAMED

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the engines are built as in the tests

RANKS, LAYERS = 4, 2
SHARE = 8  # tokens of a row for which the model computes one
LENGTHS = NAMED["grpo"]
#: Arms by name: verl's strategy, options of verl's engine, and of odc's.
ARMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fsdp2": ("fsdp2", {}, {}),
    "fsdp2, reshard_after_forward=false": ("fsdp2", {"reshard_after_forward": False}, {}),
    "odc, rebalance=false": ("odc", {}, {"rebalance": False}),
    "odc": ("odc", {}, {}),
}
CONTROLLED = ("fsdp2", "odc")
Dealt = list[list[list[int]]]  # lengths of rows, by rank and minibatch


def save_model(folder: Path) -> None:
    """A Qwen2 of LAYERS layers with random weights, and a tokenizer."""
    from support.verl import save_tiny_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=save_tiny_tokenizer(folder), num_key_value_heads=2, tie_word_embeddings=False, **sizes
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def whole(tokens: float) -> int:
    """The next multiple of SHARE."""
    return -(-int(tokens) // SHARE) * SHARE


def deal(lengths: Sequence[int], minibatches: int) -> Dealt:
    """The rows as verl 0.9's trainer deals them to ranks, and as its worker cuts them into minibatches."""
    from support.verl import import_verl

    theirs = import_verl("verl.utils.seqlen_balancing")
    give_whole_lengths()
    workload = theirs.calculate_workload(torch.tensor(lengths) // SHARE)
    parts = theirs.get_seqlen_balanced_partitions(workload, k_partitions=RANKS, equal_size=True)
    size = len(lengths) // RANKS // minibatches
    return [[[lengths[i] for i in part[at : at + size]] for at in range(0, len(part), size)] for part in parts]


# on the ranks ---------------------------------------------------------------------------------------------------------


def no_attention(module: Any, query: Any, key: Any, value: Any, *unused: Any, **options: Any) -> tuple[Any, None]:
    """In place of attention, whose time is slept; all three get gradients. From and to [rows, heads, tokens, d]."""
    return (query + key + value).transpose(1, 2), None


def give_whole_lengths() -> None:
    """Let the functions by which verl and odc cut microbatches weigh rows as if all their tokens were there."""
    from verl.utils import seqlen_balancing as theirs

    from odc.integrations.verl import seqlen_balancing as ours

    if not hasattr(theirs.calculate_workload, "__wrapped__"):
        of_whole = theirs.calculate_workload
        theirs.calculate_workload = wraps(of_whole)(lambda lengths: of_whole(SHARE * lengths))
        ours.VERL_WORKLOAD = quadratic(24576 * SHARE, SHARE**2)


def build_engines(folder: Path) -> None:
    """An engine for each arm. Every rank calls it."""
    from support.verl import join_as_verl
    from support.verl_engine import build
    from transformers import AttentionInterface

    join_as_verl(dist.get_rank(), dist.get_world_size())
    AttentionInterface.register("slept", no_attention)
    give_whole_lengths()
    model = {"use_remove_padding": True, "override_config": {"attn_implementation": "slept"}}
    held.engines = {}
    for arm, (strategy, options, odc) in ARMS.items():
        engine = build(folder, strategy, odc=odc, of_model=model, **options)
        engine._cost = lambda length: COST(SHARE * length)  # odc takes it from the model
        held.engines[arm] = SleepingEngine(engine)


class SleepingEngine:
    """An engine of verl whose layers sleep: `scale` seconds for a unit of the rows' cost, counted in `slept`."""

    def __init__(self, engine: Any) -> None:
        from odc.integrations.verl.seqlen_balancing import row_lengths

        self.engine, self.scale, self.slept, self._now = engine, 0.0, 0.0, 0.0
        step = engine.forward_step

        def forward_step(micro_batch: Any, **options: Any) -> Any:
            self._now = self.scale * sum(COST(SHARE * length) for length in row_lengths(micro_batch))
            self.slept += self._now
            return step(micro_batch, **options)

        engine.forward_step = forward_step
        for layer in engine.module.model.layers:
            layer.mlp.register_forward_hook(lambda module, given, output: Slept.apply(output, self._now / LAYERS, 0))

    def train(self, minibatches: list[list[int]], cap: int) -> tuple[float, float, int]:
        """One step: seconds, seconds slept, and microbatches. Every rank calls it."""
        from support.verl_engine import loss_with_metrics, rows

        self.slept = 0.0
        self.engine.computed.clear()
        data = [
            rows(
                [length // SHARE for length in lengths],
                number * 100,
                packed=True,
                use_dynamic_bsz=True,
                max_token_len_per_gpu=cap // SHARE,
            )
            for number, lengths in enumerate(minibatches)
        ]
        dist.barrier()
        begin = time.perf_counter()
        with self.engine.train_mode():
            for minibatch in data:
                self.engine.train_batch(minibatch, loss_with_metrics)
        return time.perf_counter() - begin, self.slept, len(self.engine.computed)


def train(arm: str, dealt: Dealt, scale: float, cap: int) -> tuple[float, float, int]:
    """As `SleepingEngine.train`, of this rank's rows. Every rank calls it."""
    engine = held.engines[arm]
    engine.scale = scale
    found: tuple[float, float, int] = engine.train(dealt[dist.get_rank()], cap)
    return found


# the driver -----------------------------------------------------------------------------------------------------------


def measure(pool: RankPool, arms: Sequence[str], steps: Sequence[Dealt], seconds: float, cap: int) -> dict[str, Any]:
    """(slowest rank's seconds, mean slept, microbatches by rank) of each step, by arm; the mean rank sleeps `seconds`.

    Arms take turns, after a step without sleep.
    """
    found: dict[str, list[Any]] = {arm: [] for arm in arms}
    for number, dealt in enumerate([steps[0], *steps]):
        cost = sum(COST(length) for rank in dealt for lengths in rank for length in lengths)
        scale = seconds * RANKS / cost if number else 0.0
        for arm in arms:
            times, slept, counts = zip(*pool.each(train, arm, dealt, scale, cap), strict=True)
            if number:
                found[arm].append((max(times), mean(slept), "/".join(map(str, counts))))
                print(f"{arm}: {max(times):.2f} s, {found[arm][-1][2]}", file=sys.stderr, flush=True)
    return found


def rows_of(minibatches: int, rows: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The table's rows of one case, the fastest first."""
    seconds = {arm: sum(one for one, *_ in steps) for arm, steps in found.items()}
    rival = min(taken for arm, taken in seconds.items() if arm.startswith("fsdp2"))
    return [
        {
            "minibatches a step": minibatches,
            "rows a rank and minibatch": rows // minibatches,
            "arm": arm,
            "step, s": taken / len(found[arm]),
            "fsdp2 / this": seconds["fsdp2"] / taken,
            "best of fsdp2 / this": rival / taken,
            "bubble": 1 - sum(slept for _, slept, _ in found[arm]) / taken,
            "microbatches of the first step": found[arm][0][2],
        }
        for arm, taken in sorted(seconds.items(), key=lambda one: one[1])
    ]


def checked(script: Script) -> Any:
    """The options; ends the program if they cannot be, or verl is missing."""
    given = script.given
    script.need_verl()
    for count in given.minibatches:
        if given.rows % count:
            script.parser.error(f"--minibatches {count} does not divide --rows {given.rows}")
    if given.cap < (longest := whole(given.prompt + LENGTHS.longest)):
        script.parser.error(f"--cap {given.cap} must hold the longest row, {longest} tokens")
    return given


def main() -> None:
    script = Script(
        __doc__,
        rows=(32, "of a rank and step"),
        minibatches=([8, 4, 1], "of a step: cases"),
        steps=(2, "of each arm and case"),
        seconds=(5.0, "that the mean rank sleeps in a step"),
        prompt=(256, "tokens"),
        cap=(16_384, "tokens of a microbatch, verl's default of ppo_max_token_len_per_gpu"),
        seed=(0, "of the lengths"),
    )
    given = checked(script)
    draw, count = np.random.default_rng(given.seed), given.rows * RANKS
    drawn = [[whole(given.prompt + length) for length in LENGTHS.draw(count, draw)] for _ in range(given.steps)]
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, RankPool(RANKS, timeout_s=1200) as pool:
        save_model(Path(folder))
        pool.each(build_engines, Path(folder))
        equal = deal([whole(given.prompt + LENGTHS.mean)] * count, given.minibatches[0])
        control = measure(pool, CONTROLLED, [equal], given.seconds, given.cap)
        for minibatches in given.minibatches:
            steps = [deal(lengths, minibatches) for lengths in drawn]
            table += rows_of(minibatches, given.rows, measure(pool, list(ARMS), steps, given.seconds, given.cap))
    script.store(
        "verl_step",
        f"verl's update of the actor on {RANKS} ranks, long-tailed answers, compute emulated",
        table,
        control={arm: steps[0][0] for arm, steps in control.items()},
        lengths=f"lognormal, sigma {LENGTHS.sigma:g}, cut at {LENGTHS.longest}, mean {LENGTHS.mean:g}",
        prompt=given.prompt,
        cap=given.cap,
        slept_s=given.seconds,
        libraries=versions_of(("verl", "transformers")),
    )


if __name__ == "__main__":
    main()
