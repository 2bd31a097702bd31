"""The container around the probe: how it is started, what is run in it, and that it never stays."""

from __future__ import annotations

import json

import pytest

from metalserve.remote import container_probe

IMAGE = "registry/vllm@sha256:" + "1" * 64


class Docker:
    """Answers commands; `answers` maps their first words to (status, output, error output), the rest succeeds."""

    def __init__(self, answers=None):
        self.answers = answers or {}
        self.commands = []

    def __call__(self, argv, stdin):
        self.commands.append((list(argv), stdin))
        text = " ".join(argv)
        queue = next((queue for start, queue in self.answers.items() if text.startswith(start)), None)
        return queue.pop(0) if queue else (0, json.dumps({"ok": True}) + "\n", "")

    @property
    def words(self):
        return [" ".join(argv[:2]) for argv, _stdin in self.commands]


def test_both_steps_in_one_container_with_a_reload_between():
    docker = Docker()
    steps = container_probe.probe_container(IMAGE, ["nvidia.com/gpu=all"], docker)
    assert [step.as_dict() for step in steps] == [
        {"when": "start", "answer": {"ok": True}, "error": None},
        {"when": "daemon_reload", "answer": {"ok": True}, "error": None},
    ]
    assert docker.words == [
        "docker rm",
        "docker run",
        "docker exec",
        "systemctl daemon-reload",
        "docker exec",
        "docker rm",
    ]


def test_the_container_gets_its_devices_as_the_units_give_them():
    docker = Docker()
    container_probe.probe_container(IMAGE, ["nvidia.com/gpu=0", "nvidia.com/gpu=1"], docker)
    start = docker.commands[1][0]
    assert {"--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=1", "--runtime=runc", "--pull=never"} <= set(start)
    assert start[start.index(IMAGE) - 1] == "--entrypoint=python3"
    assert "--privileged" not in start
    assert "--gpus" not in " ".join(start)


def test_the_program_is_sent_in_whole():
    docker = Docker()
    container_probe.probe_container(IMAGE, ["nvidia.com/gpu=all"], docker)
    program = docker.commands[2][1]
    compile(program, "probe", "exec")
    assert "cuInit" in program


def test_a_container_that_does_not_start_is_reported_with_dockers_own_words():
    words = "docker: Error response from daemon: CDI device injection failed.\n\nRun 'docker run --help'"
    docker = Docker({"docker run": [(126, "", words)]})
    (step,) = container_probe.probe_container(IMAGE, ["nvidia.com/gpu=all"], docker)
    assert step.error == "docker: Error response from daemon: CDI device injection failed."
    assert docker.words[-1] == "docker rm"


def test_after_a_failed_start_nothing_is_reloaded():
    docker = Docker({"docker exec": [(0, json.dumps({"ok": False}), "")]})
    (step,) = container_probe.probe_container(IMAGE, ["nvidia.com/gpu=all"], docker)
    assert step.answer == {"ok": False}
    assert "systemctl daemon-reload" not in docker.words


def test_a_container_that_loses_its_gpus():
    docker = Docker({"docker exec": [(0, json.dumps({"ok": True}), ""), (0, json.dumps({"ok": False}), "")]})
    steps = container_probe.probe_container(IMAGE, ["nvidia.com/gpu=all"], docker)
    assert [step.answer for step in steps] == [{"ok": True}, {"ok": False}]


def test_a_reload_that_fails():
    docker = Docker({"systemctl daemon-reload": [(1, "", "Failed to reload daemon: Access denied")]})
    steps = container_probe.probe_container(IMAGE, ["nvidia.com/gpu=all"], docker)
    assert steps[1].error == "systemctl daemon-reload: Failed to reload daemon: Access denied"


@pytest.mark.parametrize(
    ("output", "complaint", "text"),
    [
        ("", "OCI runtime exec failed: exec: python3: not found", "not found"),
        ("", "", "no answer"),
        ("Segmentation fault", "", "Segmentation fault"),
        ("[1]", "", "[1]"),
    ],
)
def test_a_probe_without_an_answer(output, complaint, text):
    docker = Docker({"docker exec": [(127, output, complaint)]})
    (step,) = container_probe.probe_container(IMAGE, ["nvidia.com/gpu=all"], docker)
    assert step.answer is None
    assert step.error.startswith("the probe ended with status 127")
    assert text in step.error


def test_the_container_is_removed_when_the_probe_is_interrupted():
    class Interrupted(Docker):
        def __call__(self, argv, stdin):
            if argv[1] == "exec":
                raise KeyboardInterrupt
            return super().__call__(argv, stdin)

    docker = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        container_probe.probe_container(IMAGE, ["nvidia.com/gpu=all"], docker)
    assert docker.words[-1] == "docker rm"


def steps_with(answers):
    return [
        container_probe.Step(when, answer, None)
        for when, answer in zip(("start", "daemon_reload"), answers, strict=False)
    ]


def good(*uuids, works=True):
    return {"ok": True, "devices": [{"uuid": uuid, "memory_works": works} for uuid in uuids]}


@pytest.mark.parametrize(
    ("answers", "uuids", "passed"),
    [
        ([good("a", "b"), good("b", "a")], ["b", "a"], True),
        ([good("a"), good("a")], [], True),
        ([good("a"), good("a")], ["a", "b"], False),
        ([good("a")], ["a"], False),
        ([good("a"), {"ok": False, "devices": []}], ["a"], False),
        ([good("a"), None], ["a"], False),
        ([good("a"), good("a", works=False)], ["a"], False),
    ],
)
def test_what_counts_as_passed(answers, uuids, passed):
    assert container_probe.has_passed(steps_with(answers), uuids) is passed


@pytest.mark.parametrize("changed", ["proc/sys/kernel/random/boot_id", "sys/module/nvidia/version", "run/nvidia.yaml"])
def test_a_proof_ends_with_the_boot_the_driver_and_the_specification(tmp_path, changed):
    for name in ("proc/sys/kernel/random/boot_id", "sys/module/nvidia/version", "run/nvidia.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("before")

    def key(image=IMAGE, devices=("nvidia.com/gpu=all",)):
        return container_probe.proof_key(image, devices, ["/run/nvidia.yaml"], str(tmp_path))

    before = key()
    assert key() == before
    assert key(image="other") != before
    assert key(devices=("nvidia.com/gpu=0",)) != before
    (tmp_path / changed).write_text("after")
    assert key() != before


def test_proofs_are_kept(tmp_path):
    path = str(tmp_path / "new" / "proofs.json")
    assert container_probe.read_proofs(path) == {}
    container_probe.write_proofs(path, {IMAGE: "key"})
    assert container_probe.read_proofs(path) == {IMAGE: "key"}


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_broken_file_of_proofs_proves_nothing(tmp_path, text):
    (tmp_path / "proofs.json").write_text(text)
    assert container_probe.read_proofs(str(tmp_path / "proofs.json")) == {}
