from __future__ import annotations

from hypothesis import settings

# the same examples in every run: a failure is found when the code changes, not on somebody else's day
settings.register_profile("default", derandomize=True, deadline=None)
settings.load_profile("default")
