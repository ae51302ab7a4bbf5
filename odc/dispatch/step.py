"""One step's plan: every phase balanced on its own, and the moves between phases composed (OrchMLLM, section 6).

    raw data      source instance --Pi_Ek--> encoder k
    its output    encoder k --Pi_M o Pi_Ek^-1--> LLM's instance      (one move; its backward is the inverse)
    text          source instance --Pi_M--> LLM's instance

Encoders are balanced over subsequences (one image, one audio clip), the LLM over whole interleaved examples, so two
images of one example may be encoded on two ranks. The same records give the same plan on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from odc.dispatch.node_wise import keep_local, place_batches
from odc.dispatch.policy import BalancePolicy, balance_flat
from odc.dispatch.rearrangement import Ints, Rearrangement, ranges
from odc.dispatch.records import Records
from odc.errors import PlanError


@dataclass(frozen=True)
class Phase:
    """An encoder, or the LLM."""

    name: str  # of the phase; of an encoder as in `Records`
    policy: BalancePolicy | None  # how it is balanced; None leaves everything where the data loader put it
    longest: int | None = None  # most tokens of one subsequence (of an encoder) or interleaved example (of the LLM)
    bytes_in: int = 1  # of one input token in a move, for node-wise rearrangement; the LLM's inputs are text tokens
    bytes_out: int = 1  # of one token of an encoder's output

    @property
    def cap(self) -> int | None:
        """The most tokens of one, by the phase and by its policy."""
        caps = [self.longest, self.policy.longest if self.policy is not None else None]
        return min((one for one in caps if one is not None), default=None)


@dataclass(frozen=True)
class Nodes:
    """How instances lie on nodes, and how much planning that is worth."""

    size: int = 0  # instances of a node; node a has instances a * size and following. 0: in an Orchestrator, a host's
    budget_s: float = 0.004  # about how long each placement may take, see `node_wise`
    tolerance: float = 0.0  # lengths that differ by less than this share count as equal, see `keep_local`


@dataclass(frozen=True, eq=False)
class EncoderPlan:
    """Where one encoder's subsequences go. "Flat" places count them as `inbound` does."""

    name: str
    inbound: Rearrangement  # Pi_Ek, from the source to the encoder's instance
    outbound: Rearrangement  # Pi_M o Pi_Ek^-1, from the encoder's to the LLM's instance
    lengths: Ints  # int64 [n_k] tokens that enter the encoder, by flat source place
    tokens: Ints  # int64 [n_k] tokens that enter the LLM, by flat source place
    policy: BalancePolicy | None

    def lengths_at(self, instance: int) -> Ints:
        """Lengths of the subsequences that `instance` encodes, in order."""
        return self.lengths[self.inbound.arriving(instance)]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The plan of one step, the same on every rank."""

    encoders: dict[str, EncoderPlan]
    llm: Rearrangement  # Pi_M, over examples
    lengths: Ints  # int64 [n] interleaved length of each example, by flat source place
    text: Ints  # int64 [n] text tokens of each example, by flat source place
    parts: Ints  # phase (0 text, else 1 + encoder) and tokens of every subsequence in interleaving order, int64 [2, p]
    counts: Ints  # int64 [n] subsequences of each example, by flat source place
    policy: BalancePolicy | None  # of the LLM phase

    def lengths_at(self, instance: int) -> Ints:
        """Interleaved lengths of the examples that the LLM sees on `instance`, in order."""
        return self.lengths[self.llm.arriving(instance)]

    @cached_property
    def digest(self) -> str:
        """Of everything in the plan, in hex: two ranks with the same digest have the same plan."""
        found = hashlib.sha256()
        moves = [self.llm, *(move for e in self.encoders.values() for move in (e.inbound, e.outbound))]
        arrays = [array for move in moves for array in (move.counts, move.new_counts, move.order)]
        arrays += [self.lengths, self.text, self.parts, self.counts]
        arrays += [array for e in self.encoders.values() for array in (e.lengths, e.tokens)]
        for array in arrays:
            found.update(np.int64(array.size).tobytes() + np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    def interleaving(self, instance: int) -> Ints:
        """Row of each token of `instance`'s sequences, int64 [sum of lengths], in the rows that arrive there.

        The rows that arrive are its text's, then each encoder's outputs; indexing their concatenation assembles the
        interleaved sequences.
        """
        move = self.llm.lift(self.counts)
        phase, tokens = self.parts[:, move.arriving(instance)]
        order = np.argsort(phase, kind="stable")
        starts = np.empty(len(tokens), np.int64)
        starts[order] = np.cumsum(tokens[order]) - tokens[order]
        return ranges(starts, tokens)


def plan_step(
    records: Sequence[Records], encoders: Sequence[Phase], llm: Phase, *, nodes: Nodes | None = None
) -> StepPlan:
    """Plan all phases of one step from every instance's records, which number the encoders as they are listed.

    With `nodes`, mini-batches are placed node-wise (algorithm 3) and examples of equal length stay where they can.
    Raises PlanError, naming the instance, for records that no plan may hold.
    """
    if not records:
        raise PlanError("there are no instances to plan for")
    caps = [llm.cap, *(encoder.cap for encoder in encoders)]
    known = [record.check(instance, caps) for instance, record in enumerate(records)]
    joined = Records.joined(known)
    sequences, text = joined.sequence_lengths(), joined.text_tokens()
    d = len(known)
    drawn = Rearrangement.identity([record.examples for record in known])
    inbound = {}
    for k, encoder in enumerate(encoders, 1):
        mine = joined.phase == k
        start = drawn.lift(np.bincount(joined.example[mine], minlength=joined.examples))
        inbound[encoder.name] = _balanced(start, joined.length[mine], encoder, nodes)
    owners = drawn.owners if llm.policy is None else balance_flat(sequences, d, llm.policy)
    move = Rearrangement.to(drawn.counts, owners)
    if nodes is not None and llm.policy is not None:
        move = _placed_llm(move, joined, text * llm.bytes_in, inbound, encoders, nodes)
    plans = {}
    for k, encoder in enumerate(encoders, 1):
        mine, first = joined.phase == k, inbound[encoder.name]
        last = move.lift(np.bincount(joined.example[mine], minlength=joined.examples))
        plans[encoder.name] = EncoderPlan(
            encoder.name, first, last.compose(first.inverse()), joined.length[mine], joined.tokens[mine], encoder.policy
        )
    parts = np.stack([joined.phase, joined.tokens])
    counts = np.bincount(joined.example, minlength=joined.examples)
    return StepPlan(plans, move, sequences, text, parts, counts, llm.policy)


def _balanced(start: Rearrangement, lengths: Ints, phase: Phase, nodes: Nodes | None) -> Rearrangement:
    """Pi_Ek."""
    if phase.policy is None:
        return start
    move = Rearrangement.to(start.counts, balance_flat(lengths, start.instances, phase.policy))
    if nodes is None:
        return move
    return _placed(move, move.sources, move.owners, lengths * phase.bytes_in, move.sources, lengths, nodes)


def _placed_llm(
    move: Rearrangement,
    joined: Records,
    text_bytes: Ints,
    inbound: dict[str, Rearrangement],
    encoders: Sequence[Phase],
    nodes: Nodes,
) -> Rearrangement:
    """Pi_M with its mini-batches placed by what each instance will send to them: text, and what it has encoded."""
    senders, examples, sizes = [move.sources], [np.arange(joined.examples)], [text_bytes]
    for k, encoder in enumerate(encoders, 1):
        mine = joined.phase == k
        senders.append(inbound[encoder.name].owners)
        examples.append(joined.example[mine])
        sizes.append(joined.tokens[mine] * encoder.bytes_out)
    sender, example, size = np.concatenate(senders), np.concatenate(examples), np.concatenate(sizes)
    homes = _heaviest(example, sender, size, move.instances)
    return _placed(move, sender, move.owners[example], size, homes, joined.sequence_lengths(), nodes)


def _placed(
    move: Rearrangement, senders: Ints, batches: Ints, sizes: Ints, homes: Ints, lengths: Ints, nodes: Nodes
) -> Rearrangement:
    """The move with mini-batches placed node-wise, and examples of equal length staying at their homes."""
    instances, per_node = move.instances, nodes.size
    places, _, _ = place_batches(senders, batches, sizes, instances, per_node, budget_s=nodes.budget_s)
    owners = keep_local(places[move.owners], homes, lengths, instances, per_node, tolerance=nodes.tolerance)
    return Rearrangement.to(move.counts, owners)


def _heaviest(examples: Ints, senders: Ints, sizes: Ints, instances: int) -> Ints:
    """[examples] the instance that sends the most of each example, of equals the last; every example is listed."""
    keys = examples * instances + senders
    order = np.argsort(keys)
    sent = keys[order]
    first = np.flatnonzero(np.diff(sent, prepend=-1))
    key, summed = sent[first], np.add.reduceat(sizes[order], first)
    rising = np.lexsort((summed, key // instances))
    last = np.flatnonzero(np.diff(key[rising] // instances, append=-1))
    return key[rising[last]] % instances
