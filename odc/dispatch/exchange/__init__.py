"""Moving examples' tensors by a plan: one all-to-all, or one-sided on demand; an all-gather to compare with."""

from odc.dispatch.exchange.collective import AllGatherExchange, CollectiveExchange
from odc.dispatch.exchange.on_demand import OnDemandExchange
from odc.dispatch.exchange.rows import BACK, Exchange

__all__ = ["BACK", "AllGatherExchange", "CollectiveExchange", "Exchange", "OnDemandExchange"]
