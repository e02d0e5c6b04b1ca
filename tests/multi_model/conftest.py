"""Let the tests of this folder import what lies beside them, and the workload of the behaviour tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "behaviour")]
