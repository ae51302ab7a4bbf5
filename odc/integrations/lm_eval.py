"""lm-eval-harness on the ranks of a sharded model: `lm_eval.simple_evaluate` with its requests spread over the ranks.

Any `LM` works as it is. Nothing is padded unless asked for, results and logged samples are those of one process, in its
order, and there may be fewer documents than ranks, which lm-eval's own way does not survive.
"""

from __future__ import annotations

import copy
from typing import Any

from odc.errors import ConfigError, install
from odc.eval import Peers
from odc.integrations._evaluation_harness import CACHES, Cost, RequestsDone, alone, refuse, spread_requests

_KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


def evaluate(
    lm: Any, tasks: list[Any], peers: Peers, *, pad: bool = False, cost: Cost | None = None, **options: Any
) -> Any:
    """`lm_eval.simple_evaluate(model=lm, tasks=tasks, **options)` with each request run by one rank.

    Every rank calls it alike, inside `odc.eval.session(modules=[model])`; it waits for all at each kind of request.
    `lm` is an `lm_eval.api.model.LM` that believes it runs alone (rank 0 of 1), as `HFLM(pretrained=model)` does;
    `tasks` are names, configs or task objects, the same on every rank; `options` may not keep a cache. `pad` runs
    equally many requests on every rank, for a model with collectives in its forward (FSDP2): not a complete remedy, see
    docs/evaluation.md. `cost` of a request spreads work evenly; by default it is the characters of its texts.

    Returns what `simple_evaluate` returns, on the session's first rank; None on the others, which then wait up to a day
    for its metrics, whatever the session's `timeout_s` is. Raises ConfigError if lm-eval is not installed, or `lm`
    spreads requests itself; UnsupportedError for an option that cannot work on several ranks; PlanError if ranks built
    different requests.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"evaluating with lm-eval needs it: {install('lm-eval')}") from error
    refuse("lm-eval", options, CACHES)
    if lm.world_size != 1:
        raise ConfigError(f"lm spreads requests over {lm.world_size} ranks itself; build it from the sharded model")
    manager = copy.copy(options.pop("task_manager", None) or TaskManager(metadata=options.get("metadata")))
    load = manager.load
    loaded: Any = None

    def remember(specs: Any) -> Any:
        # Inside simple_evaluate: it seeds `random` first, which tasks may draw their documents from.
        nonlocal loaded
        loaded = load(specs)
        return loaded

    manager.load = remember
    if peers.me:
        options["evaluation_tracker"] = None  # only the first rank writes files
    left = None

    def after(kind: str) -> None:
        nonlocal left
        if left is None:
            left = {request.request_type for task in loaded["tasks"].values() for request in task.instances}
        left.discard(kind)
        if not left:
            raise RequestsDone

    try:
        with alone(), spread_requests(lm, _KINDS, peers, pad=pad, cost=cost, after=after):
            results = simple_evaluate(model=lm, tasks=tasks, task_manager=manager, **options)
    except RequestsDone:
        return None
    return None if peers.me else results
