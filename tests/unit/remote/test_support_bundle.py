"""What leaves a host for somebody who is to help: nothing secret, and not too much."""

from __future__ import annotations

import json
import tarfile

import pytest

from metalserve.remote.host_probe import CommandMissingError, Output
from metalserve.remote.redact import MARK, redact
from metalserve.remote.releases import activate_release, stage_release
from metalserve.remote.support_bundle import CONTENTS, Limits, known_secrets, make_bundle

KEY = "local-key-0123456789"
# Planted secrets, and the text around them that must stay.
PLANTED = {
    "Authorization: Bearer abc.def-123456": "Authorization: Bearer {}",
    "x-api-key: ABCDEF0123": "x-api-key: {}",
    "HF_TOKEN=hf_abcdefghijklmnopqrst": "HF_TOKEN={}",
    "export OPENAI_API_KEY='sk-proj-abcdefghijklmnop'": "export OPENAI_API_KEY='{}'",
    '{"api_key": "a \\" b", "port": 8000}': '{{"api_key": "{}", "port": 8000}}',
    "db_password: hunter2": "db_password: {}",
    "vllm serve --api-key topsecret1 --port 8000": "vllm serve --api-key {} --port 8000",
    '["--api-key", "topsecret1", "--port"]': '["--api-key", "{}", "--port"]',
    "http://user:pass@mirror/x": "http://{}@mirror/x",
    "https://hub/x?token=abc123&y=1": "https://hub/x?token={}&y=1",
    "key_sha256: 9f86d081884c7d659a2feaa0c55ad015": "key_sha256: {}",
    "stats auth admin:letmein1": "stats auth admin:{}",
    "user api insecure-password s3cr3tpw": "user api insecure-password {}",
    "found hf_abcdefghijklmnopqrstuv in the cache": "found {} in the cache",
    "jwt eyJhbGciOiJIUzI1.eyJzdWIiOiIx.c2ln": "jwt {}",
    "ghp_abcdefghijklmnopqrstuvwx": "{}",
    "a -----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- b": "a {} b",
    "-----BEGIN PRIVATE KEY-----\nMIIEcut": "{}",
    f"the key {KEY} was given": "the key {} was given",
}
HARMLESS = (
    "max_tokens: 100, prompt_tokens=12",
    "api_key_file: /etc/metalserve-keys/qwen",
    "tokenizer: Qwen/Qwen3.6",
    "planned tokens: 95325",
    "METALSERVE_DEVICES=nvidia.com/gpu=0",
    "http://127.0.0.1:8000/health",
    "sha256:0123456789abcdef",
    "--max-num-batched-tokens 8192",
    "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus",
)


@pytest.mark.parametrize("text", PLANTED)
def test_a_planted_secret_goes_and_what_is_around_it_stays(text):
    clean, count = redact(text, [KEY])
    assert clean == PLANTED[text].format(MARK)
    assert count >= 1
    assert redact(clean, [KEY]) == (clean, 0), "a redacted text is left alone"


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text):
    assert redact(text) == (text, 0)


def test_a_short_value_of_a_key_file_does_not_eat_words():
    assert redact("the key", ["the"]) == ("the key", 0)


@pytest.fixture
def root(tmp_path):
    host = tmp_path / "host"
    releases = host / "etc/metalserve"
    endpoint = {"engine": "vllm", "api_key_file": "/etc/metalserve-keys/tiny"}
    files = {
        "release.json": '{"model": "m"}',
        "engine.yaml": "port: 8000\n",
        "release.env": "HF_TOKEN=hf_abcdefghijklmnopqrst\n",
        "endpoint.json": json.dumps(endpoint),
    }
    stage_release(releases, "tiny", "aaaa", files, dry_run=False)
    stage_release(releases, "tiny", "old0", files, dry_run=False)
    activate_release(releases, "tiny", "aaaa", dry_run=False)
    for path, text in {
        "etc/metalserve-keys/tiny": f"{KEY}\n",
        "etc/haproxy/haproxy.cfg": f"# {KEY}\nglobal\n",
        "etc/haproxy/metalserve/engine_key.map": "engine gateway-key-987654\n",
        "etc/haproxy/metalserve/keys.map": "9f86d081 client\n",
        "etc/haproxy/metalserve/tls.pem": "PEM\n",
        "etc/systemd/system/vllm@.service": "[Unit]\n",
    }.items():
        (host / path).parent.mkdir(parents=True, exist_ok=True)
        (host / path).write_text(text)
    return host


def played(argv, limit):
    if argv[0] == "nvidia-smi":
        raise CommandMissingError("nvidia-smi is not installed")
    if "--unit=vllm@tiny.service" in argv:
        return Output(0, f"first\nasked with {KEY} and gateway-key-987654\n", "")
    return Output(0, f"{argv[0]} speaks\n" if argv[0] == "docker" else "", "")


def bundle(root, target, **limits):
    lines = make_bundle(target, {"facts.json": {"a": 1}}, Limits(**limits), root=root, run=played)
    with tarfile.open(target) as archive:
        return lines, {name: archive.extractfile(name).read().decode() for name in archive.getnames()}


def test_the_archive_has_what_helps_and_a_list_of_it(root, tmp_path):
    lines, inside = bundle(root, tmp_path / "b.tar.gz")
    assert inside["facts.json"] == '{\n "a": 1\n}\n'
    assert inside["releases/tiny/aaaa/engine.yaml"] == "port: 8000\n"
    assert inside["releases/tiny/aaaa/release.env"] == f"HF_TOKEN={MARK}\n"
    assert inside["files/etc/systemd/system/vllm@.service"] == "[Unit]\n"
    assert inside["commands/docker-info.txt"] == "docker speaks\n"
    assert inside[CONTENTS].splitlines() == lines
    assert "commands/nvidia-smi.txt: not taken: nvidia-smi is not installed" in lines
    assert "releases/tiny/aaaa/release.env: 20 bytes, 1 places redacted" in lines
    # A release that is neither current nor refused helps nobody.
    assert not [name for name in inside if "old0" in name]
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o077 == 0


def test_no_secret_of_the_host_is_in_it_and_no_file_of_keys(root, tmp_path):
    assert known_secrets(root) == {KEY, "gateway-key-987654"}
    _lines, inside = bundle(root, tmp_path / "b.tar.gz")
    text = "".join(inside.values())
    for secret in (KEY, "gateway-key-987654", "hf_abcdefghijklmnopqrst", "9f86d081", "PEM"):
        assert secret not in text
    assert inside["journal/vllm@tiny.service.txt"] == f"first\nasked with {MARK} and {MARK}\n"
    assert not [name for name in inside if name.endswith((".map", ".pem")) or "keys/" in name]


def test_it_is_bounded_and_says_what_was_left_out(root, tmp_path):
    lines, inside = bundle(root, tmp_path / "b.tar.gz", item_bytes=8)
    assert inside["journal/vllm@tiny.service.txt"] == f"{MARK}\n"[-8:]
    assert inside["facts.json"] == '{\n "a": '[:8]
    assert any(line.startswith("facts.json: 8 bytes, cut from") for line in lines)
    lines, inside = bundle(root, tmp_path / "c.tar.gz", total_bytes=20)
    assert sum(len(text) for name, text in inside.items() if name != CONTENTS) <= 20
    assert any(line.endswith("not taken: the archive would be larger than 20 bytes") for line in lines)
