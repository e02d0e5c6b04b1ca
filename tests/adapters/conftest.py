"""Let the tests of this folder import what lies beside them, groups of processes, and the loopback Hub."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(TESTS / "distributed"))
sys.path.insert(2, str(TESTS.parent))

from tests.hub.conftest import hub, without_xet  # noqa: E402, F401
