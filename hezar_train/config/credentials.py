"""Find tokens, passwords and keys where they must not be: in configs, in a recipe's options, in files that are pushed.

A config and the options of a recipe are written down with every run and pushed with it, so a secret among them is
refused when they are built. It is known by its name (`token`, `password`, `api_key`), by its form (a token of the Hub
or of another service, a password in an address, a private key), or because it is the value of an environment variable
that is named like one. What needs a secret finds it in the environment, where it belongs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["known_secrets", "secret_problems"]

SHORTEST_SECRET = 8
LARGEST_PLAIN_NUMBER = 999
SECRET_NAME = re.compile(
    r"(?i)^(.*_)?(password|passwd|passphrase|secret|secret_key|api_?key|access_key|private_key|credentials?)$"
    r"|^(auth|access|api|bearer|hf|hub|hugging_?face|use_auth|github|gitlab|wandb|session|user)?_?token$"
)
SECRET_VARIABLE = re.compile(r"(?:^|_)(?:TOKEN|PASSWORD|PASSWD|SECRET|SECRET_KEY|API_?KEY|ACCESS_KEY)$")
FORMS = re.compile(
    r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abps]-[\w-]{20,}|://[^/\s:@]+:[^/\s@]+@"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
WORDS_THAT_ARE_NONE = frozenset({"true", "false", "none", "null"})


def secret_problems(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a sentence for each secret among named values, also inside of lists and mappings; it is not quoted."""
    secrets = known_secrets()
    for name, value in values.items():
        for where, kind in _found(str(name), value, secrets):
            yield (
                f"{prefix}{where} holds {kind}. It would be written into the run's folder and pushed with it: leave it "
                "out, and give it in an environment variable (HF_TOKEN for the Hub)."
            )


def known_secrets() -> dict[str, str]:
    """Return the values of environment variables that are named like secrets, with their names."""
    found = {name: value.strip() for name, value in os.environ.items() if SECRET_VARIABLE.search(name.upper())}
    return {value: name for name, value in found.items() if len(value) >= SHORTEST_SECRET and not os.path.exists(value)}


def _found(name: str, value: Any, secrets: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for number, (key, item) in enumerate(value.items()):
            if kind := _secret_words(str(key), secrets):
                yield f"{name}, its key {number + 1},", kind
            else:
                yield from _found(f"{name}[{str(key)!r}]", item, secrets)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _found(f"{name}[{number}]", item, secrets)
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST_PLAIN_NUMBER:
        if SECRET_NAME.match(_last_key(name)):  # a password of digits alone
            yield name, "a secret, by its name"
    elif isinstance(value, str | os.PathLike):
        text = os.fspath(value) if not isinstance(value, str) else value
        if isinstance(text, str) and (kind := _kind(name, text, secrets)):
            yield name, kind


def _kind(name: str, text: str, secrets: Mapping[str, str]) -> str | None:
    if SECRET_NAME.match(_last_key(name)) and text.strip() and text.lower() not in WORDS_THAT_ARE_NONE:
        return "a secret, by its name"
    return _secret_words(text, secrets)


def _last_key(name: str) -> str:
    return name.rpartition("[")[2].strip("'\"]")


def _secret_words(text: str, secrets: Mapping[str, str]) -> str | None:
    """Say what secret a text holds, without quoting it; None for none."""
    if name := next((name for value, name in secrets.items() if value in text), None):
        return f"the value of {name}"
    return "what looks like a token, a key or a password" if FORMS.search(text) else None
