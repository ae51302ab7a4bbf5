"""A toy multimodal model of two encoders and an LLM, its data, and one step of it, rearranged or as drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from odc.dispatch import TEXT, BalancePolicy, Phase, Records
from odc.dispatch.exchange import BACK
from odc.dispatch.orchestrator import TEXT_CHANNEL, Orchestrator, OwnPlan
from odc.dispatch.route import Route

ENCODERS = ("vision", "audio")
WIDTH, PIXELS, VOCABULARY = 8, 6, 11
POLICIES: dict[str, tuple[BalancePolicy | None, BalancePolicy | None, BalancePolicy | None]] = {
    "none": (None, None, None),
    "llm only": (None, None, BalancePolicy()),
    "all unpadded": (BalancePolicy(), BalancePolicy(), BalancePolicy(beta=0.01)),
    "all padded": (BalancePolicy("full"), BalancePolicy("full", beta=0.01), BalancePolicy("full")),
    "full": (BalancePolicy(beta=0.01), BalancePolicy("attention", beta=0.01), BalancePolicy(beta=0.01, tolerance=4)),
}


class Toy(nn.Module):
    """Encoders pool pairs of rows after attention, the LLM attends causally; both see one sequence or more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.audio = nn.Linear(PIXELS, WIDTH), nn.Linear(PIXELS, WIDTH)
        self.embed, self.llm = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, phase: str, *args: Any) -> Tensor:
        return getattr(self, f"run_{phase}")(*args)

    def run_vision(self, rows: Tensor, lengths: list[int]) -> Tensor:
        """Packed: attention by sequence."""
        hidden = torch.tanh(self.vision(rows))
        return torch.cat([pooled(attended(one)) for one in hidden.split(lengths)])

    def run_audio(self, rows: Tensor, lengths: list[int]) -> Tensor:
        """Padded: one row of the batch a sequence."""
        padded = nn.utils.rnn.pad_sequence(list(rows.split(lengths)), batch_first=True)
        hidden = torch.tanh(self.audio(padded))
        keys = torch.arange(padded.shape[1]) < torch.tensor(lengths)[:, None]
        scores = (hidden @ hidden.mT).masked_fill(~keys[:, None, :], float("-inf"))
        mixed = scores.softmax(-1) @ hidden
        return torch.cat([pooled(one[:length]) for one, length in zip(mixed, lengths, strict=True)])

    def run_embed(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def run_llm(self, rows: Tensor, labels: Tensor, lengths: list[int]) -> Tensor:
        """[sequences] sum of the losses of each."""
        losses = []
        for one, label in zip(rows.split(lengths), labels.split(lengths), strict=True):
            scores = (one @ one.T).masked_fill(torch.ones(len(one), len(one)).triu(1).bool(), float("-inf"))
            logits = self.llm(scores.softmax(-1) @ one)
            losses.append(nn.functional.cross_entropy(logits, label, ignore_index=-100, reduction="sum"))
        return torch.stack(losses)


def attended(one: Tensor) -> Tensor:
    return (one @ one.T).softmax(-1) @ one


def pooled(one: Tensor) -> Tensor:
    """Connector: every two rows one token; an odd one stays out."""
    return one[: len(one) // 2 * 2].view(-1, 2, one.shape[-1]).mean(1)


@dataclass
class Batch:
    """What one rank drew: examples as (phase, rows) parts."""

    examples: list[list[tuple[str, Tensor]]]

    @property
    def records(self) -> Records:
        shapes = [
            [(name, len(rows), len(rows) if name == TEXT else len(rows) // 2) for name, rows in parts]
            for parts in self.examples
        ]
        return Records.of(shapes, ENCODERS)  # type: ignore[arg-type]

    def rows(self, phase: str) -> Tensor:
        found = [rows for parts in self.examples for name, rows in parts if name == phase]
        empty = torch.zeros(0, dtype=torch.int64) if phase == TEXT else torch.zeros(0, PIXELS)
        return torch.cat(found) if found else empty


def draw(rank: int, seed: int) -> Batch:
    """Examples without a modality, ranks without an example, and one giant."""
    made = np.random.default_rng([seed, rank])
    count = 0 if (seed + rank) % 4 == 3 else int(made.integers(1, 5))

    def rows(name: str, length: int) -> Tensor:
        if name == TEXT:
            return torch.from_numpy(made.integers(0, VOCABULARY, length))
        return torch.from_numpy(made.standard_normal((length, PIXELS)).astype(np.float32))

    examples = []
    for i in range(count):
        names = [TEXT, *made.choice([TEXT, "vision", "audio"], int(made.integers(0, 4))).tolist()]
        made.shuffle(names)
        examples.append([(name, rows(name, int(made.integers(1, 10)))) for name in names])
        if rank == 1 and i == 0:
            examples[-1].append(("audio" if seed % 2 else "vision", rows("audio", 120)))
    return Batch(examples)


Forward = Callable[..., Tensor]
Into = Callable[[], None]


def backward(loss: Tensor, gradient: Tensor | None, into: Into) -> None:
    loss.backward(gradient)
    into()


def step_as_drawn(model: Forward, batch: Batch, each: bool, into: Into) -> list[float]:
    """Losses of a rank's own examples; `into` is called after every backward. `each`: one example per forward."""
    groups = [[example] for example in batch.examples] if each else [batch.examples] if batch.examples else []
    losses: list[float] = []
    for group in groups:
        encoded: dict[str, list[Tensor]] = {}
        runs_of: list[tuple[Tensor, Tensor]] = []
        for name in ENCODERS:
            parts = [rows for example in group for phase, rows in example if phase == name]
            runs = [[part] for part in parts] if each else [parts] if parts else []
            outs = [model(name, torch.cat(run), [len(part) for part in run]) for run in runs]
            tokens = [len(part) // 2 for part in parts]
            cut = [out.detach().requires_grad_() for out in outs]
            runs_of += zip(outs, cut, strict=True)
            encoded[name] = list(torch.cat(cut).split(tokens)) if outs else []
        rows, labels, lengths = [], [], []
        for example in group:
            sequence: list[Tensor] = []
            ids = [part for phase, part in example if phase == TEXT]
            texts = list(model("embed", torch.cat(ids)).split([len(part) for part in ids]))
            for phase, part in example:
                sequence.append(texts.pop(0) if phase == TEXT else encoded[phase].pop(0))
                labels.append(part if phase == TEXT else torch.full((len(sequence[-1]),), -100))
            rows.append(torch.cat(sequence))
            lengths.append(len(rows[-1]))
        loss = model("llm", torch.cat(rows), torch.cat(labels), lengths)
        losses += loss.tolist()
        backward(loss.sum(), None, into)
        for out, leaf in runs_of:
            backward(out, leaf.grad, into)
    return losses


def moved(orchestrator: Orchestrator, plan: OwnPlan, channel: str, route: Route, rows: Tensor) -> Tensor:
    return orchestrator.exchange.move(plan.step, channel, route, {"rows": rows})["rows"]


def step_rearranged(
    model: Forward, orchestrator: Orchestrator, plan: OwnPlan, batch: Batch, each: bool, into: Into
) -> list[float]:
    """Losses of the examples that the LLM sees here."""
    outputs, leaves, runs = {}, {}, []
    for name in ENCODERS:
        whole = plan.whole.encoders[name]
        inbound = Route.of(whole.inbound, {"rows": whole.lengths}, plan.me)
        given = moved(orchestrator, plan, f"{name}.in", inbound, batch.rows(name))
        lengths = plan.encoder_lengths(name).tolist()
        pieces = given.split(lengths) if lengths else ()
        groups = [[piece] for piece in pieces] if each else [list(pieces)] if lengths else []
        outs = [model(name, torch.cat(group), [len(piece) for piece in group]) for group in groups]
        cut = [out.detach().requires_grad_() for out in outs]
        runs.append((outs, cut))
        output = torch.cat(cut) if cut else torch.zeros(0, WIDTH)
        arrived = moved(orchestrator, plan, f"{name}.out", plan.outbound[name], output.detach())
        outputs[name], leaves[name] = output, arrived.requires_grad_()
    text = moved(orchestrator, plan, TEXT_CHANNEL, plan.text, batch.rows(TEXT))
    order = torch.from_numpy(plan.interleaving)
    labels = torch.cat([text, *(torch.full((len(leaf),), -100) for leaf in leaves.values())])[order]
    lengths = plan.lengths.tolist()
    losses: list[float] = []
    for i in range(len(lengths)) if each else range(min(1, len(lengths))):
        chosen = slice(sum(lengths[:i]), sum(lengths[: i + 1])) if each else slice(None)
        # Embeddings of all text here, of which an example takes its own: the rest gets no gradient from it.
        rows = torch.cat([model("embed", text), *leaves.values()])[order]
        loss = model("llm", rows[chosen], labels[chosen], lengths[i : i + 1] if each else lengths)
        losses += loss.tolist()
        backward(loss.sum(), None, into)
    for name in reversed(ENCODERS):
        leaf = leaves[name]
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        gradient = moved(orchestrator, plan, f"{name}.out{BACK}", plan.outbound[name].inverse, gradient)
        if outputs[name].requires_grad:
            outputs[name].backward(gradient)
    for outs, cut in runs:
        for out, leaf in zip(outs, cut, strict=True):
            backward(out, leaf.grad, into)
    return losses


def phases(policies: str) -> tuple[list[Phase], Phase]:
    vision, audio, llm = POLICIES[policies]
    return [Phase("vision", vision, bytes_in=24, bytes_out=32), Phase("audio", audio)], Phase("llm", llm, bytes_in=8)
