"""Repositories in a folder: files by their SHA-256, and one JSON file per repository with its commits and refs."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .xet import XetFolders

__all__ = ["LFS_PATTERNS", "Commit", "File", "Refusal", "Repositories", "Repository"]

LFS_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.npy", "*.npz", "*.pkl", "*.pickle", "*.h5",
                "*.onnx", "*.parquet", "*.arrow", "*.zip", "*.gz", "*.tar", "*.msgpack", "*tfevents*")  # fmt: skip
GIT_ATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LFS_PATTERNS).encode()


class Refusal(Exception):  # noqa: N818 - an answer of the server, not an error of its own
    """What the server answers instead of what it was asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        **details: object,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers, self.details = status, code, headers or {}, details


@dataclass(frozen=True)
class File:
    """One version of a file: its content's hash, and whether git or the large file storage holds it."""

    sha256: str
    size: int
    git_oid: str
    is_lfs: bool

    @classmethod
    def regular(cls, content: bytes) -> File:
        git_oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return cls(hashlib.sha256(content).hexdigest(), len(content), git_oid, is_lfs=False)

    @classmethod
    def large(cls, sha256: str, size: int) -> File:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        return cls(sha256, size, cls.regular(pointer).git_oid, is_lfs=True)

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.git_oid


@dataclass(frozen=True)
class Commit:
    """The files of a repository at one point of its history."""

    id: str
    parent: str | None
    title: str
    message: str
    date: str
    files: dict[str, File]


@dataclass
class Repository:
    """A model's or a dataset's history."""

    kind: str
    id: str
    is_private: bool
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    history: dict[str, Commit] = field(default_factory=dict)

    def at(self, revision: str) -> Commit:
        """Return the commit that a branch, a tag or a commit's id names."""
        name = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        commit_id = self.branches.get(name) or self.tags.get(name) or revision
        if commit_id not in self.history:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.history[commit_id]

    def commit(self, branch: str, files: dict[str, File], title: str, message: str = "") -> Commit:
        """Put a commit with exactly these files on top of a branch."""
        parent = self.branches.get(branch)
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        name = hashlib.sha1(repr((parent, title, time.time_ns(), sorted(files.items()))).encode()).hexdigest()
        self.history[name] = Commit(name, parent, title, message, date, files)
        self.branches[branch] = name
        return self.history[name]

    def log(self, revision: str) -> list[Commit]:
        """Return the commits up to a revision, newest first."""
        commits = [self.at(revision)]
        while commits[-1].parent is not None:
            commits.append(self.history[commits[-1].parent])
        return commits


class Repositories:
    """Everything a hub stores; what is changed under `lock` and saved outlives the server."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.RLock()
        self._folder = folder
        self._blobs = folder / "blobs"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self.xet = XetFolders(folder / "xet")
        self._repositories = {(it.kind, it.id): it for it in map(_read, folder.glob("repositories/*/*/*.json"))}

    def find(self, kind: str, repo_id: str) -> Repository | None:
        return self._repositories.get((kind, repo_id))

    def create(self, kind: str, repo_id: str, is_private: bool) -> Repository:
        """Start a repository as the Hub does, with one commit that says what is stored as LFS."""
        repository = Repository(kind, repo_id, is_private)
        repository.commit("main", {".gitattributes": self.add_regular(GIT_ATTRIBUTES)}, "initial commit")
        self.save(repository)
        self._repositories[kind, repo_id] = repository
        return repository

    def delete(self, repository: Repository) -> None:
        del self._repositories[repository.kind, repository.id]
        self._path(repository).unlink()

    def save(self, repository: Repository) -> None:
        path = self._path(repository)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps(asdict(repository)).encode())

    def add_regular(self, content: bytes) -> File:
        """Keep a file that came within a commit."""
        file = File.regular(content)
        _write(self._blobs / file.sha256, content)
        return file

    def add_large(self, content: bytes, sha256: str) -> None:
        """Keep an uploaded file if it is the one that was announced."""
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise Refusal(400, f"The bytes received have SHA-256 {found}, {sha256} was announced")
        _write(self._blobs / sha256, content)

    def has(self, sha256: str) -> bool:
        """Tell whether a large file was uploaded, either way."""
        return (self._blobs / sha256).exists() or self.xet.newest_with({sha256}) is not None

    def path_of(self, file: File) -> Path:
        """Return where a file's bytes are, after taking them out of a Xet folder if they are only there."""
        path = self._blobs / file.sha256
        with self.lock:
            if not path.exists():
                _write(path, self.xet.read(file.sha256, file.size))
        return path

    def xet_hashes(self, commit: Commit) -> dict[str, str]:
        """Return the Xet hashes, by SHA-256, of the large files that a reader of this commit gets through Xet."""
        folder = self.xet_folder(commit)
        return self.xet.hashes(folder) if folder else {}

    def xet_folder(self, commit: Commit) -> Path | None:
        """Return the Xet folder for readers of this commit."""
        return self.xet.newest_with({file.sha256 for file in commit.files.values() if file.is_lfs})

    def _path(self, repository: Repository) -> Path:
        return self._folder / "repositories" / repository.kind / f"{repository.id}.json"


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.{threading.get_ident()}")
    part.write_bytes(content)
    os.replace(part, path)


def _read(path: Path) -> Repository:
    stored = json.loads(path.read_text())
    for commit in stored["history"].values():
        commit["files"] = {name: File(**file) for name, file in commit["files"].items()}
    stored["history"] = {name: Commit(**commit) for name, commit in stored["history"].items()}
    return Repository(**stored)
