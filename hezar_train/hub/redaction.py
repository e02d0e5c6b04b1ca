"""What must never be written down: tokens, and the signatures in the addresses of uploads.

Every text that comes from the client, the server or the command line goes through `redact` before it is kept or shown.
"""

from __future__ import annotations

import os
import re

__all__ = ["redact"]

HIDDEN = "***"
TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{12,}")
BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",;]{6,}")
USER_IN_URL = re.compile(r"(?i)\b(https?://)[^/\s@]+@")
QUERY = re.compile(r"(?i)\b(https?://[^\s'\"<>?]+)\?[^\s'\"<>)]+")
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
SHORTEST_SECRET = 6


def redact(text: str) -> str:
    """Return a text without tokens, passwords in addresses, and signed queries."""
    for secret in filter(None, map(os.environ.get, TOKEN_VARIABLES)):
        if len(secret) >= SHORTEST_SECRET:  # whatever form it has
            text = text.replace(secret, HIDDEN)
    text = BEARER.sub(rf"\1 {HIDDEN}", TOKEN.sub(HIDDEN, text))
    return QUERY.sub(r"\1?...", USER_IN_URL.sub(rf"\1{HIDDEN}@", text))
