"""Training on two hosts with sums of gradients that cross whole, in fp32, and as int8: losses, and bytes of a step.

Run as root, as `OMP_NUM_THREADS=1 python -m bench.int8_sums --results bench/results` (twelve minutes a seed on two
cores). Hosts are network namespaces of this machine, with real ranks on them.

Two models are trained by AdamW on the sources of Python's standard library: that of `odc compare --demo`, and a Qwen2
of 36M parameters; the learning rate rises for a twentieth of the steps and falls to zero along a cosine. The arms of a
model begin with the same weights and take the same tokens, in fp32, and take their steps in turn. Trainings that differ
in one bit part in time, so a distance means something only beside that of a control: "fp32, nudged" has fp32 sums, and
weights that differ by 1e-6 at the beginning. (At a constant rate, the losses of 50 steps of two such trainings of the
larger model differ by up to two thousandths, which hides what int8 does.) "Mean distance" compares the means of 50
steps each. Shards cross whole in every step, and "sums MB" are what a host sends less those, with all headers.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from bench.changes import SHAPE, demo_shape, text
from bench.script import Script
from odc import Settings, fully_shard

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the hosts are those of the tests

ARMS = {"fp32": "accumulator", "int8": "int8", "fp32, nudged": "accumulator"}
_COLOURS = {"fp32": "#27496d", "int8": "#d8431f", "fp32, nudged": "#e6ab02"}
_NUDGE = 1e-6  # relative, of every weight of the control
_LAST, _TURN, _SMOOTH = 50, 10, 25  # steps of the mean at the end, of each arm in turn, of a point in the picture
_made: dict[str, _Training] = {}  # of this process, by arm


class _Training:
    """One arm of a model."""

    def __init__(
        self, arm: str, shape: dict[str, Any], ids: torch.Tensor, tokens: int, steps: int, rate: float, seed: int
    ) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM, get_cosine_schedule_with_warmup

        torch.manual_seed(seed)
        self._model: Any = Qwen2ForCausalLM(Qwen2Config(**shape))
        self._ids, self._tokens, self._step, self._seed = ids, tokens, 0, seed
        if arm.endswith("nudged"):
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter.mul_(1 + _NUDGE * torch.randn_like(parameter))
        sums: Any = ARMS[arm]
        settings = Settings(sums_dtype=sums, changes="off", trace=False, check_protocol=False, engine="sockets")
        for layer in (*self._model.model.layers, self._model):
            fully_shard(layer, settings=settings)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), rate, betas=(0.9, 0.95))
        self._rate = get_cosine_schedule_with_warmup(self._optimizer, steps // 20, steps)
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())

    def step(self, rank: int, world: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed((self._seed << 32) + self._step * world + rank)
        at = int(torch.randint(len(self._ids) - self._tokens, (), generator=draw))
        batch = self._ids[at : at + self._tokens + 1].unsqueeze(0).long()
        with self._model.minibatch():
            self._model.set_is_last_backward(True)
            loss: torch.Tensor = self._model(input_ids=batch, labels=batch).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._rate.step()
        self._optimizer.zero_grad()
        self._step += 1
        return loss.detach()


def build(rank: int, world: int, arm: str, *given: Any) -> int:
    """Make an arm; returns its parameters."""
    _made[arm] = _Training(arm, *given)
    dist.barrier()
    return _made[arm].parameters


def train(rank: int, world: int, arm: str, steps: int) -> tuple[list[float], float]:
    """Mean loss over all ranks of each of some steps; processor seconds of this rank in them."""
    begin = time.process_time()
    losses = torch.stack([_made[arm].step(rank, world) for _ in range(steps)])
    computed = time.process_time() - begin
    dist.all_reduce(losses)
    return (losses / world).tolist(), computed


def curves(name: str, shape: dict[str, Any], seed: int, given: Any, ids: torch.Tensor, steps: int) -> tuple[Any, Any]:
    """Losses of each arm, step by step; the rows of the table."""
    from support.host_ranks import HostPool
    from support.hosts import Hosts

    losses: dict[str, list[float]] = {arm: [] for arm in ARMS}
    sent: dict[str, list[float]] = {arm: [] for arm in ARMS}
    computed = dict.fromkeys(ARMS, 0.0)
    with Hosts(2) as hosts:
        pool = HostPool(hosts, given.per_host)
        for arm in ARMS:
            parameters = pool.run(build, arm, shape, ids, given.tokens, steps, given.rate, seed)[0]
        while len(losses["fp32"]) < steps:
            turn = min(_TURN, steps - len(losses["fp32"]))
            for arm in ARMS:
                before = [host.counted()[0] for host in hosts]
                found = pool.run(train, arm, turn)
                out = max(host.counted()[0] - then for host, then in zip(hosts, before, strict=True))
                losses[arm] += found[0][0]
                sent[arm].append(out / turn)
                computed[arm] += sum(cpu for _, cpu in found)
            print(
                f"{name}, seed {seed}: {len(losses['fp32'])} steps, {losses['fp32'][-1]:.4f}",
                file=sys.stderr,
                flush=True,
            )
        pool.close()
    mean = {arm: fmean(found[-_LAST:]) for arm, found in losses.items()}
    rows = [
        {
            "model": f"{name}, {parameters / 1e6:.1f}M",
            "seed": seed,
            "sums": arm,
            "steps": len(losses[arm]),
            "first loss": losses[arm][0],
            f"mean loss of the last {_LAST}": mean[arm],
            "of fp32": mean[arm] / mean["fp32"] - 1,
            "mean distance": _distance(losses["fp32"], losses[arm]),
            "MB out": median(sent[arm]) / 1e6,
            "sums MB": (median(sent[arm]) - 2 * parameters) / 1e6,  # half of the shards are another host's
            "bytes an element": (median(sent[arm]) - 2 * parameters) / (parameters / 2),
            "CPU s a step": computed[arm] / len(losses[arm]),
        }
        for arm in ARMS
    ]
    return losses, rows


def _distance(reference: list[float], losses: list[float]) -> float:
    """Relative, of the means of steps one after the other; the mean of it over all of them."""
    pairs = [(fmean(reference[at : at + _LAST]), fmean(losses[at : at + _LAST])) for at in range(0, len(losses), _LAST)]
    return fmean(abs(mine / theirs - 1) for theirs, mine in pairs)


def draw(path: Path, found: dict[str, list[dict[str, list[float]]]]) -> None:
    """Loss curves of each model's first seed above, the distance of each seed from fp32 below; means of `_SMOOTH`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0 * len(found), 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    columns = figure.subplots(2, len(found), squeeze=False, sharex="col", height_ratios=(3, 2))
    for (name, seeds), (upper, lower) in zip(found.items(), columns.T, strict=True):
        steps = range(_SMOOTH, len(seeds[0]["fp32"]) + 1)
        for seed, losses in enumerate(seeds):
            means = {arm: [fmean(curve[at - _SMOOTH : at]) for at in steps] for arm, curve in losses.items()}
            for number, (arm, curve) in enumerate(means.items()):  # those that coincide show below each other
                colour, label = _COLOURS[arm], f"sums in {arm}"
                if not seed:
                    upper.plot(steps, curve, color=colour, linewidth=4 - 1.5 * number, label=label)
                if arm != "fp32":
                    gaps = [100 * (mine / theirs - 1) for theirs, mine in zip(means["fp32"], curve, strict=True)]
                    lower.plot(steps, gaps, color=colour, linewidth=1.2, linestyle=("-", "--", ":")[seed % 3])
        upper.set(title=name, ylabel=f"loss, mean of {_SMOOTH} steps")
        lower.set(xlabel="optimizer step", ylabel="distance from fp32, %", title="a line for each seed")
        upper.legend(frameon=False)
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    script = Script(
        __doc__,
        steps=(1000, "of the demo's model"),
        large_steps=(300, "of the larger model"),
        tokens=(64, "of a rank and step"),
        rate=(3e-4, "learning rate, at its highest"),
        per_host=(1, "ranks"),
        seeds=(3, "of the weights and of the order of the text, from 0 on"),
    )
    given, ids = script.given, text()
    models = (("demo", demo_shape(), given.steps), ("larger", SHAPE, given.large_steps))
    found, rows = dict[str, list[Any]](), list[dict[str, Any]]()
    for (name, shape, steps), seed in itertools.product(models, range(given.seeds)):
        if steps:
            losses, some = curves(name, shape, seed, given, ids, steps)
            found.setdefault(name, []).append(losses)
            rows += some
            script.store("int8_sums", "Sums of gradients in fp32 and in int8 between hosts", rows, losses=found)
            draw(given.results / "int8_sums.png", found)


if __name__ == "__main__":
    main()
