"""Drop-ins for two functions of `verl.utils.seqlen_balancing` (0.9), with verl's own signatures and shapes of results.

A caller imports them from here and changes nothing else; plans are not verl's sample for sample. torch is imported when
a batch is rearranged, and verl's slicing is used if it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from odc.balance import partition
from odc.balance.cost import VERL_WORKLOAD
from odc.balance.packing import pack, pack_evenly, small_at_both_ends
from odc.balance.partition import refine
from odc.errors import PlanError


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Partition indices of `seqlen_list` into `k_partitions` lists of nearly equal sum, none empty, each sorted.

    The numbers are lengths or workloads, >= 0; with `equal_size` all lists get the same number of indices. Raises
    PlanError (a ValueError; verl: AssertionError) if the numbers do not allow that.
    """
    costs = np.asarray(seqlen_list)
    if len(costs) < k_partitions:
        raise PlanError(f"{len(costs)} items cannot fill {k_partitions} partitions")
    if equal_size and len(costs) % k_partitions:
        raise PlanError(f"{len(costs)} items do not divide into {k_partitions} partitions of equal size")
    owners = partition(costs, k_partitions, equal_sizes=equal_size)
    by_owner = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=k_partitions))[:-1]
    return _none_empty([part.tolist() for part in np.split(by_owner, ends)])


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """Split a batch into microbatches of nearly equal workload, none over `max_token_len` tokens, none empty.

    Args:
        batch: TensorDict with `input_ids` (nested, or [batch, padded length] with an `attention_mask`).
        max_token_len: hard cap on the tokens of a microbatch, without padding.
        dp_group: torch process group whose ranks agree on one count, if `same_micro_num_in_dp`. Then this is a
            collective: every rank of the group calls it, and if one cannot keep the count all raise.
        num_batches_divided_by: the count is a multiple of this, and at least `min_num_micro_batch`.
        use_dynamic_bsz_balance: order them with the smallest workloads at both ends, as verl does for pipelines.
        force_group_size: number of consecutive samples that stay in one microbatch.

    Returns the microbatches and the sample indices of each. Raises PlanError, a ValueError, naming what is over the cap
    or which count cannot be filled.
    """
    lengths = row_lengths(batch)
    size = force_group_size
    if len(lengths) % size:
        raise PlanError(f"a batch of {len(lengths)} samples does not divide into groups of {size}")
    starts = range(0, len(lengths), size)
    tokens = [sum(lengths[at : at + size]) for at in starts]
    work = [sum(VERL_WORKLOAD(length) for length in lengths[at : at + size]) for at in starts]
    order = sorted(range(len(tokens)), key=lambda g: (-work[g], g))
    # All ranks learn of a problem before any of them raises: a rank that raised alone would leave its peers waiting.
    fits = max(tokens) <= max_token_len
    fewest = len(pack(tokens, order, max_token_len)) if fits else 1
    wanted = [max(fewest, min_num_micro_batch or 1), max(tokens), -len(tokens)]
    count, longest, fewest_groups = _agreed(wanted, batch, dp_group if same_micro_num_in_dp else None)
    step = num_batches_divided_by or 1
    count = -(-count // step) * step
    if longest > max_token_len:
        at = f"samples from {tokens.index(longest) * size} on" if longest in tokens else "samples of another rank"
        raise PlanError(f"{at}, {size} together, have {longest} tokens, more than the cap of {max_token_len}")
    if count > -fewest_groups:
        raise PlanError(f"{count} microbatches are needed, but a rank has only {-fewest_groups} samples or groups")
    bins = _bins(tokens, work, order, count, max_token_len)
    if use_dynamic_bsz_balance:
        bins = small_at_both_ends(sorted(bins, key=lambda bin_: (-sum(work[g] for g in bin_), -bin_[0])))
    indices = [[g * size + i for g in bin_ for i in range(size)] for bin_ in bins]
    return [_select(batch, some) for some in indices], indices


def _bins(tokens: list[int], work: list[float], order: list[int], count: int, max_tokens: int) -> list[list[int]]:
    """Exactly `count` sorted lists of groups, each under the cap; there are at least `count` groups."""
    bins = pack_evenly(tokens, work, order, count, max_tokens)
    if bins is None:
        raise PlanError(f"found no way to pack {len(tokens)} samples or groups into {count} microbatches")
    bins = refine(bins, work, lengths=tokens, max_tokens=max_tokens, worth=1e-3)
    return _none_empty([sorted(bin_) for bin_ in bins])


def _none_empty(parts: list[list[int]]) -> list[list[int]]:
    """The same lists, but an empty one gets an item of the largest."""
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return parts


def row_lengths(batch: Any) -> list[int]:
    """Tokens of each sample of a verl batch, without padding."""
    ids = batch["input_ids"]
    lengths = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    return [int(length) for length in lengths.tolist()]


def _agreed(numbers: list[int], batch: Any, group: Any) -> list[int]:
    """The maximum of each number over the ranks of a group; unchanged without a group."""
    import torch
    from torch import distributed as dist

    if group is None or not dist.is_initialized():
        return numbers
    on_gpu = "nccl" in dist.get_backend(group)
    shared = torch.tensor(numbers, device="cuda" if on_gpu else batch["input_ids"].device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in shared.tolist()]


def _select(batch: Any, indices: list[int]) -> Any:
    try:
        from verl.utils.tensordict_utils import index_select_tensor_dict
    except ImportError:
        return batch[indices]
    return index_select_tensor_dict(batch, indices)
