"""The rollout process, `python -m odc.experiments.grpo.worker FD`: it draws responses with its own copy of the model.

It gets everything over the socket FD, and ends when that closes. It returns the log-probabilities of the
distribution that was sampled (temperature 1, no cut-off); cached decoding makes the first ratio 1 only to about 1e-5.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odc.errors import ConfigError, PeerLostError
from odc.experiments.config import GrpoConfig, threads_per_rank
from odc.experiments.grpo.samples import Response
from odc.experiments.preflight import model_source
from odc.experiments.text.model import build_model
from odc.handover import Reader

# Lengths like those of reasoning models' answers: most short, some near the cap (sigma as in odc.simulate's "grpo").
_SIGMA, _MEDIAN_SHARE = 1.0, 0.15


def _own_attention(model: Any) -> str:
    """An attention of transformers that computes what the model defines: SDPA knows neither sinks nor capped scores."""
    return "sdpa" if model._supports_sdpa else "eager"


class Generator:
    """The rollout's own copy of the model, with the ranks' initial weights, and one to keep if there is a KL term."""

    def __init__(self, config: GrpoConfig, source: Path, stop_ids: Sequence[int]) -> None:
        self.config, self.stop_ids = config, list(stop_ids)
        self.model = build_model(source, dtype=torch.float32, seed=config.seed)
        self.model.set_attn_implementation(_own_attention(self.model))
        self.model.eval().requires_grad_(False)
        if self.stop_ids and max(self.stop_ids) >= self.model.config.vocab_size:
            raise ConfigError(f"stop token {max(self.stop_ids)} is not in the model's vocabulary")
        self._reference = copy.deepcopy(self.model) if config.kl else None

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The copy's own tensors by name, to be filled."""
        own = self.model.state_dict()
        return {name: own[name] for name in names}

    @torch.no_grad()
    def respond(self, prompts: Sequence[Sequence[int]], step: int) -> list[Response]:
        """`config.group` responses to each prompt, prompt after prompt; the same for the same weights and step."""
        rows = [list(prompt) for prompt in prompts for _ in range(self.config.group)]
        ids, mask = _left_padded(rows)
        torch.manual_seed(int(np.random.SeedSequence([self.config.seed, step]).generate_state(1)[0]))
        drawn = self._drawn_lengths(len(rows), step)
        made: Any = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.config.response_tokens if drawn is None else max(drawn),
            eos_token_id=self.stop_ids if drawn is None and self.stop_ids else None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = made.sequences[:, ids.shape[1] :]
        scores = torch.stack(made.logits, 1).float().log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
        lengths = drawn or [self._length(row) for row in tokens.tolist()]
        reference = self._score(ids, mask, tokens, lengths) if self._reference is not None else None
        return [
            Response(
                tokens[i, :length].tolist(),
                scores[i, :length].tolist(),
                reference[i, :length].tolist() if reference is not None else None,
            )
            for i, length in enumerate(lengths)
        ]

    def _length(self, row: list[int]) -> int:
        stops = [at for at, token in enumerate(row) if token in self.stop_ids]
        return stops[0] + 1 if stops else len(row)

    def _drawn_lengths(self, count: int, step: int) -> list[int] | None:
        if self.config.lengths == "model":
            return None
        longest = self.config.response_tokens
        draw = np.random.default_rng([self.config.seed, step, 1]).lognormal(0.0, _SIGMA, count)
        return [int(length) for length in np.clip(draw * _MEDIAN_SHARE * longest, 1, longest)]

    def _score(self, ids: Tensor, mask: Tensor, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """fp32 [rows, new tokens]: log-probabilities under the initial model; meaningless from each length on."""
        assert self._reference is not None
        seen = torch.arange(tokens.shape[1])[None] < torch.tensor(lengths)[:, None]
        whole = torch.cat([ids, tokens.clamp(min=0)], 1)
        attended = torch.cat([mask, seen.to(mask.dtype)], 1)
        positions = (attended.cumsum(1) - 1).clamp(min=0)
        logits = self._reference(input_ids=whole, attention_mask=attended, position_ids=positions).logits
        logits = logits[:, ids.shape[1] - 1 : -1].float()
        scores: Tensor = logits.log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
        return scores


def _left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """int64 ids and mask [rows, longest]."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def answer(generator: Generator, reader: Reader | None, request: dict[str, Any]) -> dict[str, Any]:
    """Brings the weights up to date, by reading them or from the request, and draws the responses asked for."""
    version = None
    if reader is not None:
        version = reader.read(generator.weights(list(reader.shapes())), at_least=request["at_least"]).version
    else:
        own = generator.weights(list(request["weights"]))
        for name, value in request["weights"].items():
            own[name].copy_(torch.from_numpy(value))
    return {"version": version, "responses": generator.respond(request["prompts"], request["step"])}


def serve(channel: Connection) -> None:
    """Answers requests until the channel closes; errors are sent, not raised."""
    try:
        first: dict[str, Any] = channel.recv()
        config = first["config"]
        torch.set_num_threads(threads_per_rank(config.ranks + 1))
        generator = Generator(config, model_source(config.model), first["stop_ids"])
        reader = Reader(first["handle"], timeout_s=config.timeout_s, tries=64) if first["handle"] else None
        while True:
            channel.send(answer(generator, reader, channel.recv()))
    except EOFError:
        return
    except Exception as error:
        lost = error.culprit if isinstance(error, PeerLostError) else None
        text = f"{type(error).__name__}: {error}"
        channel.send({"error": text, "traceback": traceback.format_exc(), "lost": lost})


if __name__ == "__main__":
    from transformers.utils import logging as messages

    messages.set_verbosity_error()
    with Connection(int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)  # rank 0 is gone; no process is left that would read it
