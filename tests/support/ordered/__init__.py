"""A happens-before checker: reads what a run has recorded, and finds accesses to the same bytes that nothing orders.

log      the records of each process, merged by time
judge    clocks of threads and streams, and who has accessed which bytes
spans    the last accesses to each byte of memory
report   conflicts as text
"""

from support.ordered.judge import Judge
from support.ordered.log import Logs
from support.ordered.report import report

__all__ = ["Judge", "Logs", "report"]
