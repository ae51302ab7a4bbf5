"""The table of the protocol against the words of the code, the heap's regions and the pages."""

from __future__ import annotations

import re

import pytest
import torch
from support.members import HeapGroup
from support.protocol_pages import BLOCKS, replaced

from odc.memory import ShmHeap
from odc.protocol import Word
from odc.protocol.arena_protocol import ArenaWords
from odc.protocol.table import RULES
from odc.protocol.words import ClaimWord, EntryWord
from odc.settings import Settings

LAYOUT = [[("w", 4, torch.float32)]]


def regions(group: HeapGroup) -> set[str]:
    """Regions that hold words, without their numbers."""
    heap = group.layouts[0].heap
    assert isinstance(heap, ShmHeap)
    return {name for name, _ in group.layouts[0].requests()}


def test_every_word_has_a_rule() -> None:
    names = [word.name for words in (Word, ClaimWord, EntryWord) for word in words]
    assert not [name for name in names if name not in RULES]


def test_regions_of_the_table_are_in_the_heap() -> None:
    hosts = HeapGroup(LAYOUT, 4, hosts=(0, 0, 1, 1), settings=Settings(queue_bytes=4096, changes="auto"))
    there = regions(hosts) | {"mirror/*"}
    there |= {name for name, _ in ArenaWords.requests(1, hosts.layouts[0].grid)}
    hosts.close()
    assert not {rule.region for rule in RULES.values() if rule.region} - there


def test_needs_name_words_of_the_board() -> None:
    for rule in RULES.values():
        assert {need.word for need in rule.needs} <= {word.name for word in Word}, rule.name


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_pages_hold_the_table(number: int) -> None:
    page, name, block = BLOCKS[number]
    text = page.read_text(encoding="utf-8")
    assert text == replaced(text, name, block()), "run `python tests/support/protocol_pages.py`"


def test_words_of_the_pages_are_in_the_table() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page, *_ in BLOCKS)
    known = {*RULES, "OUTCOME", "CLOSED", "OPEN", "FINISHING", "README"}
    assert not set(re.findall(r"\b[A-Z]{4,}(?:_[A-Z]+)*\b", text)) - known
