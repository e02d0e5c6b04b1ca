"""The one loop under the names that users of other trainers know; each view is a thin mixin of the Trainer."""

from __future__ import annotations

__all__ = ["epochs", "federated", "history", "iterations"]
