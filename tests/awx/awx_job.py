"""A job as AWX 24.6 starts it: a private data directory, which ansible-runner runs.

What AWX puts there (its class RunJob): a fresh copy of the project, the inventory as a script, extra variables with the
survey's answers marked unsafe, credentials as files, and an environment of its own, with role and collection paths in
front of those of ansible.cfg. The current directory is not the project's, and no variable of Ansible is inherited.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ansible_runner
import jinja2
import yaml
from survey_rules import job_variables
from test_apply import data

from metalserve.surveys import awx_survey, read_options

ROOT = Path(__file__).resolve().parents[2]
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
TEMPLATES = {template["key"]: template for template in data("job_templates")["controller_job_templates"]}
KINDS = {kind["key"]: kind for kind in data("credential_types")["controller_credential_types"]}


class _Dumper(yaml.SafeDumper):
    """Writes texts of people as `!unsafe`, as AWX does, so that nothing in them is a template."""


class Unsafe(str):
    """A text that came from a survey or a credential."""


_Dumper.add_representer(Unsafe, lambda dumper, text: dumper.represent_scalar("!unsafe", str(text)))


def unsafe(value: Any) -> Any:
    """The value with all of its texts marked."""
    if isinstance(value, dict):
        return {key: unsafe(each) for key, each in value.items()}
    if isinstance(value, list):
        return [unsafe(each) for each in value]
    return Unsafe(value) if isinstance(value, str) else value


def export(target: Path) -> Path:
    """A copy of the project as a project update leaves it: what git knows, and nothing else."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_symlink() or source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    return target


@dataclass(frozen=True)
class Job:
    """What became of a job."""

    status: str
    rc: int
    events: list[dict[str, Any]]
    artifacts: Path

    @property
    def stdout(self) -> str:
        """What AWX shows as output, without its colours."""
        return _COLOURS.sub("", (self.artifacts / "stdout").read_text(encoding="utf-8"))

    def lines(self) -> list[tuple[int, str]]:
        """The lines of the output, each with the number of its event."""
        texts = [_COLOURS.sub("", event["stdout"]) for event in self.events]
        return [(number, line) for number, text in enumerate(texts) for line in text.splitlines()]

    def failures(self) -> list[tuple[str, str]]:
        """(task, message) of each failed task."""
        failed = [event for event in self.events if event["event"] == "runner_on_failed"]
        return [(event["event_data"]["task"], str(event["event_data"]["res"].get("msg"))) for event in failed]

    def stats(self) -> dict[str, Any]:
        """The last event: the counts of each host, and what tasks left as statistics."""
        return [event["event_data"] for event in self.events if event["event"] == "playbook_on_stats"][-1]

    def changed(self) -> dict[str, int]:
        """Changed tasks by host."""
        return self.stats()["changed"]

    def holds(self, text: str) -> list[str]:
        """The artifacts in which a text stands."""
        files = [path for path in sorted(self.artifacts.rglob("*")) if path.is_file()]
        return [str(path.relative_to(self.artifacts)) for path in files if text.encode() in path.read_bytes()]


def start(
    folder: Path,
    project: Path,
    key: str,
    inventory: Mapping[str, Any],
    *,
    answers: Mapping[str, Any] | None = None,
    credentials: Mapping[str, Mapping[str, str]] | None = None,
    artifacts: Mapping[str, Any] | None = None,
    options: str = "",
    fact_cache: Mapping[str, Any] | None = None,
) -> Job:
    """Run a template.

    Args:
        folder: where the private data directory is made.
        project: an exported project.
        key: of the template.
        inventory: as an inventory script prints it.
        answers: to the survey.
        credentials: inputs by kind, of those that the template may carry.
        artifacts: statistics that earlier jobs of a workflow left.
        options: of ansible-playbook, as a launch gives them.
        fact_cache: facts by host, put there as AWX does for templates that use them.
    """
    template = TEMPLATES[key]
    survey = awx_survey(template.get("survey", []), key, read_options(project / "roles"))
    variables: dict[str, Any] = {"awx_job_id": 1, "tower_job_id": 1, "awx_user_name": "operator"}
    variables |= unsafe({**(artifacts or {}), **job_variables(survey, dict(answers or {}))})
    for name in ("env", "inventory", "cp"):
        (folder / name).mkdir(parents=True, mode=0o700)
    (folder / "project").symlink_to(project)
    command = f"--extra-vars=@{folder}/env/credentials" if credentials else ""
    injected: dict[str, Any] = {}
    for kind, inputs in (credentials or {}).items():
        assert kind in template["credentials"], f"{key} carries no {kind}"
        injected |= inject(folder, kind, inputs)
        # The template's own variables are its author's: templates in them are meant.
        variables |= KINDS[kind].get("uses", {})
    (folder / "env/credentials").write_text(yaml.safe_dump(injected))
    (folder / "env/extravars").write_text(yaml.dump(variables, Dumper=_Dumper))
    (folder / "env/extravars").chmod(0o600)
    script = folder / "inventory/hosts"
    script.write_text(f"#!{sys.executable}\nprint({json.dumps(inventory)!r})\n")
    script.chmod(0o700)
    check = "--check" if template.get("job_type") == "check" else ""
    ident = "1"
    for host, facts in (fact_cache or {}).items():
        for name, text in ((host, facts), (f"s1_{host}", {"__payload__": json.dumps(facts)})):
            path = folder / "artifacts" / ident / "fact_cache" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(text))
    with environment(folder, project):
        run = ansible_runner.run(
            private_data_dir=str(folder),
            ident=ident,
            playbook=template["playbook"],
            cmdline=" ".join(filter(None, (command, check, options))),
            quiet=True,
            settings={"idle_timeout": 1200, "pexpect_timeout": 1},
        )
        return Job(run.status, run.rc, list(run.events), folder / "artifacts" / ident)


def inject(folder: Path, kind: str, inputs: Mapping[str, str]) -> dict[str, Any]:
    """Lay a credential's files down; gives its extra variables."""
    injectors = KINDS[kind]["injectors"]
    files = {}
    for name, text in injectors.get("file", {}).items():
        path = folder / "env" / f"{kind}-{name.removeprefix('template.')}"
        path.write_text(jinja2.Template(text, keep_trailing_newline=True).render(**inputs))
        path.chmod(0o600)
        files[name.removeprefix("template.")] = str(path)
    tower = {"filename": files}
    return {name: jinja2.Template(text).render(tower=tower) for name, text in injectors.get("extra_vars", {}).items()}


@contextmanager
def environment(folder: Path, project: Path) -> Iterator[None]:
    """AWX's environment of a job, and a current directory that is nobody's."""
    before, here = dict(os.environ), Path.cwd()
    beside = str(Path(sys.executable).parent)
    for name in [name for name in os.environ if name.startswith(("ANSIBLE_", "MOLECULE_", "CONTROLLER_"))]:
        del os.environ[name]
    os.environ.update(
        PATH=os.pathsep.join([beside, before["PATH"]]),
        # Where the image has the package installed.
        PYTHONPATH=str(ROOT / "src"),
        ANSIBLE_FORCE_COLOR="True",
        ANSIBLE_HOST_KEY_CHECKING="False",
        ANSIBLE_INVENTORY_UNPARSED_FAILED="True",
        ANSIBLE_PARAMIKO_RECORD_HOST_KEYS="False",
        ANSIBLE_RETRY_FILES_ENABLED="False",
        ANSIBLE_SSH_CONTROL_PATH_DIR=str(folder / "cp"),
        # The path of ansible.cfg behind its own, as it stands there: relative to the project, in which the job runs.
        ANSIBLE_ROLES_PATH=f"{folder}/requirements_roles:roles:~/.ansible/roles:/usr/share/ansible/roles:/etc/ansible/roles",
        ANSIBLE_COLLECTIONS_PATH=f"{folder}/requirements_collections:collections:/usr/share/ansible/collections",
        MAX_EVENT_RES="700000",
        AWX_PRIVATE_DATA_DIR=str(folder),
        JOB_ID="1",
        INVENTORY_ID="1",
        PROJECT_REVISION="0" * 40,
    )
    os.chdir("/")
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)
