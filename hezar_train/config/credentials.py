"""Find tokens, passwords and keys where they must not be: in configs, in a recipe's options, in files that are pushed.

A config and the options of a recipe are written down with every run and pushed with it, so a secret among them is
refused when they are built. It is known by its name (`token`, `password`, `api_key`, in any spelling), by its form (a
token of the Hub or of another service, a password in an address, a private key), or because it is the value of an
environment variable that is named like one. What needs a secret finds it in the environment, where it belongs. A
command line is written down, too; it was typed already, so there a secret is hidden instead.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["HIDDEN", "known_secrets", "secret_problems", "shown_arguments", "without_secrets"]

HIDDEN = "***"
SHORTEST_SECRET = 8
SHORTEST_KEY = 16
LARGEST_PLAIN_NUMBER = 999
SECRET_NAME = re.compile(
    r"(.*_)?(password|passwd|pwd|passphrase|passcode|secret|secret_key|api_?key|access_?key|private_?key|credentials?)"
    r"|(auth|access|api|bearer|hf|hub|hugging_?face|use_auth|github|gitlab|wandb|session|user)?_?token|authorization"
)
NAME_OF_A_KEY = re.compile(r"(.*_)?(token|key|pat|auth)")
"""Names of which only the value tells whether it is a secret: `pad_token`, `bot_token`, `sort_key`, `OPENAI_KEY`."""
RANDOM = re.compile(rf"(?=(?:.*[0-9]){{4}})(?=.*[A-Za-z])[A-Za-z0-9_.:+=-]{{{SHORTEST_KEY},}}")
WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
SECRET_VARIABLE = re.compile(
    r"(?:.*_)?(?:TOKEN|PASSWORD|PASSWD|PWD|PASSPHRASE|SECRET|SECRET_KEY|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)"
    r"|PGPASSWORD|SSHPASS"
)
FOLDER_VARIABLES = frozenset({"PWD", "OLDPWD"})
FORMS = re.compile(
    r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abps]-[\w-]{20,}|(?<=://)(?:[^/\s:@]+:[^/\s@]+|[^/\s:@]{20,})(?=@)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
WORDS_THAT_ARE_NONE = frozenset({"true", "false", "none", "null"})
ARGUMENT = re.compile(r"(-{0,2}(?:[\w-]+\.)*(?P<name>[A-Za-z][\w-]*))(?:=(?P<value>.*))?", re.DOTALL)


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
    found = {name: value.strip() for name, value in os.environ.items() if _is_secret_variable(name.upper(), value)}
    return {value: name for name, value in found.items() if len(value) >= SHORTEST_SECRET and not os.path.exists(value)}


def without_secrets(text: str) -> str:
    """Return a text in which secrets that are known by their form, or from the environment, are hidden."""
    for secret in sorted(known_secrets(), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return FORMS.sub(HIDDEN, text)


def shown_arguments(arguments: Iterable[str]) -> Iterator[str]:
    """Yield the arguments of a command as they may be written down, the values of those hidden that name a secret."""
    name = ""
    for argument in arguments:
        is_value = bool(name) and not argument.startswith("-")
        if is_value and _names_secret(name, argument):
            yield HIDDEN
            name = ""
            continue
        found = ARGUMENT.fullmatch(argument)
        name = found["name"] if found and found["value"] is None and argument.startswith("-") else ""
        if found and found["value"] and _names_secret(found["name"], found["value"]):
            yield f"{found[1]}={HIDDEN}"
        else:
            yield shlex.quote(without_secrets(argument))


def _is_secret_variable(name: str, value: str) -> bool:
    if name in FOLDER_VARIABLES:
        return False
    return bool(SECRET_VARIABLE.fullmatch(name)) or _is_key(name, value)


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
        if SECRET_NAME.fullmatch(_in_words(_last_key(name))):  # a password of digits alone
            yield name, "a secret, by its name"
    elif isinstance(value, str | os.PathLike):
        text = os.fspath(value) if not isinstance(value, str) else value
        if isinstance(text, str) and (kind := _kind(name, text, secrets)):
            yield name, kind


def _kind(name: str, text: str, secrets: Mapping[str, str]) -> str | None:
    if _names_secret(_last_key(name), text):
        return "a secret, by its name"
    return _secret_words(text, secrets)


def _names_secret(name: str, text: str) -> bool:
    if not text.strip() or text.lower() in WORDS_THAT_ARE_NONE:
        return False
    return bool(SECRET_NAME.fullmatch(_in_words(name))) or _is_key(name, text)


def _is_key(name: str, text: str) -> bool:
    """Tell whether a name that may be that of a secret has a value that looks drawn at random."""
    return bool(NAME_OF_A_KEY.fullmatch(_in_words(name)) and RANDOM.fullmatch(text.strip()))


def _in_words(name: str) -> str:
    """Return a name in small letters with its words apart: `apiKey`, `API-KEY` and `api key` are `api_key`."""
    return WORD_BORDER.sub("_", name).strip("_").lower()


def _last_key(name: str) -> str:
    return name.rpartition("[")[2].strip("'\"]")


def _secret_words(text: str, secrets: Mapping[str, str]) -> str | None:
    """Say what secret a text holds, without quoting it; None for none."""
    if name := next((name for value, name in secrets.items() if value in text), None):
        return f"the value of {name}"
    return "what looks like a token, a key or a password" if FORMS.search(text) else None
