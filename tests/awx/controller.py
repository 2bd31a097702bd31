"""A controller as far as the collection awx.awx 24.6 needs one: a real HTTP server that keeps objects.

It behaves as the API of AWX does where the collection depends on it: unknown fields are dropped and not given back,
lists come in pages, names are looked up by equality, a name is taken once in an organization, references must exist, a
template may only name a playbook that its project has, surveys and prompts are checked, edges may not close a circle,
an approval has no edges of its own. What it does not know, it answers with 404 or 400, never with success.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import jinja2
from survey_rules import answer_errors, survey_error

PAGE = 2
# The fields of each kind with what the API fills in.
_PROMPTS = {
    "inventory": None,
    "scm_branch": "",
    "job_type": "",
    "job_tags": "",
    "skip_tags": "",
    "limit": "",
    "diff_mode": None,
    "verbosity": None,
    "forks": None,
    "job_slice_count": None,
    "timeout": None,
    "execution_environment": None,
}
_ASKS = {
    f"ask_{name}_on_launch": False
    for name in (
        "scm_branch", "diff_mode", "variables", "limit", "tags", "skip_tags", "job_type", "verbosity", "inventory",
        "credential", "execution_environment", "labels", "forks", "job_slice_count", "timeout", "instance_groups",
    )
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "organizations": {},
    "execution_environments": {"organization": None, "image": "", "managed": False, "credential": None, "pull": ""},
    "projects": {
        "organization": None, "local_path": "", "scm_type": "", "scm_url": "", "scm_branch": "", "scm_refspec": "",
        "scm_clean": False, "scm_track_submodules": False, "scm_delete_on_update": False, "credential": None,
        "timeout": 0, "scm_revision": "", "scm_update_on_launch": False, "scm_update_cache_timeout": 0,
        "allow_override": False, "custom_virtualenv": None, "default_environment": None,
        "signature_validation_credential": None,
    },
    "inventories": {
        "organization": None, "kind": "", "host_filter": None, "variables": "",
        "prevent_instance_group_fallback": False,
    },
    "inventory_sources": {
        "inventory": None, "source": "", "source_path": "", "source_vars": "", "scm_branch": "", "credential": None,
        "enabled_var": "", "enabled_value": "", "host_filter": "", "overwrite": False, "overwrite_vars": False,
        "custom_virtualenv": None, "timeout": 0, "verbosity": 1, "limit": "", "execution_environment": None,
        "update_on_launch": False, "update_cache_timeout": 0, "source_project": None,
    },
    "credential_types": {"kind": "", "namespace": None, "managed": False, "inputs": {}, "injectors": {}},
    "credentials": {"organization": None, "credential_type": None, "inputs": {}},
    "notification_templates": {
        "organization": None, "notification_type": "", "notification_configuration": {}, "messages": None,
    },
    "job_templates": {
        **_ASKS, "organization": None, "job_type": "run", "inventory": None, "project": None, "playbook": "",
        "scm_branch": "", "forks": 0, "limit": "", "verbosity": 0, "extra_vars": "", "job_tags": "",
        "force_handlers": False, "skip_tags": "", "start_at_task": "", "timeout": 0, "use_fact_cache": False,
        "execution_environment": None, "host_config_key": "", "survey_enabled": False, "become_enabled": False,
        "diff_mode": False, "allow_simultaneous": False, "custom_virtualenv": None, "job_slice_count": 1,
        "webhook_service": "", "webhook_credential": None, "prevent_instance_group_fallback": False,
    },
    "workflow_job_templates": {
        **{name: value for name, value in _ASKS.items() if name.split("_")[1] in ("variables", "inventory", "limit",
        "scm", "labels", "skip", "tags")}, "organization": None, "extra_vars": "", "survey_enabled": False,
        "allow_simultaneous": False, "inventory": None, "limit": None, "scm_branch": None, "webhook_service": "",
        "webhook_credential": None, "job_tags": None, "skip_tags": None,
    },
    "workflow_job_template_nodes": {
        **_PROMPTS, "extra_data": {}, "workflow_job_template": None, "unified_job_template": None,
        "all_parents_must_converge": False, "identifier": "",
    },
    "workflow_approval_templates": {"timeout": 0},
    "schedules": {**_PROMPTS, "rrule": "", "extra_data": {}, "unified_job_template": None, "enabled": True},
}  # fmt: skip
REFERENCES = {
    "organization": "organizations",
    "execution_environment": "execution_environments",
    "default_environment": "execution_environments",
    "project": "projects",
    "source_project": "projects",
    "inventory": "inventories",
    "credential": "credentials",
    "credential_type": "credential_types",
    "workflow_job_template": "workflow_job_templates",
    "unified_job_template": "unified_job_templates",
}
UNIFIED = ("job_templates", "workflow_job_templates", "projects", "workflow_approval_templates")
NOTIFIED = {f"notification_templates_{event}" for event in ("started", "success", "error")}
ASSOCIATIONS = {
    "job_templates": {"credentials": "credentials", **dict.fromkeys(NOTIFIED, "notification_templates")},
    "projects": dict.fromkeys(NOTIFIED, "notification_templates"),
    "workflow_job_templates": dict.fromkeys([*NOTIFIED, "notification_templates_approvals"], "notification_templates"),
    "workflow_job_template_nodes": {
        **dict.fromkeys(["success_nodes", "failure_nodes", "always_nodes"], "workflow_job_template_nodes"),
        "credentials": "credentials",
    },
}
# As AWX finds playbooks in a project (awx/main/utils/ansible.py).
_PLAYBOOK = re.compile(r"^\s*?-?\s*?(?:hosts|(?:ansible\.builtin\.)?import_playbook|include):\s*?.*?$", re.MULTILINE)
_NO_PLAYBOOKS = {"roles", "tasks", "handlers", "group_vars", "host_vars", "library", "module_utils"}


class RefusedError(Exception):
    """An answer of 400 or 404."""

    def __init__(self, status: int, body: Any) -> None:
        self.status, self.body = status, body
        super().__init__(str(body))


def playbooks(repository: Path) -> list[str]:
    """What AWX would offer as playbooks of a project."""
    found = []
    for path in sorted(repository.rglob("*.yml")):
        parts = path.relative_to(repository).parts
        if _NO_PLAYBOOKS & set(parts[:-1]) or any(part.startswith(".") for part in parts):
            continue
        if _PLAYBOOK.search(path.read_text(encoding="utf-8")):
            found.append("/".join(parts))
    return found


class Controller:
    """The objects, by kind and number."""

    def __init__(self, repository: Path, token: str) -> None:
        self.token = token
        self.requests: list[tuple[str, str]] = []
        self.objects: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in FIELDS}
        self.associations: dict[tuple[str, int, str], list[int]] = {}
        self.surveys: dict[tuple[str, int], dict[str, Any]] = {}
        # What was launched: the template's name, and what was given.
        self.launches: list[tuple[str, dict[str, Any]]] = []
        self._playbooks = playbooks(repository)
        self._last = 0
        self.lock = threading.Lock()
        self.add("organizations", {"name": "Default"})

    def named(self, kind: str, name: str) -> dict[str, Any]:
        """The one object of that name."""
        (found,) = (each for each in self.objects[kind].values() if each.get("name") == name)
        return found

    def add(self, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        """Make an object as a POST does."""
        self._last += 1
        number = self._last
        fields = {name: given[name] for name in ("name", "description", *FIELDS[kind]) if name in given}
        new = {"id": number, "type": kind.removesuffix("s").replace("inventorie", "inventory")}
        new |= {"url": f"/api/v2/{kind}/{number}/", "description": "", **FIELDS[kind], **fields}
        new["related"] = {"survey_spec": f"{new['url']}survey_spec/"} if "survey_enabled" in FIELDS[kind] else {}
        new["related"] |= {"launch": f"{new['url']}launch/"} if kind == "job_templates" else {}
        new["summary_fields"] = {"current_update": {"id": number}} if kind == "projects" else {}
        self._check(kind, new)
        self.objects[kind][number] = new
        return new

    def change(self, kind: str, number: int, given: dict[str, Any]) -> dict[str, Any]:
        """Change an object as a PATCH does."""
        old = self.find(kind, number)
        fields = {name: given[name] for name in ("name", "description", *FIELDS[kind]) if name in given}
        new = {**old, **fields}
        self._check(kind, new)
        old.update(new)
        old["summary_fields"] = {}
        return old

    def find(self, kind: str, number: int) -> dict[str, Any]:
        """An object by its number."""
        for each in UNIFIED if kind == "unified_job_templates" else [kind]:
            if number in self.objects.get(each, {}):
                return self.objects[each][number]
        raise RefusedError(404, {"detail": "Not found."})

    def list(self, kind: str, query: dict[str, str]) -> list[dict[str, Any]]:
        """The objects that a query asks for."""
        pool = [
            each
            for part in (UNIFIED if kind == "unified_job_templates" else [kind])
            for each in self.objects[part].values()
        ]
        query = {name: value for name, value in query.items() if name != "page"}
        if "or__id" in query:
            (other,) = (name for name in query if name.startswith("or__") and name != "or__id")
            number, text = query.pop("or__id"), query.pop(other)
            pool = [each for each in pool if str(each["id"]) == number or each.get(other[4:]) == text]
        for name, value in query.items():
            known = {"id", "name", "type", "description", "organization", *FIELDS.get(kind, {})}
            if name not in known:
                raise RefusedError(400, {"detail": f"{kind} has no field named '{name}'"})
            pool = [each for each in pool if str(each.get(name)) == value]
        return pool

    def _check(self, kind: str, new: dict[str, Any]) -> None:
        if kind not in ("workflow_job_template_nodes",) and not new.get("name"):
            raise RefusedError(400, {"name": ["This field is required."]})
        for name, value in new.items():
            if name in REFERENCES and name in FIELDS[kind] and value is not None:
                if type(value) is not int:
                    raise RefusedError(
                        400, {name: [f"Incorrect type. Expected pk value, received {type(value).__name__}."]}
                    )
                self.find(REFERENCES[name], value)
            if type(FIELDS[kind].get(name)) is bool and type(value) is not bool:
                raise RefusedError(400, {name: ["Must be a valid boolean."]})
            if type(FIELDS[kind].get(name)) is int and type(value) is not int:
                raise RefusedError(400, {name: ["A valid integer is required."]})
            if isinstance(FIELDS[kind].get(name), str) and not isinstance(value, str):
                raise RefusedError(
                    400, {name: ["This field may not be null." if value is None else "Not a valid string."]}
                )
        scope = {"schedules": "unified_job_template", "inventory_sources": "inventory"}.get(kind, "organization")
        twins = [each for each in self.objects[kind].values() if each["id"] != new["id"] and new.get("name")]
        if any(each.get("name") == new["name"] and each.get(scope) == new.get(scope) for each in twins):
            raise RefusedError(400, {"__all__": [f"{kind} with this {scope.title()} and Name already exists."]})
        checker = getattr(self, f"_check_{kind}", None)
        if checker:
            checker(new)

    def _check_job_templates(self, new: dict[str, Any]) -> None:
        if new["playbook"] not in self._playbooks:
            raise RefusedError(400, {"playbook": ["Playbook not found for project."]})
        if new["survey_enabled"] and new["ask_variables_on_launch"]:
            raise RefusedError(400, {"survey_enabled": ["a survey would not limit what is asked"]})
        json.loads(new["extra_vars"] or "{}")

    def _check_execution_environments(self, new: dict[str, Any]) -> None:
        if not new["image"] or new["pull"] not in ("always", "missing", "never", ""):
            raise RefusedError(400, {"image": ["This field is required."]})

    def _check_credential_types(self, new: dict[str, Any]) -> None:
        """Injectors may only use what the inputs declare, under names that are variables'."""
        known = {field["id"]: "x" for field in new["inputs"].get("fields", [])}
        files = {name.partition(".")[2] or name: "/path" for name in new["injectors"].get("file", {})}
        strict = jinja2.Environment(undefined=jinja2.StrictUndefined)
        if set(new["injectors"]) - {"env", "file", "extra_vars"} or new["kind"] not in ("cloud", "net"):
            raise RefusedError(400, {"injectors": ["unknown kind"]})
        for part, entries in new["injectors"].items():
            for name, text in entries.items():
                if part != "file" and not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name):
                    raise RefusedError(400, {"injectors": [f"'{name}' does not match a variable's name"]})
                try:
                    strict.from_string(text).render(**known, tower={"filename": files})
                except jinja2.UndefinedError as error:
                    raise RefusedError(400, {"injectors": [str(error)]}) from error

    def _check_notification_templates(self, new: dict[str, Any]) -> None:
        configuration = new["notification_configuration"]
        if new["notification_type"] != "webhook" or {"url", "headers"} - set(configuration):
            raise RefusedError(400, {"notification_configuration": ["Missing required fields"]})
        new["notification_configuration"] = {
            "http_method": "POST", "disable_ssl_verification": False, "username": "", "password": "", **configuration,
        }  # fmt: skip

    def _check_workflow_job_template_nodes(self, new: dict[str, Any]) -> None:
        twins = self.list("workflow_job_template_nodes", {"workflow_job_template": str(new["workflow_job_template"])})
        if any(each["identifier"] == new["identifier"] and each["id"] != new["id"] for each in twins):
            raise RefusedError(400, {"identifier": ["already taken in this workflow"]})
        if new["unified_job_template"] and new["extra_data"]:
            survey = self.surveys.get(("job_templates", new["unified_job_template"]), {})
            wrong = answer_errors(
                {"spec": [{**item, "required": False} for item in survey.get("spec", [])]}, new["extra_data"]
            )
            if wrong:
                raise RefusedError(400, {"extra_data": wrong})

    def _check_schedules(self, new: dict[str, Any]) -> None:
        if not re.fullmatch(
            r"DTSTART(;TZID=[\w/]+)?:\d{8}T\d{6}Z? RRULE:FREQ=[A-Z]+;INTERVAL=\d+(;\S+)?", new["rrule"]
        ):
            raise RefusedError(400, {"rrule": ["DTSTART, RRULE and INTERVAL required."]})

    def associate(self, kind: str, number: int, name: str, body: dict[str, Any]) -> None:
        """Add to a list of an object, or take away from it."""
        if name not in ASSOCIATIONS.get(kind, {}):
            raise RefusedError(404, {"detail": "Not found."})
        self.find(kind, number)
        other = self.find(ASSOCIATIONS[kind][name], body["id"])
        present = self.associations.setdefault((kind, number, name), [])
        if body.get("disassociate"):
            present.remove(other["id"])
            return
        if name == "credentials" and any(
            self.find("credentials", each)["credential_type"] == other["credential_type"] for each in present
        ):
            raise RefusedError(400, {"error": "Cannot assign multiple credentials of one type."})
        if name.endswith("_nodes"):
            edges = [name for name in ASSOCIATIONS[kind] if name.endswith("_nodes")]
            if any(other["id"] in self.associations.get((kind, number, each), []) for each in edges):
                raise RefusedError(400, {"Error": "Relationship not allowed."})
            if number in self._below(other["id"]):
                raise RefusedError(400, {"Error": "Cycle detected."})
        present.append(other["id"])

    def _below(self, number: int) -> set[int]:
        """A node and all that can follow it."""
        found, ahead = set(), [number]
        while ahead:
            each = ahead.pop()
            found.add(each)
            for name in ("success_nodes", "failure_nodes", "always_nodes"):
                ahead += self.associations.get(("workflow_job_template_nodes", each, name), [])
        return found

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        """The status and the body for a request."""
        parts = path.removeprefix("/api/v2/").strip("/").split("/")
        kind, number, rest = parts[0], parts[1:2], parts[2:]
        if kind == "project_updates" and method == "GET":
            return 200, {
                "id": int(number[0]),
                "status": "successful",
                "finished": "2026-01-01T00:00:00Z",
                "failed": False,
            }
        if kind == "config":
            return 200, {"version": "24.6.1"}
        if kind == "jobs":
            # All of them end well.
            asked = [int(each) for each in query["id__in"].split(",")]
            found = [{"id": each, "status": "successful", "created": "2026-01-01", "artifacts": {}} for each in asked]
            return 200, {"count": len(found), "next": None, "results": found}
        if kind not in FIELDS and kind != "unified_job_templates":
            raise RefusedError(404, {"detail": "Not found."})
        if not number:
            return (
                (200, self._page(path, query, self.list(kind, query)))
                if method == "GET"
                else (201, self.add(kind, body))
            )
        key = int(number[0])
        if not rest:
            return 200, self.find(kind, key) if method == "GET" else self.change(kind, key, body)
        if rest == ["launch"] and kind == "job_templates" and method == "POST":
            return 201, self._launch(key, body)
        if rest == ["survey_spec"]:
            return self._survey(method, kind, key, body)
        if rest == ["create_approval_template"] and method == "POST":
            approval = self.add("workflow_approval_templates", body)
            node = self.find(kind, key)
            node["unified_job_template"] = approval["id"]
            node["related"]["unified_job_template"] = approval["url"]
            return 201, approval
        if rest[0] in ASSOCIATIONS.get(kind, {}) and method == "GET":
            target = ASSOCIATIONS[kind][rest[0]]
            members = [self.find(target, each) for each in self.associations.get((kind, key, rest[0]), [])]
            return 200, self._page(path, query, members)
        self.associate(kind, key, rest[0], body)
        return 204, None

    def _launch(self, key: int, body: dict[str, Any]) -> dict[str, Any]:
        """Start a job; what the template does not ask for is dropped, what its survey does not take is refused."""
        template = self.find("job_templates", key)
        survey = self.surveys.get(("job_templates", key), {})
        asked = {item["variable"] for item in survey.get("spec", [])}
        answers = {name: value for name, value in (body.get("extra_vars") or {}).items() if name in asked}
        wrong = answer_errors(survey, answers)
        if wrong:
            raise RefusedError(400, {"variables_needed_to_start": wrong})
        given = {"extra_vars": answers, "limit": body.get("limit") if template["ask_limit_on_launch"] else None}
        self.launches.append((template["name"], given))
        number = len(self.launches)
        return {"id": number, "job": number, "url": f"/api/v2/jobs/{number}/", "type": "job"}

    def _survey(self, method: str, kind: str, key: int, body: dict[str, Any]) -> tuple[int, Any]:
        self.find(kind, key)
        if method == "POST":
            wrong = survey_error(body)
            if wrong:
                raise RefusedError(400, {"error": wrong})
            self.surveys[kind, key] = body
        elif method == "DELETE":
            self.surveys.pop((kind, key), None)
        return 200, self.surveys.get((kind, key), {}) if method == "GET" else {}

    @staticmethod
    def _page(path: str, query: dict[str, str], found: list[Any]) -> dict[str, Any]:
        page = int(query.get("page", 1))
        more = len(found) > page * PAGE
        following = f"{path}?{urlencode({**query, 'page': page + 1})}" if more else None
        return {
            "count": len(found),
            "next": following,
            "previous": None,
            "results": found[(page - 1) * PAGE : page * PAGE],
        }


@contextmanager
def serve(controller: Controller) -> Iterator[str]:
    """Answer requests while the context lasts; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            split = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            with controller.lock:
                controller.requests.append((self.command, split.path))
                try:
                    if self.headers.get("Authorization") != f"Bearer {controller.token}":
                        raise RefusedError(401, {"detail": "Authentication credentials were not provided."})
                    status, answer = controller.answer(self.command, split.path, dict(parse_qsl(split.query)), body)
                except RefusedError as refused:
                    status, answer = refused.status, refused.body
                data = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("X-API-Product-Name", "AWX")
            self.send_header("X-API-Product-Version", "24.6.1")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = _do  # noqa: N815 (names of the library)

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
