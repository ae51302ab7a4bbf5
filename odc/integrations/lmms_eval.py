"""lmms-eval on the ranks of a sharded model: its `simple_evaluate` with the requests spread over the ranks.

lmms-eval learns of ranks only from the environment, where it does not find them (see `alone`). That avoids its padding,
its barriers and its gathering through one pickle.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist

from odc.errors import ConfigError, UnsupportedError, install
from odc.eval import Peers
from odc.integrations._evaluation_harness import CACHES, Cost, RequestsDone, alone, refuse, spread_requests

_KINDS = ("loglikelihood", "generate_until", "generate_until_multi_round", "generate_visual_cot")
_REFUSED = CACHES | {"max_tokens": "only one rank would see the budget end"}


def evaluate(
    lm: Any, tasks: list[Any], peers: Peers, *, pad: bool = False, cost: Cost | None = None, **options: Any
) -> Any:
    """`lmms_eval.evaluator.simple_evaluate(model=lm, tasks=tasks, **options)` with each request run by one rank.

    As `odc.integrations.lm_eval.evaluate`, but on every rank of the world (lmms-eval has one barrier of the world,
    where it loads the data; UnsupportedError if the session does not hold all ranks), and without budgets in `options`.
    `lm` is an `lmms_eval.api.model.lmms` around the sharded model, and still holds the model afterwards. The default
    `cost` ignores images.
    """
    try:
        from lmms_eval.evaluator import simple_evaluate
    except ImportError as error:
        raise ConfigError(f"evaluating with lmms-eval needs it: {install('lmms-eval')}") from error
    refuse("lmms-eval", options, _REFUSED)
    if dist.is_initialized() and peers.world != dist.get_world_size():
        raise UnsupportedError("lmms-eval loads its data between barriers of the world, so evaluate on all ranks")
    if peers.me:
        options["evaluation_tracker"] = None  # only the first rank writes files
    kinds = [kind for kind in _KINDS if hasattr(lm, kind)]
    lm.clean = _stop if peers.me else lambda: None  # called at the end; lmms-eval's own drops the model
    try:
        with alone(), spread_requests(lm, kinds, peers, pad=pad, cost=cost, after=lambda kind: None, plain=_plain):
            results = simple_evaluate(model=lm, tasks=tasks, distributed_executor_backend="torchrun", **options)
    except RequestsDone:
        return None
    finally:
        del lm.clean
    return None if peers.me else results


def _plain(answer: Any) -> Any:
    """An answer without lmms-eval's `GenerationResult`, in a form that its evaluator takes as well."""
    if not hasattr(answer, "token_counts"):
        return answer
    if answer.token_counts is None or not isinstance(answer.text, str):  # of rounds it takes texts alone
        return answer.text
    return answer.text, answer.token_counts.to_dict()


def _stop() -> NoReturn:
    raise RequestsDone
