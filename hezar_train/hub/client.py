"""Talk to the Hub: addresses, the verbs of one repository, waits between attempts, and texts without secrets.

This is the one place that uses the client library, unmodified; its errors become ours. It is imported when a repository
is first used, so that importing this module is cheap and opens no socket. The endpoint is that of `HF_ENDPOINT` at the
moment of the call; tokens come from where the client finds them. Whether to try again is the caller's affair:
`HubUnreachableError` says that it may help, `Pace` how long to wait.

A place on the Hub is written `owner/name[@revision]` or `hub://owner/name[@revision][#step]`. Every text that comes
from the client, the server or the command line goes through `redact` before it is kept or shown: tokens, and the
signatures in the addresses of uploads, must never be written down.
"""

from __future__ import annotations

import base64
import functools
import html
import io
import json
import os
import random
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from hezar_train.config.credentials import HIDDEN, known_secrets, without_secrets
from hezar_train.config.files import load_json
from hezar_train.errors import ConfigError, HubError
from hezar_train.hub import limits
from hezar_train.hub.limits import Meter, within

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

__all__ = [
    "SCHEME",
    "Commit",
    "Head",
    "HubAddress",
    "HubUnreachableError",
    "Pace",
    "Repository",
    "is_hub_address",
    "names_hub_weights",
    "parse_address",
    "parse_repo_id",
    "redact",
    "refuse_secrets",
]

SCHEME = "hub://"
EXPECTED = "expected hub://owner/name, hub://owner/name@revision or hub://owner/name@revision#step"
HEADERS_OF_FORM = frozenset({"content-encoding", "content-length", "transfer-encoding"})
MOST_BYTES = 1 << 62
HUBS_OWN = (".huggingface.co", ".hf.co")
XET_VARIABLE = "HEZAR_TRAIN_XET"
NO_CACHE = ".no-cache"  # a folder that is never made
COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
LONGEST_STEP = 20
LONGEST_NAME = 96  # what the Hub allows for each part
LONGEST_ADDRESS = 250
PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")

TRANSIENT_STATUSES = frozenset({408, 409, 412, 421, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524})
LONGEST_MESSAGE = 600
ADVICE_OF_CLIENT = re.compile(r"For more information check: \S+")
LOGIN_ADVICE = "Log in with `hf auth login`, or set HF_TOKEN to a token that may write there."

TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{12,}")
BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",;]{6,}")
USER_IN_URL = re.compile(r"(?i)\b(https?://)[^/\s@]+@")
QUERY = re.compile(r"(?i)\b(https?://[^\s'\"<>?]+)\?[^\s'\"<>)]+")
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
SHORTEST_SECRET = 6
SHORTEST_PUSHED_SECRET = 8
TOKEN_START = b"hf_"
WHOLE_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}")
WEIGHT_SUFFIXES = frozenset({".safetensors"})
PIECE_BYTES, OVERLAP_BYTES = 1 << 20, 1 << 12
ESCAPED_SPACE = re.compile(rb"\\[nrt]")
NO_LETTERS = bytes(code for code in range(128) if not chr(code).isalnum())
FEWEST_LETTERS = 12

_chance = random.SystemRandom()  # never the global generator: that is the training's


@dataclass(frozen=True)
class HubAddress:
    """A repository, a revision of it (None: its main branch) and the step of a checkpoint (None: the newest)."""

    repo_id: str
    revision: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{SCHEME}{self.repo_id}{revision}" + ("" if self.step is None else f"#{self.step}")


def is_hub_address(value: object) -> bool:
    """Tell whether a setting means a place on the Hub rather than a path."""
    return isinstance(value, str) and value.startswith(SCHEME)


def names_hub_weights(value: str | os.PathLike[str]) -> bool:
    """Tell whether `init_weights_from` means a repository: `hub://...`, or `owner/name` where no such path exists."""
    if not isinstance(value, str):
        return False
    if is_hub_address(value):
        return True
    # The form first: the system refuses to look for a name of thousands of letters.
    return not _repo_id_problems(value.partition("@")[0]) and len(value) <= LONGEST_ADDRESS and not Path(value).exists()


def parse_address(text: str) -> HubAddress:
    """Read an address, with or without `hub://`; the error says which part is wrong."""
    rest, has_step, step = text.removeprefix(SCHEME).partition("#")
    repo_id, has_revision, revision = rest.partition("@")
    if problems := list(_repo_id_problems(repo_id)):
        raise ConfigError(f"{text!r}: {problems[0]}; {EXPECTED}")
    if has_revision and (not REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(f"{text!r}: {revision!r} is no name of a branch, tag or commit; {EXPECTED}")
    if has_step and not (step.isascii() and step.isdigit() and len(step) < LONGEST_STEP):
        raise ConfigError(f"{text[:200]!r}: the step after '#' must be a whole number, got {step[:80]!r}; {EXPECTED}")
    return HubAddress(repo_id, revision or None, int(step) if has_step else None)


def parse_repo_id(text: str) -> str:
    """Return `owner/name` as given, or say what is wrong with it."""
    if problems := list(_repo_id_problems(text)):
        raise ConfigError(f"{text!r}: {problems[0]}; expected owner/name")
    return text


def _repo_id_problems(repo_id: str) -> list[str]:
    parts = repo_id.split("/")
    if len(parts) != 2:
        return [f"{repo_id!r} has {len(parts) - 1} slashes, a repository has one"]
    wrong = [part for part in parts if not PART.fullmatch(part) or len(part) > LONGEST_NAME or "--" in part]
    wrong += [part for part in parts if ".." in part or part.endswith(".git")]
    return [f"{part!r} is no name that the Hub allows (letters, digits, '-', '_' and '.')" for part in wrong]


class HubUnreachableError(HubError):
    """The Hub did not do it now, and may later; `retry_after_seconds` is what it asked for."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True)
class Head:
    """The newest commit of a revision: its id and its files with their sizes (None where they were not asked for)."""

    oid: str | None
    files: dict[str, int | None]


@dataclass(frozen=True)
class Commit:
    """A commit that is on the Hub."""

    oid: str
    url: str


def _head_of(answer: Any, repo_id: str) -> Head:
    """Read what the Hub says of a repository; whatever is of another type than it should be is refused."""
    found = answer if isinstance(answer, dict) else {}
    oid, listed = found.get("sha"), found.get("siblings") or []
    if oid is not None and not (isinstance(oid, str) and COMMIT.fullmatch(oid)):
        raise HubError(f"the Hub's repository {repo_id} has a commit with an id that is none: {str(oid)[:80]!r}.")
    is_list = isinstance(listed, list) and all(isinstance(one, dict) for one in listed)
    files = {one.get("rfilename"): one.get("size") for one in listed if _is_file(one)} if is_list else {}
    if not isinstance(answer, dict) or not is_list or not all(map(_is_file, listed)):
        raise HubError(f"the Hub's answer about {repo_id} is not a list of files with their sizes.")
    return Head(oid, files)


def _is_file(one: Mapping[str, Any]) -> bool:
    name, size = one.get("rfilename"), one.get("size")
    return isinstance(name, str) and (size is None or (type(size) is int and 0 <= size < MOST_BYTES))


class Repository:
    """One repository at one revision."""

    def __init__(self, repo_id: str, revision: str | None = None, repo_type: str = "model") -> None:
        from huggingface_hub import HfApi

        self.repo_id, self.revision, self.repo_type = repo_id, revision, repo_type
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        _refuse_xet_of_others(self._api.endpoint)

    def ensure(self, private: bool | None) -> None:
        """Make the repository and the branch, where they do not exist."""
        given: dict[str, Any] = {"repo_type": self.repo_type, "exist_ok": True}
        make = functools.partial(self._api.create_repo, self.repo_id, private=private, **given)
        branch = functools.partial(self._api.create_branch, self.repo_id, branch=str(self.revision), **given)
        with self._translated_errors("could not be made"):
            within(limits.ANSWER_SECONDS, make)
            if self.revision not in (None, "main"):
                within(limits.ANSWER_SECONDS, branch)

    def head(self, *, sizes: bool = False) -> Head:
        """Ask for the newest commit and its files."""
        with self._translated_errors("could not be read"):
            return _head_of(load_json(within(limits.ANSWER_SECONDS, lambda: self._info(sizes))), self.repo_id)

    def _info(self, sizes: bool) -> bytes:
        """Ask as the client's `repo_info` does, which would read an answer of any length and believe its types."""
        import httpx2
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        at = "" if self.revision is None else f"/revision/{quote(self.revision, safe='')}"
        address = f"{self._api.endpoint}/api/{self.repo_type}s/{self.repo_id}{at}"
        with get_session().stream(
            "GET", address, headers=build_hf_headers(), params={"blobs": True} if sizes else {},
            timeout=limits.ANSWER_SECONDS,
        ) as answer:  # fmt: skip
            content = limits.limited(answer.iter_bytes())
        told = {name: value for name, value in answer.headers.items() if name.lower() not in HEADERS_OF_FORM}
        hf_raise_for_status(httpx2.Response(answer.status_code, headers=told, content=content, request=answer.request))
        return content

    def download(self, name: str, folder: Path, oid: str | None, most_bytes: int = limits.SMALL_BYTES) -> Path:
        """Download one file of a commit, of so many bytes at most, to its path below a folder.

        The caller answers for the name. Nothing is written outside of the folder: not the client's cache, whose places
        are made of what the server answers, and nothing is taken from there.
        """
        meter = Meter(most_bytes)
        download = functools.partial(
            self._api.hf_hub_download, self.repo_id, name, revision=oid or self.revision, repo_type=self.repo_type,
            local_dir=folder, cache_dir=folder / NO_CACHE, tqdm_class=meter.progress_class(),
        )  # fmt: skip
        with self._translated_errors(f"did not give {name}"):
            found = Path(within(limits.download_seconds(most_bytes), download, meter))
        if found.stat().st_size > most_bytes:
            found.unlink()
            raise HubError(f"the Hub's repository {self.repo_id} gave {name} with more than {most_bytes:,} bytes.")
        return found

    @staticmethod
    def cache(cache_dir: str | os.PathLike[str] | None = None) -> Path:
        """Return the folder of what is kept from the Hub, made if need be."""
        from huggingface_hub import constants

        folder = Path(constants.HF_HUB_CACHE if cache_dir is None else cache_dir) / "hezar_train"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def cached(
        self,
        name: str,
        oid: str,
        cache_dir: str | os.PathLike[str] | None = None,
        most_bytes: int = limits.SMALL_BYTES,
    ) -> Path:
        """Download one file of a commit into a folder of that commit in the cache, if it is not there."""
        if not COMMIT.fullmatch(oid):
            raise HubError(f"the Hub's repository {self.repo_id} has a commit with an id that is none: {oid!r}.")
        folder = self.cache(cache_dir) / f"{self.repo_type}s--{self.repo_id.replace('/', '--')}" / oid
        target = folder / name
        return target if target.is_file() else self.download(name, folder, oid, most_bytes)

    def commit(
        self, files: Mapping[str, Path | bytes], gone: Collection[str], message: str, parent: str | None
    ) -> Commit:
        """Add and delete files in one commit on top of `parent`; files that are there already are not sent again."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        refuse_secrets(files, message)
        with self._translated_errors("did not take the commit"):
            sources = {name: source if isinstance(source, bytes) else str(source) for name, source in files.items()}
            additions = [CommitOperationAdd(name, source) for name, source in sources.items()]
            deletions = [CommitOperationDelete(name, is_folder=False) for name in gone]
            create = functools.partial(
                self._api.create_commit, self.repo_id, [*additions, *deletions], commit_message=message,
                repo_type=self.repo_type, revision=self.revision, parent_commit=parent, num_threads=2,
            )  # fmt: skip
            done = within(limits.upload_seconds(sum(map(_size, files.values()))), create)
            return Commit(str(done.oid), str(done.commit_url))

    @contextmanager
    def _translated_errors(self, what: str) -> Iterator[None]:
        """Turn the client's errors into ours, in one line without secrets."""
        import httpx2
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        words = f"the Hub's repository {self.repo_id} {what}"
        try:
            with _quiet():
                yield
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise HubError(f"{words}: {_line(error)} {LOGIN_ADVICE}") from None
        except LocalEntryNotFoundError as error:  # what the client says when the server does not answer
            raise HubUnreachableError(f"{words}: {_line(error)} {self._where_to_look()}") from None
        except HfHubHTTPError as error:
            raise _error_of_status(words, error) from None
        except EntryNotFoundError as error:
            raise HubError(f"{words}: {_line(error)}") from None
        except OfflineModeIsEnabled as error:
            raise HubError(f"{words}: {_line(error)} Unset HF_HUB_OFFLINE to reach it.") from None
        except (httpx2.TransportError, httpx2.InvalidURL, ConnectionError, TimeoutError) as error:
            raise HubUnreachableError(f"{words}: {_line(error)} {self._where_to_look()}") from None
        except (httpx2.HTTPError, OSError, RuntimeError) as error:  # the last: what Xet raises
            raise HubUnreachableError(f"{words}: {_line(error)}") from None
        except (AttributeError, LookupError, TypeError) as error:  # what the client does with an answer of another form
            raise HubError(f"{words}: the answer is not of the form that the Hub gives: {_line(error)}") from None
        except ValueError as error:  # a name, or metadata of the card, that the Hub does not allow
            raise HubError(f"{words}: {_line(error)}") from None

    def _where_to_look(self) -> str:
        return f"{redact(self._api.endpoint)} was asked: check the network and HF_ENDPOINT."


def _size(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _refuse_xet_of_others(endpoint: str) -> None:
    """Let large files come and go as LFS does it, unless the server is the Hub's own: all servers can.

    A server tells Xet's client where the bytes are stored, and that may be a folder of this machine, which is then made
    and written to. The client looks the place up by itself, where nothing of ours can hold it against a rule.
    """
    from huggingface_hub import constants

    place = urlsplit(endpoint)
    is_own = place.scheme == "https" and f".{place.hostname}".endswith(HUBS_OWN)
    if not is_own and os.environ.get(XET_VARIABLE) != "1":
        constants.HF_HUB_DISABLE_XET = True


def _error_of_status(words: str, error: HfHubHTTPError) -> HubError:
    status = error.response.status_code
    if status in TRANSIENT_STATUSES:
        return HubUnreachableError(f"{words}: {_line(error)}", _retry_after_seconds(error))
    advice = f" {LOGIN_ADVICE}" if status in {401, 403} else ""
    return HubError(f"{words}: {_line(error)}{advice}")


def _retry_after_seconds(error: HfHubHTTPError) -> float:
    value = error.response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0


def _line(error: BaseException) -> str:
    words = " ".join(ADVICE_OF_CLIENT.sub("", redact(f"{type(error).__name__}: {error}")).split())
    words = words if len(words) <= LONGEST_MESSAGE else words[:LONGEST_MESSAGE] + " ..."
    return words if words.endswith(".") else f"{words}."


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the client's progress bars off the screen, where the training's own is."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@dataclass(frozen=True)
class Pace:
    """The waits between attempts; a failure is one attempt that came to nothing."""

    first_seconds: float = 1.0
    longest_seconds: float = 60.0
    breaker_failures: int = 5
    """Failures in a row after which the breaker opens."""
    breaker_seconds: float = 300.0
    """The wait while it is open; it doubles with each further failure, up to eight times."""
    closing_seconds: float = 5.0
    """The longest wait once the program is about to end."""
    attempt_seconds: float = 600.0
    """How long one attempt may last before it is given up, besides the time for its bytes."""
    least_bytes_per_second: float = 1e6

    def is_open(self, failures: int) -> bool:
        """Tell whether the breaker is open."""
        return failures >= self.breaker_failures

    def delay_seconds(self, failures: int, asked_seconds: float = 0.0) -> float:
        """Return the wait after so many failures in a row; at least what the server asked for."""
        if self.is_open(failures):
            wait = self.breaker_seconds * 2.0 ** min(failures - self.breaker_failures, 3)
        else:
            wait = min(self.first_seconds * 2.0 ** (failures - 1), self.longest_seconds)
        return max(wait * _chance.uniform(0.5, 1.0), min(asked_seconds, self.breaker_seconds))

    def attempt_limit_seconds(self, nbytes: int) -> float:
        """Return how long an attempt over so many bytes may last."""
        return self.attempt_seconds + nbytes / self.least_bytes_per_second


def refuse_secrets(files: Mapping[str, Path | bytes], message: str = "") -> None:
    """Raise if something that is about to be pushed, or its name, holds a token or another secret that we know."""
    known = _known_secrets()
    as_written = {form: name for value, name in known.items() for form in _written_forms(value)}
    as_they_are = {_bytes(value): name for value, name in known.items()}
    for text in (message, *files):
        if kind := _secret_in_text(_bytes(text), as_written):
            what = "the message" if text == message else "the name of a file"
            raise HubError(f"nothing of this push is sent: {what} holds {kind}. Take it out.")
    for name, source in files.items():
        for piece, is_text in _pieces(source, is_weights=Path(name).suffix in WEIGHT_SUFFIXES):
            if kind := _secret_in_text(piece, as_written) if is_text else _secret_in(piece, as_they_are):
                raise HubError(
                    f"{name} is not pushed, and nothing else of this push is: it holds {kind}. Take it out of the "
                    "file, and if it was ever pushed before, make it invalid where it was issued."
                )


def _secret_in(piece: bytes, secrets: Mapping[bytes, str]) -> str | None:
    """Say what secret a piece of a file holds. Of forms only the Hub's own counts: texts of a dataset have others."""
    found = (name for value, name in secrets.items() if value in piece)
    has_token = TOKEN_START in piece and WHOLE_TOKEN.search(piece)
    return next(found, "what looks like a token of the Hub" if has_token else None)


def _secret_in_text(piece: bytes, secrets: Mapping[bytes, str]) -> str | None:
    """Find also a secret that a text has over two lines, with spaces, quotes or marks of its own in between."""
    if kind := _secret_in(piece, secrets):
        return kind
    letters = ESCAPED_SPACE.sub(b"", piece).translate(None, NO_LETTERS)
    bare = {value.translate(None, NO_LETTERS): name for value, name in secrets.items()}
    return next((name for one, name in bare.items() if len(one) >= FEWEST_LETTERS and one in letters), None)


def _known_secrets() -> dict[str, str]:
    """Return the secrets of the environment, and the client's own token, with their names."""
    from huggingface_hub import get_token

    own = get_token() or ""
    return {**known_secrets(), **({own: "your token for the Hub"} if len(own) >= SHORTEST_PUSHED_SECRET else {})}


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _written_forms(secret: str) -> set[bytes]:
    """Return a secret as it may stand in a text: as it is, in JSON or quoted YAML, an address, HTML, base64."""
    in_json = {json.dumps(secret, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)}
    texts = {secret, *in_json, quote(secret), quote(secret, safe=""), html.escape(secret)}
    # Arrays of texts have four bytes a letter, and are kept in base64.
    raw = [_bytes(secret), *(secret.encode(wide, "surrogatepass") for wide in ("utf-16-le", "utf-32-le"))]
    return {*map(_bytes, texts), *raw, *(form for one in raw for form in _in_base64(one))}


def _in_base64(secret: bytes) -> Iterator[bytes]:
    """Yield what a text that holds a secret has of it in base64, whatever stands before it."""
    for start in range(3):
        whole = base64.b64encode(b"\0" * start + secret).rstrip(b"=")
        inner = whole[2 * (start > 0) + (start > 1) : -1]  # its ends depend on the bytes beside them
        if len(inner) >= SHORTEST_PUSHED_SECRET:
            yield inner


def _pieces(source: Path | bytes, *, is_weights: bool) -> Iterator[tuple[bytes, bool]]:
    """Yield a file in pieces that overlap, so that no secret lies across two of them, and whether each is text.

    Of a file of weights the header is.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        before, position = b"", 0
        header_end = int.from_bytes(file.read(8), "little") + 8 if is_weights else sys.maxsize
        file.seek(0)
        while piece := file.read(PIECE_BYTES):
            yield before + piece, position < header_end
            before, position = piece[-OVERLAP_BYTES:], position + len(piece)


def redact(text: str) -> str:
    """Return a text without tokens, passwords in addresses, and signed queries."""
    for secret in filter(None, map(os.environ.get, TOKEN_VARIABLES)):
        if len(secret) >= SHORTEST_SECRET:  # whatever form it has
            text = text.replace(secret, HIDDEN)
    text = without_secrets(text)
    text = BEARER.sub(rf"\1 {HIDDEN}", TOKEN.sub(HIDDEN, text))
    return QUERY.sub(r"\1?...", USER_IN_URL.sub(rf"\1{HIDDEN}@", text))
