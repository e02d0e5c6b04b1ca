"""A loopback Hub: repositories in a folder, the protocol of the real client, faults on request.

Standard library only; one corner asks hf_xet, which comes with the client, to read what it wrote.
"""

from __future__ import annotations

from .connection import Request
from .faults import ROUTES, Faults
from .loopback_hub import LoopbackHub
from .repositories import Commit, File

__all__ = ["ROUTES", "Commit", "Faults", "File", "LoopbackHub", "Request"]
