"""The Ansible module and the role against a server.

Ansible itself runs the module once and the role a few times; the other cases call the module in this process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from gate_server import MODEL, GateServer

ROOT = Path(__file__).resolve().parents[4]
ROLE = ROOT / "roles" / "endpoint_gate"
NOTHING_LISTENS = "http://127.0.0.1:1"


def run_ansible(argv: list[str], folder: Path, callback: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    environment |= {
        "ANSIBLE_MODULE_UTILS": str(ROLE / "module_utils"),
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
        "ANSIBLE_LOCALHOST_WARNING": "false",
        "ANSIBLE_INVENTORY_UNPARSED_WARNING": "false",
        "ANSIBLE_STDOUT_CALLBACK": callback,
        "ANSIBLE_LOAD_CALLBACK_PLUGINS": "true",
        "ANSIBLE_LOCAL_TEMP": str(folder / "local"),
        "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
        "ANSIBLE_NOCOLOR": "true",
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
    }
    tool = Path(sys.executable).with_name(argv[0])
    return subprocess.run(
        [str(tool), *argv[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    """The module's file, with the package in the place where Ansible puts it."""
    name = "ansible.module_utils.metalserve_remote"
    sys.modules[name] = importlib.import_module("metalserve.remote")
    spec = importlib.util.spec_from_file_location("endpoint_gate_module", ROLE / "library" / "endpoint_gate.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    yield loaded
    for loaded_name in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        del sys.modules[loaded_name]


RunModule = Callable[..., dict[str, Any]]


@pytest.fixture
def run_module(module: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunModule:
    """Run the module in this process and give its result, with the exit status as `rc`."""
    # A test that loaded Ansible's controller code leaves a mark here, and warnings then go to the screen.
    monkeypatch.setattr("ansible.module_utils._internal.is_controller", False)

    def run(*, check: bool = False, **params: Any) -> dict[str, Any]:
        arguments = {"timeout_seconds": 10, "burst_size": 2, "model": MODEL, **params}
        with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(SystemExit) as caught:
            module.main()
        result = json.loads(capsys.readouterr().out)
        assert isinstance(result, dict)
        return {**result, "rc": caught.value.code}

    return run


def test_ansible_carries_and_runs_the_module(server: GateServer, tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    params = {"url": server.url, "model": MODEL, "release_id": "abc", "result_path": str(path), "burst_size": 2}
    run = run_ansible(
        [
            *("ansible", "localhost", "-M", str(ROLE / "library"), "-m", "endpoint_gate"),
            *("-a", json.dumps(params), "--diff"),
        ],
        tmp_path,
        "ansible.posix.json",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(run.stdout)["plays"][0]["tasks"][0]["hosts"]["localhost"]
    assert result["changed"] is True
    assert result["passed"] is True
    assert '"release": "abc"' in result["diff"]["after"]
    assert json.loads(path.read_text())["passed"] is True


def test_passed_stored_and_unchanged_the_second_time(run_module: RunModule, server: GateServer, tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    params = {"url": server.url, "release_id": "abc", "result_path": str(path)}
    first = run_module(**params)
    assert first["rc"] == 0, first
    assert first["changed"] is True
    assert first["passed"] is True
    assert len(first["rows"]) == 16
    assert first["table"][-1] == first["msg"]
    assert '"release": "abc"' in first["diff"]["after"]
    stored = path.read_text()
    record = json.loads(stored)
    assert (record["schema"], record["release"], record["passed"]) == (1, "abc", True)
    assert path.stat().st_mode & 0o777 == 0o644

    second = run_module(**params)
    assert second["changed"] is False
    assert path.read_text() == stored


def test_refused_is_stored_and_fails_with_the_failed_rows(
    run_module: RunModule, server: GateServer, tmp_path: Path
) -> None:
    path = tmp_path / "gate.json"
    server.raw["chat"] = (500, "text/plain", b"engine dead")
    params = {"url": server.url, "checks": ["models", "chat"], "release_id": "abc", "result_path": str(path)}
    result = run_module(**params)
    assert result["rc"] != 0
    assert result["failed"] is True
    assert result["changed"] is True
    assert result["msg"] == (
        f"refused: tiny at {server.url}, 1 of 2 checks failed\n"
        "  chat: found HTTP 500; expected HTTP 200. Body: engine dead"
    )
    assert json.loads(path.read_text())["passed"] is False


def test_refusal_that_does_not_fail(run_module: RunModule, server: GateServer, tmp_path: Path) -> None:
    result = run_module(url=server.url, model="other", checks=["models"], fail_on_refusal=False)
    assert result["rc"] == 0
    assert result["passed"] is False
    assert "refused: other" in result["msg"]


def test_check_mode_on_a_bare_host_is_skipped(run_module: RunModule, tmp_path: Path) -> None:
    # Neither the folder of the result nor the key is there yet.
    none = str(tmp_path / "none")
    result = run_module(
        check=True, url=NOTHING_LISTENS, release_id="abc", result_path=f"{none}/g.json", api_key_file=none
    )
    assert result["rc"] == 0, result
    assert result["skipped"] is True
    assert result["changed"] is False
    assert result["passed"] is None
    assert "because this is check mode and there is no connection to" in result["msg"]


def test_without_check_mode_a_bare_host_is_refused(run_module: RunModule, tmp_path: Path) -> None:
    result = run_module(url=NOTHING_LISTENS)
    assert result["failed"] is True
    assert "16 of 16 checks failed" in result["msg"]


def test_check_mode_warns_of_a_refusal_and_stores_nothing(
    run_module: RunModule, server: GateServer, tmp_path: Path
) -> None:
    path = tmp_path / "gate.json"
    result = run_module(
        check=True,
        url=server.url,
        model="other",
        checks=["models"],
        release_id="abc",
        result_path=str(path),
    )
    assert result["rc"] == 0
    assert result["changed"] is True
    assert result["passed"] is False
    assert "A real run would fail if it found what is there now: refused: other" in str(result["warnings"])
    assert not path.exists()


def test_key_from_a_file_and_thinking_off(run_module: RunModule, server: GateServer, tmp_path: Path) -> None:
    server.api_key = "sk-abc"
    key = tmp_path / "key"
    key.write_text("sk-abc\n")
    # A bare `off` in YAML is a boolean.
    result = run_module(url=server.url, checks=["chat"], api_key_file=str(key), thinking=False)
    assert result["passed"] is True, result
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "sk-abc" not in json.dumps(result)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"burst_size": 0}, "burst_size is 0. Needed: more than 0. Change: burst_size."),
        ({"timeout_seconds": -1}, "timeout_seconds is -1. Needed: more than 0."),
        ({"url": "localhost:8000"}, "is not of the form http://host:port or https://host:port. Change: url."),
        ({"api_key_file": "/nonexistent/key"}, "/nonexistent/key cannot be read: No such file or directory"),
        ({"checks": ["nonsense"]}, "value of checks must be one or more of: models, chat"),
        ({"result_path": "/tmp/x"}, "release_id"),
        (
            {"result_path": "/nonexistent/gate.json", "release_id": "abc", "checks": ["models"]},
            "The result cannot be written to /nonexistent/gate.json: No such file or directory.",
        ),
    ],
)
def test_wrong_parameters(
    run_module: RunModule, server: GateServer, tmp_path: Path, params: dict[str, Any], words: str
) -> None:
    result = run_module(**{"url": server.url, **params})
    assert result["failed"] is True
    assert words in result["msg"]


def run_role(folder: Path, *flags: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    play = {
        "name": "Judge",
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "roles": [{"role": "endpoint_gate"}],
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    variables = {"endpoint_gate_timeout_seconds": 10, "endpoint_gate_burst_size": 2, **variables}
    return run_ansible(
        ["ansible-playbook", "-i", "localhost,", "play.yml", "-e", json.dumps(variables), *flags], folder, "default"
    )


def test_role_judges_all_endpoints_before_it_fails(server: GateServer, tmp_path: Path) -> None:
    endpoints = [
        {"name": "bad", "url": server.url, "model": "other", "release_id": "a", "result_path": f"{tmp_path}/a.json"},
        {"name": "good", "url": server.url, "model": MODEL, "release_id": "b", "result_path": f"{tmp_path}/b.json"},
    ]
    run = run_role(tmp_path, endpoint_gate_endpoints=endpoints, endpoint_gate_checks=["models", "chat"])
    assert run.returncode == 2, run.stdout + run.stderr
    assert f"passed: tiny at {server.url}, 2 checks" in run.stdout
    assert f"refused: other at {server.url}, 2 of 2 checks failed" in run.stdout
    assert json.loads((tmp_path / "b.json").read_text())["passed"] is True
    assert json.loads((tmp_path / "a.json").read_text())["passed"] is False


def test_role_that_only_prints(server: GateServer, tmp_path: Path) -> None:
    run = run_role(
        tmp_path,
        endpoint_gate_endpoints=[{"name": "bad", "url": server.url, "model": "other", "thinking": "off"}],
        endpoint_gate_checks=["models"],
        endpoint_gate_fail_on_refusal=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "refused: other" in run.stdout
    assert "changed=0" in run.stdout


def test_role_in_check_mode_on_a_bare_host(tmp_path: Path) -> None:
    run = run_role(
        tmp_path, "--check", endpoint_gate_endpoints=[{"name": "qwen", "url": NOTHING_LISTENS, "model": MODEL}]
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "The gate did not run, because this is check mode" in run.stdout


def test_role_in_check_mode_does_not_fail_on_a_refusal(server: GateServer, tmp_path: Path) -> None:
    server.api_key = "sk-abc"
    (tmp_path / "key").write_text("sk-abc")
    run = run_role(
        tmp_path,
        "--check",
        endpoint_gate_endpoints=[{"name": "next", "url": server.url, "model": "other"}],
        endpoint_gate_checks=["models"],
        endpoint_gate_api_key_file=str(tmp_path / "key"),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "expected also other" in run.stdout


def test_documentation_equals_the_arguments(module: ModuleType) -> None:
    """The module documents each option with the default and the choices that it takes."""
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    arguments = module.argument_spec()
    assert set(documented) == set(arguments)
    for name, argument in arguments.items():
        for key in ("type", "elements", "choices", "default", "required"):
            assert documented[name].get(key) == argument.get(key), (name, key)


def test_role_arguments_equal_the_defaults() -> None:
    options = yaml.safe_load((ROLE / "meta" / "argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    defaults = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
    assert {name: option["default"] for name, option in options.items()} == defaults
