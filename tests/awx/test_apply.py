"""awx/apply.yml against an HTTP server with the API's behaviour: all is made, and a second run changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from controller import Controller, serve

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "token-of-the-test"
SETTINGS = {
    "controller_project_url": "https://git.example.com/ops/metalserve.git",
    "controller_image": "registry.example.com/metalserve-ee@sha256:" + "0" * 64,
    "controller_notification_url": "https://hooks.example.com/awx",
    "controller_slices": 3,
    "controller_inventories": [
        {"name": "prod", "path": "inventories/prod"},
        {"name": "lab", "path": "inventories/lab"},
    ],
    "controller_credentials": {"machine": "ops ssh", "hub": "hubs", "api_key": None, "gateway_tls": None},
}


def apply(url, folder, settings=None, *options, token=TOKEN):
    """Run the playbook from a directory that is not the project's."""
    (folder / "site.yml").write_text(yaml.safe_dump({**SETTINGS, **(settings or {})}))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        "CONTROLLER_HOST": url,
        "CONTROLLER_OAUTH_TOKEN": token,
    }
    program = Path(sys.executable).with_name("ansible-playbook")
    if not program.exists():
        program = Path("ansible-playbook")
    argv = [str(program), str(ROOT / "awx/apply.yml"), "-e", f"@{folder}/site.yml", *options]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900)


def bare_controller():
    """One as it is after an installation, with the credentials that a person has made."""
    controller = Controller(ROOT, TOKEN)
    for name in ("Machine", "Source Control"):
        controller.add("credential_types", {"name": name, "kind": "cloud", "managed": True})
    kinds = controller.objects["credential_types"].values()
    for name, kind in (("ops ssh", "Machine"), ("hubs", "Source Control")):
        number = next(each["id"] for each in kinds if each["name"] == kind)
        controller.add("credentials", {"name": name, "organization": 1, "credential_type": number})
    return controller


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    """The controller after two runs, and the runs with what each wrote; the third is a check after a change by hand."""
    folder = tmp_path_factory.mktemp("apply")
    controller = bare_controller()
    runs = []
    with serve(controller) as url:
        for options in ((), (), ("--check",)):
            if options:
                verify = controller.named("job_templates", "metalserve verify")
                controller.change("job_templates", verify["id"], {"job_slice_count": 7})
            controller.requests.clear()
            run = apply(url, folder, None, *options)
            assert run.returncode == 0, run.stdout + run.stderr
            runs.append((run, [each for each in controller.requests if each[0] != "GET"]))
        controller.change("job_templates", verify["id"], {"job_slice_count": 3})
    return controller, runs


def data(name):
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!unsafe", lambda loader, node: loader.construct_scalar(node))
    return yaml.load((ROOT / f"awx/data/{name}.yml").read_text(), Loader)


def test_the_first_run_makes_everything(applied):
    controller, ((first, written), *_later) = applied
    assert "failed=0" in first.stdout
    assert written
    templates = data("job_templates")["controller_job_templates"]
    made = {each["name"]: each for each in controller.objects["job_templates"].values()}
    assert set(made) == {f"metalserve {each['key']}" for each in templates}
    for each in templates:
        template = made[f"metalserve {each['key']}"]
        assert template["playbook"] == each["playbook"]
        assert template["use_fact_cache"] is False
        assert template["ask_variables_on_launch"] is False, "what may be set is what the survey asks"
        assert ("job_templates", template["id"]) in controller.surveys or not each.get("survey")
    assert len(controller.objects["inventories"]) == len(controller.objects["inventory_sources"]) == 2


def test_the_second_run_changes_nothing(applied):
    _controller, (_first, (second, written), _check) = applied
    assert "changed=0" in second.stdout
    # A PATCH that changes nothing is the collection's way with null; there is none either.
    assert written == []
    assert "may inaccurately report" not in second.stdout + second.stderr


def test_a_check_run_names_what_somebody_changed_and_mends_nothing(applied):
    _controller, (_first, _second, (check, written)) = applied
    assert written == []
    changed = [line.split("item=")[1].rstrip(")") for line in check.stdout.splitlines() if line.startswith("changed: ")]
    assert changed == ["verify"]


def test_slicing_is_offered_where_it_is_safe_only(applied):
    controller, _runs = applied
    for each in data("job_templates")["controller_job_templates"]:
        template = controller.named("job_templates", f"metalserve {each['key']}")
        safe = "safe" in each["slicing"]
        assert (template["job_slice_count"], template["ask_job_slice_count_on_launch"]) == (
            (3, True) if safe else (1, False)
        )


def follow(controller, workflow):
    """The graph of a workflow: node -> the nodes that follow its success, failure, and either."""
    number = controller.named("workflow_job_templates", f"metalserve {workflow}")["id"]
    nodes = {
        each["id"]: each["identifier"]
        for each in controller.objects["workflow_job_template_nodes"].values()
        if each["workflow_job_template"] == number
    }
    graph = {}
    for key, name in nodes.items():
        lists = ("success_nodes", "failure_nodes", "always_nodes")
        members = [controller.associations.get(("workflow_job_template_nodes", key, each), []) for each in lists]
        graph[name] = tuple([nodes[member] for member in each] for each in members)
    return graph


def test_a_rollout_is_approved_and_taken_back_when_it_fails(applied):
    controller, _runs = applied
    assert follow(controller, "roll out") == {
        "preflight": (["approve"], [], []),
        "approve": (["stage"], [], []),
        "stage": (["rollout"], [], []),
        "rollout": (["verify"], ["take back"], []),
        "verify": ([], ["take back"], []),
        "take back": ([], [], []),
    }
    approval = controller.named("workflow_approval_templates", "metalserve roll out: approve")
    assert approval["timeout"] == 86400
    workflow = controller.named("workflow_job_templates", "metalserve roll out")["id"]
    assert controller.associations["workflow_job_templates", workflow, "notification_templates_approvals"]


def test_restarts_are_allowed_by_the_approval_alone(applied):
    controller, _runs = applied
    assert follow(controller, "prepare hosts")["approve"] == (["prepare"], [], [])
    answers = [
        each["extra_data"] for each in controller.objects["workflow_job_template_nodes"].values() if each["extra_data"]
    ]
    assert answers == [{"nvidia_driver_reboot_allowed": "true", "nvidia_driver_reload_allowed": "true"}]
    template = controller.named("job_templates", "metalserve prepare")
    assert template["extra_vars"] == "{}"


def test_a_credential_that_is_not_named_is_left_out(applied):
    controller, _runs = applied
    carried = {}
    for each in controller.objects["job_templates"].values():
        keys = controller.associations.get(("job_templates", each["id"], "credentials"), [])
        carried[each["name"]] = [controller.find("credentials", key)["name"] for key in keys]
    assert carried["metalserve stage"] == ["ops ssh", "hubs"]
    assert carried["metalserve secrets"] == carried["metalserve rollout"] == ["ops ssh"]


def test_a_token_reaches_a_job_by_a_file_and_no_template_holds_it(applied):
    controller, _runs = applied
    kind = controller.named("credential_types", "metalserve hub token")
    assert set(kind["injectors"]) == {"file", "extra_vars"}
    variables = json.loads(controller.named("job_templates", "metalserve stage")["extra_vars"])
    assert list(variables) == ["model_weights_tokens"]
    assert "lookup('ansible.builtin.file', serving_hub_tokens_source)" in variables["model_weights_tokens"]
    assert json.loads(controller.named("job_templates", "metalserve verify")["extra_vars"]) == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"controller_project_url": None}, "The repository is"),
        ({"controller_image": None}, "Change: controller_project_url, controller_image"),
        (
            {"controller_credentials": {**SETTINGS["controller_credentials"], "machine": "nobody"}},
            "credentials/?name=nobody",
        ),
    ],
)
def test_what_is_missing_is_refused(settings, words, tmp_path):
    controller = bare_controller()
    with serve(controller) as url:
        run = apply(url, tmp_path, settings)
    assert run.returncode != 0
    assert words in run.stdout, run.stdout


def test_a_wrong_token_is_refused(tmp_path):
    controller = bare_controller()
    with serve(controller) as url:
        run = apply(url, tmp_path, token="wrong")
    assert run.returncode != 0
    assert "Invalid authentication credentials" in run.stdout
    assert not controller.objects["projects"]
