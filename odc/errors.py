"""Every error that odc raises on purpose.

Every message names the *global* rank that raises, its epoch, and what it waited for or refused. All errors derive from
`OdcError`, and that from RuntimeError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn


def install(extra: str) -> str:
    """What to type to get an extra of odc, which stands on no package index yet."""
    return f"pip install -e '.[{extra}]' in a clone of odc (odc-fsdp[{extra}] is on no package index yet)"


class OdcError(RuntimeError):
    """Base of every public odc error; `culprit` is the global rank that is to blame, if it is another one."""

    def __init__(self, message: str = "", *, culprit: int | None = None) -> None:
        super().__init__(message)
        self.culprit = culprit


def culprit_of(error: BaseException, otherwise: int) -> int:
    """The global rank that `error` blames; `otherwise` where it blames none."""
    blamed = error.culprit if isinstance(error, OdcError) else None
    return otherwise if blamed is None else blamed


class PeerLostError(OdcError):
    """A peer process died, exited early, or aborted the minibatch. Restart from the last checkpoint."""


def aborted_by(doing: str, culprit: int, reason: str) -> PeerLostError:
    """The error of a rank, in `doing`, whose job rank `culprit` has ended for `reason`."""
    return PeerLostError(f"{doing}: the job was aborted by rank {culprit}: {reason}", culprit=culprit)


class WaitTimeoutError(OdcError):
    """A wait passed its deadline while the peer it names made no progress."""


class LayoutMismatchError(OdcError):
    """Two ranks allocated different heaps: their model, dtype, mesh or order of `fully_shard` calls differs."""


class HeapMemoryError(OdcError):
    """The heap does not fit into free memory; the message has how much is needed and how much is free."""


class StaleParametersError(OdcError):
    """Parameters changed inside an open minibatch, after they were published. Call `publish()` on every rank."""


class StaleVersionError(OdcError):
    """A reader outside the job could not get one consistent published version within its retries."""


class UnfinishedMinibatchError(OdcError):
    """An optimizer step, load or publish was attempted before a finish collected the pushed gradients."""


class AbandonedMinibatchError(OdcError):
    """A rank gave up the minibatch: no rank has gradients of it, weights are untouched, and the next one may begin.

    Raised on every rank at the end of the minibatch. `culprit` is the global rank that gave up (the lowest of several),
    `reason` is its own report.
    """

    def __init__(self, message: str = "", *, reason: str = "", culprit: int | None = None) -> None:
        super().__init__(message, culprit=culprit)
        self.reason = reason


class UnsupportedError(OdcError):
    """odc refuses a feature or an environment; raised before any work starts."""


class PlanError(OdcError, ValueError):
    """A plan cannot be made or is invalid: empty data, a sample over the cap, a sample listed twice."""


class ResultsError(OdcError, ValueError):
    """Results of an evaluation are doubled or missing, or there is not one for each request."""


class DataError(OdcError, ValueError):
    """Training data is missing, empty or unreadable; the message names the file or document."""


class ConfigError(OdcError, ValueError):
    """A job cannot run with its options; the message names the option and its valid values."""


def refuse_setting(what: str, instead: str) -> NoReturn:
    """Raise ConfigError: a library is set to `what`, which odc cannot do; `instead` is what to do."""
    raise ConfigError(f"odc cannot apply {what}: {instead}")


def refuse_together(what: str, wrong: Mapping[str, tuple[object, str]]) -> None:
    """Raise ConfigError if a library is set to `what` and one of `wrong`, which has whether it is and what to do."""
    for other, (there, instead) in wrong.items():
        if there:
            refuse_setting(f"{what} with {other}", instead)


class NonFiniteLossError(OdcError):
    """A loss or gradient norm is NaN or infinite; raised on every rank before the optimizer step."""


class TraceError(OdcError, ValueError):
    """Recorded spans cannot be read or summed up: no minibatch was recorded completely, or a file is not odc's."""
