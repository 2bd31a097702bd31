"""execution-environment.yml by ansible-builder: a context that is complete and pinned, and whose package installs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_builder.cli import run as builder

from metalserve.same_source import package_difference

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """What `ansible-builder create` makes, started elsewhere than in the project."""
    target = tmp_path_factory.mktemp("context")
    argv = ["ansible-builder", "create", "--file", str(ROOT / "execution-environment.yml"), "--context", str(target)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*argv, "--output-filename", "Containerfile"])
        patch.chdir(target)
        with pytest.raises(SystemExit) as end:
            builder()
    assert not end.value.code
    return target


@pytest.fixture(scope="module")
def containerfile(context):
    return (context / "Containerfile").read_text()


def test_the_schema_is_the_third():
    assert yaml.safe_load((ROOT / "execution-environment.yml").read_text())["version"] == 3


def test_nothing_is_taken_at_its_latest(containerfile):
    (base,) = re.findall(r'^ARG EE_BASE_IMAGE="(.+)"$', containerfile, re.MULTILINE)
    assert re.search(r":\d+\.\d+$|@sha256:", base)
    assert not re.search(r":latest|--pre\b", containerfile)


def test_python_comes_from_the_lock_by_hash_before_anything_else(context, containerfile):
    installs = re.findall(r"pip install (.*)$", containerfile, re.MULTILINE)
    assert installs[0] == "--no-cache-dir --require-hashes --requirement /tmp/requirements.txt"
    assert installs[1].startswith("--no-cache-dir --no-deps --no-build-isolation /tmp/metalserve ")
    lock = (context / "_build/requirements/runtime.txt").read_text()
    assert lock == (ROOT / "requirements/runtime.txt").read_text()
    names = re.findall(r"^([a-z][\w.-]*)==", lock, re.MULTILINE)
    # The package `ansible` carries the collections; `rich` is for `metalserve run`.
    assert {"ansible", "ansible-core", "ansible-runner", "rich", "setuptools"} <= set(names)
    assert lock.count("--hash=sha256:") >= len(names)


def test_the_context_holds_the_package_and_nothing_that_git_does_not_know(context):
    listed = subprocess.run(
        ["git", "ls-files", "src", "--others", "--cached", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    known = {line for line in listed.stdout.splitlines() if (ROOT / line).exists()}
    there = context / "_build/metalserve"
    found = {path.relative_to(there).as_posix() for path in (there / "src").rglob("*") if path.is_file()}
    assert known <= found
    assert {path for path in found - known if "__pycache__" not in path and ".egg-info" not in path} == set()
    assert all((there / path).read_bytes() == (ROOT / path).read_bytes() for path in known)


def test_the_package_of_the_context_can_be_installed_and_has_its_data(context, tmp_path):
    # As in the image: without dependencies, with the setuptools that is there.
    source = shutil.copytree(context / "_build/metalserve", tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(tmp_path / "installed"), str(source)], check=True, timeout=300)
    assert package_difference(ROOT, tmp_path / "installed/metalserve") == "", "the image would be refused"
    code = (
        "import metalserve, metalserve.catalogue as c, metalserve.surveys, metalserve.remote.rollout, sys;"
        "assert metalserve.__file__.startswith(sys.path[0]), metalserve.__file__;"
        "print(c.model('qwen3.6-35b-a3b-fp8').format, c.host_from_shape('8xH800')['gpus'][0]['name'])"
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); {code}"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("fp8 ")


def test_what_ansible_calls_is_installed(context):
    packages = (context / "_build/bindep.txt").read_text().split()
    assert {"openssh-clients", "git-core", "hostname"} <= set(packages)
