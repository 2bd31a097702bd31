"""The rules of STYLE.md that can be read off the files: roles, playbooks, and the code that travels to hosts."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
PLAYBOOKS = [ROOT / "site.yml", *sorted((ROOT / "playbooks").rglob("*.yml"))]
REMOTE = sorted((ROOT / "src/metalserve/remote").glob("*.py"))
# What a play says besides its list of roles: where, how many at a time, what a failure means.
PLAY_KEYS = {
    "name",
    "hosts",
    "connection",
    "gather_facts",
    "any_errors_fatal",
    "ignore_unreachable",
    "max_fail_percentage",
    "serial",
    # Of a play with a bundle: where its package tools find their sources.
    "environment",
    "roles",
    "tasks",
}
# Names under which a role brings code of its own, which need no collection.
OWN_CODE = ("library", "action_plugins")
TEMPLATE = "{{"

each_role = pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)
each_playbook = pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.relative_to(ROOT).as_posix())
each_remote_file = pytest.mark.parametrize("path", REMOTE, ids=lambda path: path.name)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def variables(directory: Path) -> dict[str, Any]:
    """All variables of a role's defaults/ or vars/."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.yml")):
        found.update(load(path) or {})
    return found


def entry_points(role: Path) -> dict[str, dict[str, Any]]:
    specs = load(role / "meta/argument_specs.yml")["argument_specs"]
    return {name: spec.get("options", {}) for name, spec in specs.items()}


def all_tasks(items: Any) -> Iterator[dict[str, Any]]:
    """Tasks of a list, those inside blocks too."""
    for item in items or []:
        yield item
        for part in ("block", "rescue", "always"):
            yield from all_tasks(item.get(part))


def tasks_of(role: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file, task) for each task and handler of a role."""
    return [
        (path.relative_to(role).as_posix(), task)
        for part in ("tasks", "handlers")
        for path in sorted((role / part).rglob("*.yml"))
        for task in all_tasks(load(path))
    ]


def yaml_texts(role: Path) -> Iterator[tuple[Path, str]]:
    """YAML files and templates of a role, without their comments."""
    for path in sorted(role.rglob("*")):
        if path.suffix in (".yml", ".j2") and not path.is_symlink():
            lines = path.read_text(encoding="utf-8").splitlines()
            yield path, "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def known_files() -> list[Path]:
    """Files that are in git or would be added."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


# ---- roles ----


@each_role
def test_a_role_has_its_files(role):
    wanted = ["README.md", "defaults/main.yml", "meta/main.yml", "meta/argument_specs.yml", "tasks/main.yml"]
    assert [name for name in wanted if not (role / name).is_file()] == []


@each_role
def test_a_role_says_what_it_is(role):
    meta = load(role / "meta/main.yml")["galaxy_info"]
    assert meta["role_name"] == role.name
    assert len(meta["description"]) > 10
    assert meta["license"] == "Apache-2.0"
    assert load(role / "meta/main.yml")["dependencies"] == []
    assert (role / "README.md").read_text(encoding="utf-8").startswith(f"# {role.name}\n")


@each_role
def test_the_specification_has_the_keys_of_the_defaults(role):
    points = entry_points(role)
    assert sorted(points["main"]) == sorted(variables(role / "defaults"))
    for name, options in points.items():
        assert set(options) <= set(points["main"]), f"entry point {name}"
        assert (role / "tasks" / f"{name}.yml").is_file(), f"entry point {name}"


@each_role
def test_the_specification_describes_each_variable(role):
    for options in entry_points(role).values():
        assert [key for key, option in options.items() if not option.get("type")] == []
        assert [key for key, option in options.items() if not option.get("description")] == []


@each_role
def test_a_default_of_the_specification_is_the_default(role):
    defaults = variables(role / "defaults")
    for options in entry_points(role).values():
        stated = {key: option["default"] for key, option in options.items() if "default" in option}
        assert stated == {key: defaults[key] for key in stated}
        # Left out are only null and what another variable decides.
        silent = {key: defaults[key] for key in options if key not in stated}
        assert [key for key, value in silent.items() if value is not None and TEMPLATE not in str(value)] == []


@each_role
def test_the_names_of_variables_say_whose_they_are(role):
    assert [key for key in variables(role / "defaults") if not key.startswith(f"{role.name}_")] == []
    assert [key for key in variables(role / "vars") if not key.startswith(f"__{role.name}_")] == []


@each_role
def test_the_readme_names_each_variable_or_where_they_are_described(role):
    text = (role / "README.md").read_text(encoding="utf-8")
    unnamed = [key for key in variables(role / "defaults") if key not in text]
    assert unnamed == [] or "(defaults/main.yml)" in text or "(meta/argument_specs.yml)" in text


@each_role
def test_names_within_tasks_are_private_to_the_role(role):
    for file, task in tasks_of(role):
        control = task.get("loop_control", {})
        names = [task.get("register"), control.get("loop_var"), control.get("index_var"), *task.get("vars", {})]
        # Variables of another role are what that role is called with.
        if any("role" in key for key in task):
            names = names[:3]
        foreign = [name for name in names if name and not f"{name}_".startswith(f"__{role.name}_")]
        assert foreign == [], f"{file}: {task.get('name')}"


@each_role
def test_a_loop_names_its_variable(role):
    for file, task in tasks_of(role):
        assert "loop" not in task or "loop_var" in task.get("loop_control", {}), f"{file}: {task.get('name')}"


@each_role
def test_modules_have_their_full_name_or_are_the_role_s_own(role):
    own = {path.stem for part in OWN_CODE for path in (role / part).glob("*.py")}
    keywords = set(load_task_keywords())
    for file, task in tasks_of(role):
        module = [key for key in task if key not in keywords]
        assert len(module) <= 1, f"{file}: {task.get('name')} has the unknown keys {module}"
        for name in module:
            assert name in own or name.count(".") == 2, f"{file}: {task.get('name')} uses {name}"


def load_task_keywords() -> list[str]:
    """What Ansible itself takes as a keyword of a task, block or handler."""
    from ansible.playbook.block import Block
    from ansible.playbook.handler import Handler

    # `loop` is kept under another name.
    return [*Handler.fattributes, *Block.fattributes, "loop"]


@each_role
def test_a_refusal_says_what_is_needed_and_what_to_change(role):
    for file, task in tasks_of(role):
        if "ansible.builtin.assert" in task:
            message = task["ansible.builtin.assert"].get("fail_msg", "")
            where = f"{file}: {task.get('name')}"
            assert "Needed: " in message, where
            assert "Change: " in message, where


@each_role
def test_no_failure_is_ignored(role):
    assert [f"{file}: {task.get('name')}" for file, task in tasks_of(role) if "ignore_errors" in task] == []


@each_role
def test_no_role_knows_an_inventory_group(role):
    found = [path.name for path, text in yaml_texts(role) if re.search(r"\b(groups|group_names)\b", text)]
    assert found == []


@each_role
def test_nothing_is_taken_at_its_latest(role):
    pattern = re.compile(r"(:|state:\s*)latest\b")
    assert [path.name for path, text in yaml_texts(role) if pattern.search(text)] == []


@each_role
def test_facts_are_read_from_ansible_facts(role):
    pattern = re.compile(
        r"\bansible_(?!facts\b|check_mode\b|managed\b|inventory_sources\b|failed_result\b|play_hosts_all\b|playbook_python\b)[a-z]\w*"
    )
    found = [(path.name, pattern.findall(text)) for path, text in yaml_texts(role)]
    assert [pair for pair in found if pair[1]] == []


@each_role
def test_the_code_for_the_host_is_there_when_a_module_wants_it(role):
    link = role / "module_utils/metalserve_remote"
    wants = [
        path.name
        for path in role.glob("library/*.py")
        if "ansible.module_utils.metalserve_remote" in path.read_text(encoding="utf-8")
    ]
    assert link.is_symlink() == bool(wants)
    if wants:
        assert not Path(link.readlink()).is_absolute()
        assert link.resolve() == ROOT / "src/metalserve/remote"


@pytest.mark.parametrize("path", sorted((ROOT / "roles").glob("*/library/*.py")), ids=lambda path: path.stem)
def test_a_module_is_documented(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
        if isinstance(node.value, ast.Constant)
    }
    assert yaml.safe_load(texts["DOCUMENTATION"])["module"] == path.stem
    (example, *_) = yaml.safe_load(texts["EXAMPLES"])
    assert path.stem in example
    assert yaml.safe_load(texts["RETURN"])


# ---- playbooks ----


def test_the_playbooks_of_site_exist():
    imported = [play["ansible.builtin.import_playbook"] for play in load(ROOT / "site.yml")]
    assert imported
    assert [name for name in imported if not (ROOT / name).is_file()] == []


@each_playbook
def test_a_playbook_is_a_list_of_roles(playbook):
    for play in load(playbook):
        if "ansible.builtin.import_playbook" in play:
            assert set(play) == {"name", "ansible.builtin.import_playbook"}
            continue
        assert set(play) <= PLAY_KEYS
        assert play["gather_facts"] is False
        # A step of a role can only be named by a task; such a task does nothing else.
        steps = play.get("tasks", [])
        assert [step for step in steps if set(step) != {"name", "ansible.builtin.import_role"}] == []
        names = [role["role"] for role in play.get("roles", [])]
        names += [step["ansible.builtin.import_role"]["name"] for step in steps]
        assert names
        assert [name for name in names if not (ROOT / "roles" / name).is_dir()] == []


def test_the_preflight_calls_only_what_looks():
    """Other roles than the facts are entered by their step validate."""
    tasks = tasks_of(ROOT / "roles/preflight")
    called = [task[key] for _file, task in tasks for key in task if key.endswith(("import_role", "include_role"))]
    assert [call["name"] for call in called if call.get("tasks_from") != "validate"] == ["gpu_facts"]
    for call in called:
        assert call["name"] == "gpu_facts" or "validate" in entry_points(ROOT / "roles" / call["name"])


@each_playbook
def test_a_playbook_gives_a_role_only_its_own_variables(playbook):
    for play in load(playbook):
        for role in play.get("roles", []):
            known = variables(ROOT / "roles" / role["role"] / "defaults")
            assert [key for key in role.get("vars", {}) if key not in known] == []


# ---- the code that travels ----


@each_remote_file
def test_the_code_for_hosts_is_python_3_9(path):
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    # Annotations such as `int | None` are only read as text then.
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    assert future or not any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree))


@each_remote_file
def test_the_code_for_hosts_needs_nothing_but_python(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # Level 1 is a file beside it; what lies higher stays on the controller.
            assert node.level <= 1, f"line {node.lineno}"
            names = [node.module or ""] if node.level == 0 else []
        foreign = [name for name in names if name.split(".")[0] not in sys.stdlib_module_names]
        # nvidia-ml-py is sent along by an action plugin.
        assert [name for name in foreign if name != "pynvml"] == [], f"line {node.lineno}"


# ---- everything ----


def test_links_lead_somewhere():
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True)
    links = [ROOT / line.split("\t")[1] for line in listed.stdout.splitlines() if line.startswith("120000")]
    assert links
    assert [str(path) for path in links if path.is_symlink() and not path.exists()] == []


def test_nothing_is_left_to_be_done():
    # Spelled so that this file does not find itself.
    pattern = re.compile(rb"\b(TO" rb"DO|FIX" rb"ME|XX" rb"X)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in known_files()
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_rules_look_at_something():
    """A moved directory must not turn these tests into tests of nothing."""
    assert len(ROLES) >= 8
    assert len(PLAYBOOKS) >= 6
    assert len(REMOTE) >= 10
    assert len(known_files()) > 100
