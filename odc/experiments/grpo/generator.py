"""Responses drawn by Hugging Face `generate`, and what every way of drawing shares: lengths, and the reference model.

A generator has two methods: `update(reader, at_least)` brings its weights up to date and returns their version,
`respond(prompts, step)` draws.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from odc.errors import ConfigError
from odc.experiments.config import GrpoConfig
from odc.experiments.grpo.samples import Response
from odc.experiments.text.model import build_model
from odc.handover import Reader

# Lengths like those of reasoning models' answers: most short, some near the cap (sigma as in odc.simulate's "grpo").
_SIGMA, _MEDIAN_SHARE = 1.0, 0.15


class ResponseSource(Protocol):
    """What the rollout process needs."""

    def update(self, reader: Reader, at_least: int) -> int:
        """Read all weights, of a version that is `at_least` or newer; returns which. Waits, and raises, as `Reader`."""

    def respond(self, prompts: Sequence[Sequence[int]], step: int) -> list[Response]:
        """`config.group` responses to each prompt, prompt after prompt; the same for the same weights and step."""


def initial_model(config: GrpoConfig, source: Path, stop_ids: Sequence[int]) -> Any:
    """The model with the ranks' initial weights, fp32; raises ConfigError if a stop token is not in its vocabulary."""
    model = build_model(source, dtype=torch.float32, seed=config.seed)
    # An attention of transformers that computes what the model defines: SDPA knows neither sinks nor capped scores.
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    model.eval().requires_grad_(False)
    model.generation_config = type(model.generation_config)()  # the checkpoint's may draw otherwise
    check_stops(stop_ids, model.config.vocab_size)
    return model


def check_stops(stop_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ConfigError if a stop token is not in the vocabulary."""
    if stop_ids and max(stop_ids) >= vocab_size:
        raise ConfigError(f"stop token {max(stop_ids)} is not in the model's vocabulary")


class Generator:
    """The rollout's own copy of the model, with the ranks' initial weights, and one to keep if there is a KL term."""

    def __init__(self, config: GrpoConfig, source: Path, stop_ids: Sequence[int]) -> None:
        self.config, self.stop_ids = config, list(stop_ids)
        self.model = initial_model(config, source, self.stop_ids)
        self._reference = ReferenceModel(copy.deepcopy(self.model)) if config.kl else None

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The copy's own tensors by name, to be filled."""
        own = self.model.state_dict()
        return {name: own[name] for name in names}

    def update(self, reader: Reader, at_least: int) -> int:
        return reader.read(self.weights(list(reader.shapes())), at_least=at_least).version

    @torch.no_grad()
    def respond(self, prompts: Sequence[Sequence[int]], step: int) -> list[Response]:
        rows = [list(prompt) for prompt in prompts for _ in range(self.config.group)]
        ids, mask = _padded(rows, "left")
        torch.manual_seed(int(np.random.SeedSequence([self.config.seed, step]).generate_state(1)[0]))
        drawn = drawn_lengths(self.config, len(rows), step)
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
        responses = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
        reference = None if self._reference is None else self._reference.score(rows, responses)
        return [
            Response(response, scores[i, : len(response)].tolist(), None if reference is None else reference[i])
            for i, response in enumerate(responses)
        ]

    def _length(self, row: list[int]) -> int:
        stops = [at for at, token in enumerate(row) if token in self.stop_ids]
        return stops[0] + 1 if stops else len(row)


class ReferenceModel:
    """The initial model, which stays as it is."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[list[float]]:
        """Log-probabilities of the tokens of each response to the prompt of its number."""
        ids, mask = _padded(prompts, "left")
        tokens, attended = _padded(responses, "right")
        whole, mask = torch.cat([ids, tokens], 1), torch.cat([mask, attended], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._model(input_ids=whole, attention_mask=mask, position_ids=positions).logits
        logits = logits[:, ids.shape[1] - 1 : -1].float()
        scores = logits.log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
        return [scores[i, : len(response)].tolist() for i, response in enumerate(responses)]


def drawn_lengths(config: GrpoConfig, count: int, step: int) -> list[int] | None:
    """Lengths at which `count` responses of a step are cut, whatever draws them; None where the model ends them."""
    if config.lengths == "model":
        return None
    longest = config.response_tokens
    draw = np.random.default_rng([config.seed, step, 1]).lognormal(0.0, _SIGMA, count)
    return [int(length) for length in np.clip(draw * _MEDIAN_SHARE * longest, 1, longest)]


def _padded(rows: Sequence[Sequence[int]], side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """int64 ids and mask [rows, longest], with zeros on this side of the shorter rows."""
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    return pad_sequence(ids, True, padding_side=side), pad_sequence(mask, True, padding_side=side)
