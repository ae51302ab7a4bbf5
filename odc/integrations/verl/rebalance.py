"""LB-Mini inside a verl engine: rows of a minibatch move to the rank that should compute them.

Ranks exchange lengths, each computes the same plan, and only rows that change rank travel, in one all-to-all over the
data-parallel group's CPU backend.
"""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NonTensorData
from verl.utils import tensordict_utils as tu

from odc.balance import Cost, longest_in_pieces
from odc.errors import PlanError, UnsupportedError
from odc.integrations.verl.seqlen_balancing import get_seqlen_balanced_partitions

_WORTH = 0.01  # share of the longest rank's cost that a move of rows must save

Lengths = Sequence[Sequence[int]]


def refuse_long(lengths: Lengths, max_tokens: int, group_size: int = 1, pieces: int = 1) -> None:
    """Raise PlanError, on every rank alike, if rows that stay together do not fit into one microbatch.

    `lengths` are the tokens of each row on each data-parallel rank; `group_size` consecutive rows stay together.
    Rows may run as so many `pieces`.
    """
    more = f", in {pieces} pieces" if pieces > 1 else ""
    for rank, rows in enumerate(lengths):
        if len(rows) % group_size:
            raise PlanError(f"data-parallel rank {rank} has {len(rows)} samples, not a multiple of {group_size}")
        for at in range(0, len(rows), group_size):
            if (tokens := sum(rows[at : at + group_size])) > longest_in_pieces(max_tokens, pieces):
                raise PlanError(
                    f"data-parallel rank {rank}: sample {at} ({group_size} together) has {tokens} tokens, more than a "
                    f"microbatch may have ({max_tokens}: max_token_len_per_gpu x sequence-parallel ranks{more})"
                )


def refuse_losses(data: Any, loss_function: Callable[..., Any]) -> None:
    """Raise UnsupportedError if the loss of a training batch depends on which rows share a microbatch, or waits for the
    other ranks in each: ranks run microbatches of their own, other ones than under verl's strategies.

    What a loss does is known only of verl's own, by its configuration. `clip_cov` and `kl_cov`, which choose among the
    tokens of a microbatch, only differ, and pass. So does every loss in verl's own microbatches of equally many rows.
    """
    config: Any = getattr(loss_function, "keywords", {}).get("config")
    if config is None or not tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
        return
    if wrong := _shared(config) or _width(data, config):
        raise UnsupportedError(f"strategy odc does not go with {wrong}")


def _shared(config: Any) -> str:
    """What of a policy loss is a figure of all rows of a microbatch; empty for none."""
    policy: Any = getattr(config, "policy_loss", None)
    mode = policy.get("loss_mode", "vanilla") if policy is not None else "vanilla"
    if mode == "geo_mean":
        return (
            "policy_loss.loss_mode=geo_mean and use_dynamic_bsz=true: verl takes the mean over the rows of each "
            "microbatch, and odc decides which rows share one. Set use_dynamic_bsz=false"
        )
    correction = (policy.get("rollout_correction", None) if mode == "bypass_mode" else None) or {}
    if correction.get("rollout_is", None) and correction.get("rollout_is_batch_normalize", False):
        return (
            "rollout_correction.rollout_is_batch_normalize and use_dynamic_bsz=true in bypass mode: verl then reduces "
            "over all ranks in each microbatch, and ranks have different numbers. Set one of them to false"
        )
    return ""


def _width(data: Any, config: Any) -> str:
    """What divides a loss by the longest response of each microbatch; empty for none. Padded batches have one width."""
    mask, mode = data.get("response_mask", None), getattr(config, "loss_agg_mode", "")
    if mask is None or not mask.is_nested or mode != "seq-mean-token-sum-norm" or config.loss_scale_factor is not None:
        return ""
    return (
        f"loss_agg_mode={mode} without loss_scale_factor: verl then divides by the longest response of each "
        "microbatch, and odc decides which rows share one. Set actor.loss_scale_factor, for example to the maximal "
        "response length"
    )


def owners_of(lengths: Lengths, cost: Cost, group_size: int = 1) -> list[list[int]]:
    """The rank that should compute each row, by the rank that has it. A pure function.

    Parts of nearly equal cost, none of them empty, go to ranks so that many tokens stay where they are. No row moves if
    that would save less than 1% of the longest rank's cost. `cost` is that of a row by its length; `group_size`, the
    number of consecutive rows that stay together, divides each rank's number of rows. Raises PlanError if there are
    fewer groups than ranks.
    """
    ranks = len(lengths)
    homes = [rank for rank, rows in enumerate(lengths) for _ in range(len(rows) // group_size)]
    chunks = [rows[at : at + group_size] for rows in lengths for at in range(0, len(rows), group_size)]
    costs = [sum(cost(length) for length in chunk) for chunk in chunks]
    parts = get_seqlen_balanced_partitions(costs, ranks, equal_size=False)  # type: ignore[arg-type]
    now = [0.0] * ranks
    for home, own in zip(homes, costs, strict=True):
        now[home] += own
    if max(now) * (1 - _WORTH) <= max(sum(costs[i] for i in part) for part in parts):
        return [[rank] * len(rows) for rank, rows in enumerate(lengths)]
    stay: Counter[tuple[int, int]] = Counter()
    for p, part in enumerate(parts):
        for i in part:
            stay[p, homes[i]] += sum(chunks[i])
    owner_of_part = _most_stays(stay, ranks)
    owner = {i: owner_of_part[p] for p, part in enumerate(parts) for i in part}
    by_row = iter([owner[i] for i, chunk in enumerate(chunks) for _ in chunk])
    return [list(itertools.islice(by_row, len(rows))) for rows in lengths]


def _most_stays(stay: Mapping[tuple[int, int], int], ranks: int) -> list[int]:
    """A rank for each part, the largest overlaps first: at least half as many tokens stay as could.

    `stay` holds the tokens of a part that are on a rank, by (part, rank), if there are any.
    """
    taken: dict[int, int] = {}
    free = set(range(ranks))
    for part, rank in sorted(stay, key=lambda pair: (-stay[pair], pair)):
        if part not in taken and rank in free:
            taken[part] = rank
            free.remove(rank)
    rest = iter(sorted(free))
    return [taken[part] if part in taken else next(rest) for part in range(ranks)]


def move_rows(data: Any, owners: Sequence[Sequence[int]], group: Any) -> Any:
    """This rank's rows after each has moved to its owner: those that stay, then those that arrive, by source rank.

    `owners` come from `owners_of`, the same on every rank, with at least one row for each. Nothing is sent if no row
    moves at all; otherwise as `send_rows`.
    """
    if all(owner == rank for rank, rows in enumerate(owners) for owner in rows):
        return data
    return send_rows(data, [[(owner,) for owner in rows] for rows in owners], group)


def send_rows(data: Any, goals: Sequence[Sequence[Sequence[int]]], group: Any) -> Any:
    """The rows that have this rank among their goals: its own first, then those that arrive, by source rank.

    A collective over `group`, through CPU memory. What the batch (a TensorDict on the CPU) holds once instead of for
    each row (settings, counts) stays. `goals[rank][row]` are the ranks that a row goes to, the same on every rank;
    every rank gets at least one row.
    """
    me = dist.get_rank(group)
    shared = {key: value for key, value in data.items() if isinstance(value, NonTensorData)}
    leaving = [[i for i, goal in enumerate(goals[me]) if rank in goal] for rank in range(len(goals))]
    mine = data.exclude(*shared)
    sent = [
        pickle.dumps(tu.index_select_tensor_dict(mine, rows)) if rows and rank != me else b""
        for rank, rows in enumerate(leaving)
    ]
    parts = [tu.index_select_tensor_dict(mine, leaving[me])] if leaving[me] else []
    parts += [pickle.loads(message) for message in _all_to_all(sent, group) if message]
    moved = tu.concat_tensordict(parts)
    for key, value in shared.items():
        moved[key] = NonTensorData(value.data)
    return moved


def _all_to_all(messages: Sequence[bytes], group: Any) -> list[bytes]:
    """Send `messages[r]` to rank r of the group; returns what each rank sent here."""
    sizes = torch.tensor([len(message) for message in messages])
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    out = torch.frombuffer(bytearray(b"".join(messages)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
    into = torch.empty(int(coming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(into, out, coming.tolist(), sizes.tolist(), group=group)
    return [part.numpy().tobytes() for part in into.split(coming.tolist())]
