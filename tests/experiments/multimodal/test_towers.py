"""The towers: an example's features and loss do not depend on what else is in the batch, beyond rounding."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_multimodal import CONFIG
from torch.nn.utils.rnn import pad_sequence

from odc.experiments.multimodal.model import build_towers

TOWERS = {name: tower.double() for name, tower in build_towers(CONFIG, seed=0).items()}
NEAR = {"rtol": 1e-4, "atol": 1e-6}


@settings(max_examples=15)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_clips_do_not_see_their_batch_mates(frames: list[int]) -> None:
    draw = torch.Generator().manual_seed(sum(frames))
    clips = [torch.randn(count, 8, generator=draw, dtype=torch.float64) for count in frames]
    together = TOWERS["audio"](pad_sequence(clips, batch_first=True), frames)
    alone = [TOWERS["audio"](clip[None], [len(clip)]) for clip in clips]
    assert [len(one) for one in alone] == [
        CONFIG.geometry.audio_tokens(CONFIG.geometry.audio_positions(n)) for n in frames
    ]
    torch.testing.assert_close(together, torch.cat(alone), **NEAR)


def test_padding_gives_no_gradient() -> None:
    clips = torch.randn(2, 20, 8, dtype=torch.float64, requires_grad=True)
    real = torch.ones(2, 20, 1)
    real[1, 7:] = 0
    TOWERS["audio"](clips * real, [20, 7]).sum().backward()
    assert clips.grad is not None and clips.grad[1, 7:].abs().max() == 0 and clips.grad[1, :7].abs().min() > 0


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4))
def test_images_of_any_size_do_not_see_each_other(blocks: list[tuple[int, int]]) -> None:
    draw = torch.Generator().manual_seed(len(blocks))
    grids = torch.tensor([[2 * rows, 2 * columns] for rows, columns in blocks])
    images = [torch.randn(int(grid.prod()), 48, generator=draw, dtype=torch.float64) for grid in grids]
    together = TOWERS["image"](torch.cat(images), grids)
    alone = [TOWERS["image"](image, grid[None]) for image, grid in zip(images, grids, strict=True)]
    assert [len(one) for one in alone] == [rows * columns for rows, columns in blocks]
    torch.testing.assert_close(together, torch.cat(alone), **NEAR)


def test_sequences_do_not_see_each_other() -> None:
    ids, features = torch.randint(256, (9,)), torch.randn(4, 16, dtype=torch.float64)
    order = torch.tensor([0, 9, 10, 1, 2, 3, 11, 12, 4, 5, 6, 7, 8])  # two of text and features, one of text alone
    labels = torch.randint(256, (13,))
    lengths = [5, 4, 4]
    together = TOWERS["llm"](ids, features, order, labels, lengths)
    starts = [0, 5, 9]
    alone = [
        TOWERS["llm"](ids, features, order[at : at + n], labels[at : at + n], [n])
        for at, n in zip(starts, lengths, strict=True)
    ]
    torch.testing.assert_close(together, sum(alone), **NEAR)


def test_same_seed_same_bits_and_the_global_state_is_left_alone() -> None:
    torch.manual_seed(3)
    again = build_towers(CONFIG, seed=0)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))
    for name, tower in TOWERS.items():
        for one, another in zip(tower.parameters(), again[name].parameters(), strict=True):
            assert torch.equal(one, another.double())
    other = dict(build_towers(CONFIG, seed=1)["llm"].named_parameters())
    assert any(not torch.equal(p, other[name].double()) for name, p in TOWERS["llm"].named_parameters())
