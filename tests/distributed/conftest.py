"""Let the tests of this folder import what lies beside them, and the workload of the tests of resuming."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "behaviour"))
