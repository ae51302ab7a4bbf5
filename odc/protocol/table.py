"""Every word of the protocol, as data: what stores it, after what, what waits for it, and where it lies.

docs/words.md and the diagram of docs/protocol.md are written from this table (`tests/support/protocol_pages.py`), and
`Settings(check_protocol=True)` asserts the rules of it that concern values (`odc.protocol.check`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Whose word a rule is about: this rank's; every member's; those of the replicas of this rank's shard, this rank's
#: included; those of the owners on its node that this rank fetches from and pushes to; that of the owner of a ring.
Whose = Literal["this rank", "every rank", "replicas", "owners", "the owner"]
#: What a word counts. An epoch is stored once each, in rising order; a step of an arena's channel rises too; a count
#: never falls; anything else may become any value.
Kind = Literal["epoch", "step", "count", "value"]


@dataclass(frozen=True)
class Need:
    """When a word is stored, `word` of `whose` is at least (or at most) the stored epoch + `plus`.

    For a word that holds no epoch, the epoch is the one that this rank has published.
    """

    word: str
    whose: Whose
    plus: int = 0
    at_most: bool = False
    once_done: bool = False  # in force only once this rank is DONE: an epoch of evaluation completes before that

    def __str__(self) -> str:
        epoch = "epoch" if not self.plus else f"epoch {self.plus:+d}".replace("+", "+ ").replace("-", "- ")
        of = "" if self.whose == "this rank" else f" of {self.whose}"
        return f"{self.word}{of} {'<=' if self.at_most else '>='} {epoch}"


@dataclass(frozen=True)
class WordRule:
    """One word. `after` is what its writer has done before it stores, `awaited` what waits for it; "" for nothing.

    `region` of the heap `of` some rank; a `*` stands for numbers. `needs` are what `after` means for other words.
    """

    name: str
    writer: str
    after: str
    awaited: str
    region: str
    kind: Kind = "value"
    needs: tuple[Need, ...] = ()
    of: str = "its writer"


_OPEN = Need("DONE", "this rank", -1), Need("DONE", "this rank", -1, at_most=True)  # this rank is in the epoch
_BEGUN = Need("PUBLISHED", "owners")

ONE_HOST = (
    WordRule(
        "PUBLISHING",
        "main thread",
        "every rank is DONE with the epoch before, and replicas have READ this rank's sums",
        "readers outside the job",
        "board",
        "epoch",
        (Need("DONE", "every rank", -1), Need("READ", "replicas", -1)),
    ),
    WordRule(
        "PUBLISHED",
        "main thread",
        "shards are copied, sums zeroed",
        "fetch, push, done",
        "board",
        "epoch",
        (Need("PUBLISHING", "this rank"),),
    ),
    WordRule(
        "SENT",
        "the pushing rank",
        "block and header are in their slot",
        "the owner's daemon; collect",
        "sent",
        "count",
        (Need("PUBLISHED", "the owner"), *_OPEN),
        of="the owner",
    ),
    WordRule(
        "ACCUMULATED",
        "the owner's daemon",
        "the block is added",
        "push (a free slot); collect",
        "accumulated",
        "count",
        of="the owner",
    ),
    WordRule("push counts", "the pushing rank", "the member has PUBLISHED", "", "pushes", "count", of="every rank"),
    WordRule("OUTCOME_EVEN", "main thread", "all pushes are posted, counts stored", "", "board"),
    WordRule("OUTCOME_ODD", "main thread", "the same, in odd epochs", "", "board"),
    WordRule(
        "DONE",
        "main thread",
        "OUTCOME",
        "collect; the next begin",
        "board",
        "epoch",
        (Need("PUBLISHED", "this rank"), Need("PUBLISHED", "this rank", at_most=True)),
    ),
    WordRule(
        "COMPLETE",
        "main thread",
        "every rank is DONE, and ACCUMULATED = SENT",
        "replicas and partners: collect",
        "board",
        "epoch",
        (Need("DONE", "every rank", once_done=True),),
    ),
    WordRule(
        "READ",
        "main thread",
        "`.grad` is written",
        "replicas and partners: the next begin",
        "board",
        "epoch",
        (Need("COMPLETE", "this rank"), Need("DONE", "every rank", once_done=True)),
    ),
    WordRule("ABORT", "any rank", "the reason is written", "every wait ends", "board"),
    WordRule("LEFT", "the rank that shuts down", "a note, if an error caused it", "every wait ends", "board"),
    WordRule("GIVING_UP", "main thread", "", "a piece of a split sample", "board", "value", _OPEN),
    WordRule("PROGRESS", "main thread", "each call into odc", "", "board"),
    WordRule("STATE", "main thread", "", "", "board"),
    WordRule("MICROBATCH", "main thread", "each forward", "", "board"),
    WordRule(
        "FETCHED",
        "the fetching thread",
        "the copy",
        "",
        "board",
        "count",
        (_BEGUN, *_OPEN, Need("PUBLISHING", "owners", at_most=True)),
    ),
    WordRule("PUSHED", "the pushing thread", "the last block is posted", "", "board", "count", (_BEGUN, *_OPEN)),
    WordRule("WAITING", "a waiting thread", "WAITING_EPOCH", "", "board"),
    WordRule("WAITING_EPOCH", "a waiting thread", "", "", "board"),
)
REPLICAS = (
    WordRule(
        "REDUCED",
        "main thread",
        "its part of the sums is added up",
        "collect, before the part is read",
        "board",
        "epoch",
        (Need("COMPLETE", "replicas"),),
    ),
)
QUEUE = (
    WordRule(
        "OFFERED",
        "main thread",
        "the table and the inputs are copied, CLAIMED is 0",
        "the first claim",
        "board",
        "value",
        _OPEN,
    ),
    WordRule("CLAIMED", "every claiming rank", "every rank has OFFERED", "", "claimed", of="the home rank"),
    WordRule("MINE", "main thread", "each claim", "", "claimed"),
    WordRule("TOTAL", "main thread", "the tables are read", "", "claimed"),
)
HOSTS = (
    WordRule("mirrors", "the receiving daemon", "what the word explains", "all above", "mirror/*", of="the partner"),
    WordRule("CHANGED", "main thread", "the changes are packed", "", "versions"),
    WordRule("BASE", "main thread", "the same", "", "versions"),
    WordRule("PACKED", "main thread", "the same", "", "versions"),
    WordRule("CHECKSUM", "main thread", "the same", "", "versions"),
    WordRule("PLACE", "main thread", "the same", "", "versions"),
    WordRule("SAVED", "the reading thread", "a shard is in the cache", "", "board", "count"),
    WordRule("CLAIM", "the first rank to need a shard", "", "", "node/claims", "epoch", of="the local partner"),
    WordRule("CACHED", "the rank that claimed", "the shard is read", "fetch", "node/cached", of="the local partner"),
    WordRule("LAST", "the pushing rank", "its last push of the unit", "", "node/lasts", "value", _OPEN),
    WordRule("SUMMED", "the daemon", "LAST of every rank of the host", "collect, or read at once", "", of="a message"),
)
ARENA = (
    WordRule(
        "STEP",
        "the owner",
        "the bytes, OFFSET, NBYTES, SIGNATURE",
        "get",
        "arena/table",
        "step",
    ),
    WordRule("OFFSET", "the owner", "the readers of the last entry have COPIED it", "", "arena/table"),
    WordRule("NBYTES", "the owner", "the same", "", "arena/table"),
    WordRule("SIGNATURE", "the owner", "the same", "", "arena/table"),
    WordRule("COPIED", "the reader", "its copies have ended", "put", "arena/copied", "step", of="the owner"),
    WordRule("TAKEN", "a reader on another host", "the same", "put, by its mirror", "arena/taken", "step"),
)
TABLES: dict[str, tuple[WordRule, ...]] = {
    "One host": ONE_HOST,
    "Replicas": REPLICAS,
    "The queue": QUEUE,
    "Over hosts": HOSTS,
    "Arenas": ARENA,
}
RULES: dict[str, WordRule] = {rule.name: rule for rules in TABLES.values() for rule in rules}


def tables() -> str:
    """The tables, as Markdown."""
    head = "| word | stored by | after | awaited in | lies in |\n|---|---|---|---|---|\n"
    return "\n".join(f"## {part}\n\n{head}{''.join(map(_row, rules))}" for part, rules in TABLES.items())


def _row(rule: WordRule) -> str:
    where = f"`{rule.region}` of {rule.of}" if rule.region else rule.of
    return f"| {rule.name} | {rule.writer} | {rule.after} | {rule.awaited} | {where} |\n"


def diagram() -> str:
    """Which words must hold at least what before a word is stored, one line each: the checked part of the table."""
    checked = [rule for rule in RULES.values() if rule.needs and rule.kind == "epoch"]
    width = max(len(rule.name) for rule in checked)
    return "".join(f"{rule.name:{width}} = epoch  <-  {', '.join(map(str, rule.needs))}\n" for rule in checked)
