"""`odc doctor`: can odc run here, on what, and what is missing for more."""

from odc.doctor.examination import PROBES, USES, Probe, examine, known_uses, lacking, to_json
from odc.doctor.finding import Finding, State

__all__ = ["PROBES", "USES", "Finding", "Probe", "State", "examine", "known_uses", "lacking", "to_json"]
