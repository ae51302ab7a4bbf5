"""`odc doctor`: can odc run here, on what, and what is missing for more?"""

from odc.doctor.examination import Finding, State, examine, lacking, to_json
from odc.doctor.table import GROUPS, USES, Check, all_checks, known_uses

__all__ = ["GROUPS", "USES", "Check", "Finding", "State", "all_checks", "examine", "known_uses", "lacking", "to_json"]
