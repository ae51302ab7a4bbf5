"""Every error that odc raises on purpose.

Chose one small tree under `OdcError` over bare RuntimeErrors, so that a training loop can tell "a peer is gone,
restart from the checkpoint" from "you called this at the wrong time". The price is that callers who catch
RuntimeError must know that `OdcError` derives from it.

Every message names the *global* rank that raises, its epoch, and what it waited for or refused.
"""

from __future__ import annotations


class OdcError(RuntimeError):
    """Base of every public odc error.

    Args:
        message: names the rank that raises, its epoch and what it waited for or refused.
        culprit: global rank that is to blame, where that is another one.
    """

    def __init__(self, message: str = "", *, culprit: int | None = None) -> None:
        super().__init__(message)
        self.culprit = culprit


class PeerLostError(OdcError):
    """A peer process is gone, left the job early, or aborted the minibatch. Restart from the last checkpoint."""


class WaitTimeoutError(OdcError):
    """A wait passed its deadline while the peer it names made no progress."""


class LayoutMismatchError(OdcError):
    """Two ranks allocated different heaps: another model, dtype, mesh or order of `fully_shard` calls."""


class HeapMemoryError(OdcError):
    """The heap does not fit into the memory that is left; the message says how much is needed and how much is free."""


class StaleParametersError(OdcError):
    """Parameters changed inside an open minibatch, after they were published. Call `publish()` on every rank."""


class StaleVersionError(OdcError):
    """A reader outside the job could not get one consistent published version within its retries."""


class UnfinishedMinibatchError(OdcError):
    """An optimizer step, load or publish while pushed gradients have not been collected by a finish."""


class AbandonedMinibatchError(OdcError):
    """A rank gave the minibatch up: no rank has a gradient of it, weights are untouched, and the next one may begin.

    Raised on every rank at the end of the minibatch. `culprit` is the global rank that gave it up (the lowest of
    several).

    Args:
        message: as for `OdcError`.
        reason: what that rank said.
        culprit: as for `OdcError`.
    """

    def __init__(self, message: str = "", *, reason: str = "", culprit: int | None = None) -> None:
        super().__init__(message, culprit=culprit)
        self.reason = reason


class UnsupportedError(OdcError):
    """A feature of FSDP2 that odc refuses, said before any work starts."""


class PlanError(OdcError, ValueError):
    """A plan cannot be made or is not valid: empty data, a sample over the cap, a sample listed twice."""


class ResultsError(OdcError, ValueError):
    """Results of an evaluation do not make one whole: doubled, missing, or not one to each request."""


class DataError(OdcError, ValueError):
    """Training data is missing, empty or unreadable; the message names the file or document."""


class ConfigError(OdcError, ValueError):
    """A job cannot run as it was told; the message names the option and what it may be."""


class NonFiniteLossError(OdcError):
    """A loss or gradient norm is NaN or infinite; raised on every rank before the optimizer step."""


class TraceError(OdcError, ValueError):
    """Recorded spans cannot be read or summed up: no minibatch was recorded whole, or a file is not a trace of odc."""
