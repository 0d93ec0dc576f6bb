"""A server that speaks the hub's protocol for uploads, as far as huggingface_hub's client uses it."""

import base64
import hashlib
import json
from collections import Counter
from http.server import BaseHTTPRequestHandler

from local_server import OpenServer, QuietHandler

NO_ANSWER = 0  # the connection ends instead


class Hub(OpenServer):
    """Repositories as {name: {branch: {path: bytes}}}, requests as they came, and what to answer them with."""

    def __init__(self):
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}  # large files by their SHA-256
        self.commits: list[tuple[str, str, str]] = []  # repository, branch, message
        self.tokens: set[str] = set()
        self.requests: Counter[str] = Counter()  # by the path's last word
        self.datasets: dict[str, dict[str, str]] = {}  # data sets: commits by branch or tag
        self.failures: dict[str, list[int]] = {}  # statuses to answer the next requests of this last word with
        hub = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_POST = do_PUT = do_HEAD = do_GET

        self.open(Handler)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = request.path.partition("?")[0].strip("/").split("/")
        word = next((word for word in path[::-1] if word in ANSWERS), path[0])
        self.requests[word] += 1
        self.tokens.add(request.headers.get("Authorization") or "")
        if self.failures.get(word):
            status, content = self.failures[word].pop(0), {"error": "injected"}
        else:
            status, content = ANSWERS.get(word, answer_unknown)(self, path, body)
        if status != NO_ANSWER:
            send_json(request, status, content)


def send_json(request: BaseHTTPRequestHandler, status: int, content: object) -> None:
    """Answers; what names a code, as the hub's errors do, has it in the header too."""
    encoded = json.dumps(content).encode()
    request.send_response(status)
    if isinstance(content, dict) and "code" in content:
        request.send_header("X-Error-Code", content["code"])
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(encoded)))
    request.end_headers()
    request.wfile.write(encoded)


def answer_unknown(hub: Hub, path: list[str], body: bytes) -> tuple[int, object]:
    return 404, {"error": f"the stand-in has no {'/'.join(path)}"}


def create(hub: Hub, path: list[str], body: bytes) -> tuple[int, object]:
    asked = json.loads(body)
    name = f"{asked.get('organization') or 'me'}/{asked['name']}"
    is_new = name not in hub.repos
    if is_new:
        hub.repos[name] = {"main": {}}
        hub.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
    return (200 if is_new else 409), {"url": f"{hub.url}/{name}"}


def name_user(hub: Hub, path: list[str], body: bytes) -> tuple[int, object]:
    return 200, {"type": "user", "name": "me", "orgs": []}


def make_branch(hub: Hub, path: list[str], body: bytes) -> tuple[int, object]:
    branches = hub.repos["/".join(path[2:4])]
    if path[-1] in branches:
        return 409, {"error": "is there"}
    branches[path[-1]] = dict(branches["main"])
    return 200, {}


def list_files(hub: Hub, path: list[str], body: bytes) -> tuple[int, object]:
    files = hub.repos["/".join(path[2:4])][path[5]]
    return 200, [dict(type="file", path=name, size=len(data), oid="0") for name, data in files.items()]


def describe_revision(hub: Hub, path: list[str], body: bytes) -> tuple[int, object]:
    name = "/".join(path[2:4])
    files = hub.repos[name][path[-1]] if path[-2] == "revision" else hub.repos[name]["main"]
    return 200, {"id": name, "sha": "0" * 40, "siblings": [{"rfilename": file} for file in files]}


def describe_dataset(hub: Hub, path: list[str], body: bytes) -> tuple[int, object]:
    name = "/".join(path[path.index("datasets") + 1 :][:2])  # below /api, or of a file
    revision = path[5] if len(path) > 5 else "main"
    if name not in hub.datasets:
        return 404, {"error": "Repository not found", "code": "RepoNotFound"}
    if not hub.datasets[name]:
        return NO_ANSWER, {}
    if revision not in hub.datasets[name]:
        return 404, {"error": "Invalid rev id", "code": "RevisionNotFound"}
    return 200, {"id": name, "sha": hub.datasets[name][revision], "siblings": []}


def choose_modes(hub: Hub, path: list[str], body: bytes) -> tuple[int, object]:
    names = [file["path"] for file in json.loads(body)["files"]]
    modes = {name: "lfs" if name.endswith("safetensors") else "regular" for name in names}
    return 200, {"files": [dict(path=name, shouldIgnore=False, uploadMode=mode) for name, mode in modes.items()]}


def offer_upload(hub: Hub, path: list[str], body: bytes) -> tuple[int, object]:
    objects = []
    for item in json.loads(body)["objects"]:
        upload = dict(href=f"{hub.url}/blobs/{item['oid']}", header={})
        objects.append(dict(oid=item["oid"], size=item["size"], actions=dict(upload=upload)))
    return 200, {"transfer": "basic", "objects": objects}


def keep_blob(hub: Hub, path: list[str], body: bytes) -> tuple[int, object]:
    assert hashlib.sha256(body).hexdigest() == path[-1]
    hub.blobs[path[-1]] = body
    return 200, {}


def commit(hub: Hub, path: list[str], body: bytes) -> tuple[int, object]:
    name, branch = "/".join(path[2:4]), path[-1]
    files = hub.repos[name][branch]
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "header":
            hub.commits.append((name, branch, value["summary"]))
        elif line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = hub.blobs[value["oid"]]
        elif line["key"] == "deletedFile":
            del files[value["path"]]
    url = f"{hub.url}/{name}/commit/{len(hub.commits):040}"
    return 200, {"success": True, "commitOid": f"{len(hub.commits):040}", "commitUrl": url}


ANSWERS = {
    "create": create, "whoami-v2": name_user, "branch": make_branch, "tree": list_files, "models": describe_revision,
    "datasets": describe_dataset,
    "preupload": choose_modes, "batch": offer_upload, "blobs": keep_blob, "commit": commit,
    "validate-yaml": lambda hub, path, body: (200, {"errors": [], "warnings": []}),
}  # fmt: skip
