"""The room of a job's exchange, against the minibatches that its sampler draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_multimodal import CONFIG, write_examples

from odc.experiments.data.dataset import MinibatchSampler
from odc.experiments.multimodal.examples import read_examples
from odc.experiments.multimodal.exchange import arena_bytes


@pytest.mark.parametrize("minibatch_size", [1, 2, 4, 5, 7, 8, 10, 14])
def test_no_minibatch_needs_more_room_than_the_arena_has(tmp_path: Path, minibatch_size: int) -> None:
    """Also where it runs across the end of an epoch, and the largest example is drawn on both sides of it."""
    data = write_examples(tmp_path, ["i", "", "", "", ""])
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    lines[0]["messages"][0]["content"] *= 400
    data.write_text("\n".join(map(json.dumps, lines)))
    examples = read_examples(data, CONFIG.geometry, max_tokens=1 << 20)
    alone = [arena_bytes([example] * 1000, 1000, CONFIG.geometry) / 1000 for example in examples]
    assert alone[0] > 20 * max(alone[1:])
    sampler = MinibatchSampler(len(examples), minibatch_size)
    drawn = [sum(alone[i] for i in next(sampler)) for _ in range(400)]
    assert max(drawn) <= arena_bytes(examples, minibatch_size, CONFIG.geometry)
