"""What the hub answers: one function per address, as the Hub's client expects it."""

from __future__ import annotations

import base64
import codecs
import fnmatch
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import parse_qs

from .connection import Answer, Call
from .repositories import LFS_PATTERNS, Commit, File, Refusal

__all__ = ["Route", "find_route"]

API = r"/api/(?P<kind>models|datasets)/(?P<owner>[^/]+)/(?P<name>[^/]+)"
WEB = r"/(?:(?P<kind>datasets)/)?(?P<owner>[^/]+)/(?P<name>[^/]+)"
STORED = r"/storage/(?P<sha256>[0-9a-f]{64})"
REVISION = r"/(?P<revision>[^/]+)"
LARGE_BYTES = 10 * 1024 * 1024
FAR_FUTURE_SECONDS = 10**6


class Route(NamedTuple):
    """An address, its name in the faults and in the log, and the function that answers."""

    name: str
    methods: tuple[str, ...]
    pattern: str
    function: Callable[[Call], Answer]
    needs_token: bool

    def call(self, call: Call) -> Answer:
        """Answer a request, if the caller may make it."""
        token = call.headers.get("Authorization")
        call.is_member = token == f"Bearer {call.hub.token}"
        if token is not None and not call.is_member:
            raise Refusal(401, "Invalid credentials in Authorization header")
        if self.needs_token and not call.is_member:
            raise Refusal(401, "Invalid username or password.")
        return self.function(call)


ROUTES: list[Route] = []


def route(name: str, methods: str, pattern: str, needs_token: bool = False) -> Callable:
    """Let a function answer at an address."""

    def add(function: Callable[[Call], Answer]) -> Callable[[Call], Answer]:
        ROUTES.append(Route(name, tuple(methods.split()), pattern, function, needs_token))
        return function

    return add


def find_route(method: str, path: str) -> tuple[Route, dict[str, str]]:
    """Return who answers at an address, and the names in it."""
    for known in ROUTES:
        if method in known.methods and (match := re.fullmatch(known.pattern, path)):
            return known, match.groupdict()
    return Route("other", (), "", _nothing, needs_token=False), {}


def _nothing(call: Call) -> Answer:
    raise Refusal(404, "Nothing is served here")


@route("whoami", "GET", "/api/whoami-v2", needs_token=True)
def whoami(call: Call) -> Answer:
    access = {"type": "access_token", "accessToken": {"displayName": "loopback", "role": "write"}}
    return Answer({"type": "user", "id": "1", "name": call.hub.user, "fullname": "", "orgs": [], "auth": access})


@route("create", "POST", "/api/repos/create", needs_token=True)
def create(call: Call) -> Answer:
    kind, repo_id = _named_repository(call)
    url = f"{call.hub.url}/{'' if kind == 'models' else f'{kind}/'}{repo_id}"
    is_private = bool(call.json.get("private")) or call.json.get("visibility") == "private"
    with call.store.lock:
        if call.store.find(kind, repo_id):
            return Answer({"error": "You already created this repository", "url": url}, 409)
        call.store.create(kind, repo_id, is_private)
    return Answer({"url": url, "name": repo_id})


@route("delete", "DELETE", "/api/repos/delete", needs_token=True)
def delete(call: Call) -> Answer:
    with call.store.lock:
        repository = call.store.find(*_named_repository(call))
        if repository is None:
            raise Refusal(404, "Repository not found", "RepoNotFound")
        call.store.delete(repository)
    return Answer()


def _named_repository(call: Call) -> tuple[str, str]:
    owner = call.json.get("organization") or call.hub.user
    return f"{call.json.get('type') or 'model'}s", f"{owner}/{call.json['name']}"


@route("info", "GET", f"{API}(?:/revision{REVISION})?")
def info(call: Call) -> Answer:
    repository, commit, has_blobs = call.repository, call.commit, "blobs" in call.query
    return Answer({
        "id": repository.id, "author": call.names["owner"], "sha": commit.id, "private": repository.is_private,
        "createdAt": repository.log(commit.id)[-1].date, "lastModified": commit.date,
        "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [],
        "siblings": [_sibling(path, file, has_blobs) for path, file in sorted(commit.files.items())],
    })  # fmt: skip


def _sibling(path: str, file: File, has_blobs: bool) -> dict[str, object]:
    if not has_blobs:
        return {"rfilename": path}
    lfs = {"lfs": {"sha256": file.sha256, "size": file.size, "pointerSize": 130}} if file.is_lfs else {}
    return {"rfilename": path, "size": file.size, "blobId": file.git_oid, **lfs}


@route("tree", "GET", f"{API}/tree{REVISION}(?:/(?P<path>.+))?")
def tree(call: Call) -> Answer:
    commit, folder = call.commit, call.names.get("path", "")
    entries = _entries(call, commit)
    inside = [entry for entry in entries if not folder or entry["path"].startswith(f"{folder}/")]
    if folder and not inside:
        raise Refusal(404, f"{folder} does not exist on {commit.id}", "EntryNotFound")
    if call.query.get("recursive", ["false"])[0].lower() in {"false", "0"}:
        inside = [entry for entry in inside if str(PurePosixPath(entry["path"]).parent) == (folder or ".")]
    return Answer(inside)


@route("paths_info", "POST", f"{API}/paths-info{REVISION}")
def paths_info(call: Call) -> Answer:
    wanted = parse_qs(call.body.decode()).get("paths", [])
    return Answer([entry for entry in _entries(call, call.commit) if entry["path"] in wanted])


def _entries(call: Call, commit: Commit) -> list[dict[str, object]]:
    folders = {str(parent) for path in commit.files for parent in PurePosixPath(path).parents} - {"."}
    entries = [{"type": "directory", "path": folder, "oid": commit.id, "size": 0} for folder in folders]
    xet_hashes = call.store.xet_hashes(commit)
    for path, file in commit.files.items():
        entry = {"type": "file", "path": path, "oid": file.git_oid, "size": file.size}
        if file.is_lfs:
            entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 130}
        if file.is_lfs and file.sha256 in xet_hashes:
            entry["xetHash"] = xet_hashes[file.sha256]
        entries.append(entry)
    return sorted(entries, key=lambda entry: str(entry["path"]))


@route("refs", "GET", f"{API}/refs")
def refs(call: Call) -> Answer:
    def listed(kind: str, names: dict[str, str]) -> list[dict[str, str]]:
        return [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": to} for name, to in list(names.items())]

    repository = call.repository
    named = {"branches": listed("heads", repository.branches), "tags": listed("tags", repository.tags)}
    return Answer({**named, "converts": [], "pullRequests": []})


@route("commits", "GET", f"{API}/commits{REVISION}")
def commits(call: Call) -> Answer:
    log = [asdict(commit) for commit in call.repository.log(call.names["revision"])]
    return Answer([{**commit, "files": None, "authors": [{"user": call.hub.user}]} for commit in log])


@route("branch", "POST DELETE", f"{API}/branch{REVISION}", needs_token=True)
def branch(call: Call) -> Answer:
    return _change_ref(call, call.repository.branches, call.names["revision"], call.json.get("startingPoint", "main"))


@route("tag", "POST DELETE", f"{API}/tag{REVISION}", needs_token=True)
def tag(call: Call) -> Answer:
    return _change_ref(call, call.repository.tags, call.json.get("tag", call.names["revision"]), call.names["revision"])


def _change_ref(call: Call, names: dict[str, str], name: str, revision: str) -> Answer:
    with call.store.lock:
        if call.method == "DELETE" and name not in names:
            raise Refusal(404, f"Invalid rev id: {name}", "RevisionNotFound")
        if call.method == "DELETE":
            del names[name]
        elif name in names:
            raise Refusal(409, f"Reference already exists: {name}")
        else:
            names[name] = call.repository.at(revision).id
        call.store.save(call.repository)
    return Answer()


@route("validate_yaml", "POST", "/api/validate-yaml")
def validate_yaml(call: Call) -> Answer:
    return Answer({"errors": [], "warnings": []})


@route("preupload", "POST", f"{API}/preupload{REVISION}", needs_token=True)
def preupload(call: Call) -> Answer:
    known = call.commit.files
    return Answer({"files": [
        {"path": file["path"], "uploadMode": "lfs" if _is_large(file) else "regular", "shouldIgnore": False,
         "oid": known[file["path"]].etag if file["path"] in known else None}
        for file in call.json["files"]
    ]})  # fmt: skip


def _is_large(file: dict) -> bool:
    if file["size"] >= LARGE_BYTES or any(fnmatch.fnmatch(file["path"], pattern) for pattern in LFS_PATTERNS):
        return True
    sample = base64.b64decode(file["sample"])
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return True
    return b"\0" in sample


@route("lfs_batch", "POST", rf"{WEB}\.git/info/lfs/objects/batch", needs_token=True)
def lfs_batch(call: Call) -> Answer:
    objects = [{**it, **_upload_actions(call, it["oid"], it["size"])} for it in call.json["objects"]]
    return Answer({"transfer": "basic", "objects": objects})


def _upload_actions(call: Call, sha256: str, size: int) -> dict[str, object]:
    if call.store.has(sha256):
        return {}
    url, part_bytes = f"{call.hub.storage_url}/{sha256}", call.hub.part_bytes
    upload = {"href": url}
    if size > part_bytes:
        numbers = range(1, -(-size // part_bytes) + 1)
        parts = {str(number): f"{url}/{number}" for number in numbers}
        upload = {"href": f"{url}/complete", "header": {"chunk_size": str(part_bytes), **parts}}
    return {"actions": {"upload": upload, "verify": {"href": f"{call.hub.url}/storage/{sha256}/verify"}}}


@route("lfs_put", "PUT", rf"{STORED}(?:/(?P<part>\d+))?")
def lfs_put(call: Call) -> Answer:
    sha256, part = call.names["sha256"], call.names.get("part")
    if part is None:
        call.store.add_large(call.body, sha256)
    else:
        call.hub.parts[sha256, int(part)] = call.body
    return Answer(headers={"ETag": f'"{sha256[:16]}-{part or 0}"'})


@route("lfs_complete", "POST", f"{STORED}/complete")
def lfs_complete(call: Call) -> Answer:
    sha256 = call.names["sha256"]
    if not call.store.has(sha256):
        parts = [call.hub.parts.pop((sha256, it["partNumber"]), b"") for it in call.json["parts"]]
        call.store.add_large(b"".join(parts), sha256)
    return Answer()


@route("lfs_verify", "POST", f"{STORED}/verify", needs_token=True)
def lfs_verify(call: Call) -> Answer:
    _require_uploaded(call)
    return Answer()


@route("lfs_get", "GET HEAD", rf"{STORED}/(?P<size>\d+)")
def lfs_get(call: Call) -> Answer:
    _require_uploaded(call)
    file = File.large(call.names["sha256"], int(call.names["size"]))
    return _content(call, file, {"ETag": f'"{file.sha256}"'})


def _require_uploaded(call: Call) -> None:
    if not call.store.has(call.names["sha256"]):
        raise Refusal(404, f"The object {call.names['sha256']} was not uploaded")


@route("xet_token", "GET", f"{API}/xet-write-token{REVISION}", needs_token=True)
def xet_write_token(call: Call) -> Answer:
    return _xet_token(call.store.xet.new())


@route("xet_token", "GET", f"{API}/xet-read-token{REVISION}")
def xet_read_token(call: Call) -> Answer:
    folder = call.store.xet_folder(call.commit)
    if folder is None:
        raise Refusal(404, "No file of this revision is stored with Xet", "EntryNotFound")
    return _xet_token(call.store.xet.copy(folder))


def _xet_token(folder: object) -> Answer:
    url, token, expires = f"local://{folder}", "loopback", int(time.time()) + FAR_FUTURE_SECONDS
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": expires}
    return Answer({"casUrl": url, "accessToken": token, "exp": expires}, headers=headers)


@route("commit", "POST", f"{API}/commit{REVISION}", needs_token=True)
def commit(call: Call) -> Answer:
    header, *changes = [json.loads(line) for line in call.body.splitlines()]
    branch_name, header = call.names["revision"], header["value"]
    with call.store.lock:
        if branch_name not in call.repository.branches:
            raise Refusal(404, f"Invalid rev id: {branch_name}", "RevisionNotFound")
        head = call.commit
        if header.get("parentCommit", head.id) != head.id:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(head.files)
        for change in changes:
            _apply(call, files, change["key"], change["value"])
        made = call.repository.commit(branch_name, files, header["summary"], header.get("description", ""))
        call.store.save(call.repository)
    url = f"{call.hub.url}/{call.repository.id}/commit/{made.id}"
    return Answer({"success": True, "commitOid": made.id, "commitUrl": url, "hookOutput": ""})


def _apply(call: Call, files: dict[str, File], key: str, value: dict) -> None:
    path = value["path"].rstrip("/")
    if not path or path.startswith("/") or {"..", ".", ".git", ""} & set(path.split("/")):
        raise Refusal(400, f"Invalid path: {path!r}")
    if key == "file":
        files[path] = call.store.add_regular(base64.b64decode(value["content"]))
    elif key == "lfsFile":
        if not call.store.has(value["oid"]):
            raise Refusal(400, f"{path} points to a large file that was never uploaded: {value['oid']}")
        files[path] = File.large(value["oid"], value["size"])
    else:
        gone = [name for name in files if name == path or (key == "deletedFolder" and name.startswith(f"{path}/"))]
        if not gone:
            raise Refusal(404, f"{path} does not exist", "EntryNotFound")
        for name in gone:
            del files[name]


@route("resolve", "GET HEAD", f"{WEB}/resolve{REVISION}/(?P<path>.+)")
def resolve(call: Call) -> Answer:
    commit, path = call.commit, call.names["path"]
    file = commit.files.get(path)
    if file is None:
        raise Refusal(404, f"{path} does not exist on {commit.id}", "EntryNotFound", {"X-Repo-Commit": commit.id})
    headers = {"X-Repo-Commit": commit.id, "ETag": f'"{file.etag}"'}
    if not file.is_lfs:
        return _content(call, file, headers)
    headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": file.size}
    headers["Location"] = f"{call.hub.storage_url}/{file.sha256}/{file.size}"
    if xet_hash := call.store.xet_hashes(commit).get(file.sha256):
        token_url = f"{call.hub.url}/api/{call.repository.kind}/{call.repository.id}/xet-read-token/{commit.id}"
        headers |= {"X-Xet-Hash": xet_hash, "Link": f'<{token_url}>; rel="xet-auth"'}
    return Answer(status=302, headers=headers)


def _content(call: Call, file: File, headers: dict[str, object]) -> Answer:
    content = call.store.path_of(file).read_bytes()
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("Range", ""))
    if wanted is None:
        return Answer(content, headers={**headers, "Accept-Ranges": "bytes"})
    first, last = int(wanted[1]), min(int(wanted[2] or file.size), file.size - 1)
    if first >= file.size:
        raise Refusal(416, "The range lies outside of the file", None, {"Content-Range": f"bytes */{file.size}"})
    headers = {**headers, "Content-Range": f"bytes {first}-{last}/{file.size}"}
    return Answer(content[first : last + 1], 206, headers)
