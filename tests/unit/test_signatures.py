"""Signatures of images: read beside the image, kept in the lock, and every reason for which one does not count."""

from __future__ import annotations

import base64
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from metalserve.errors import Refusal
from metalserve.signatures import check_signatures, keys_for

IMAGE = "registry.example.com/vllm:0.33.0"
DIGEST = "sha256:" + "d" * 64
ECDSA = ec.ECDSA(SHA256())


def public(key) -> str:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def payload(digest=DIGEST, kind="cosign container image signature") -> bytes:
    critical = {"identity": {"docker-reference": ""}, "image": {"docker-manifest-digest": digest}, "type": kind}
    return json.dumps({"critical": critical, "optional": None}).encode()


def signed(data: bytes, signature: bytes) -> dict[str, str]:
    return {"payload": base64.b64encode(data).decode(), "signature": base64.b64encode(signature).decode()}


@pytest.fixture(scope="module")
def key():
    return ec.generate_private_key(ec.SECP256R1())


def refusal_of(signatures, keys) -> Refusal:
    with pytest.raises(Refusal) as caught:
        check_signatures(IMAGE, DIGEST, signatures, keys)
    return caught.value


def test_a_signature_by_a_key_counts(key):
    other = ec.generate_private_key(ec.SECP256R1())
    found = [signed(payload(), other.sign(payload(), ECDSA)), signed(payload(), key.sign(payload(), ECDSA))]
    check_signatures(IMAGE, DIGEST, found, {"default": [public(key)]})


def test_keys_of_other_kinds():
    mine, theirs = ed25519.Ed25519PrivateKey.generate(), rsa.generate_private_key(65537, 2048)
    keys = {"default": [public(mine), public(theirs)]}
    check_signatures(IMAGE, DIGEST, [signed(payload(), mine.sign(payload()))], keys)
    check_signatures(IMAGE, DIGEST, [signed(payload(), theirs.sign(payload(), padding.PKCS1v15(), SHA256()))], keys)


def test_without_keys_nothing_is_asked():
    check_signatures(IMAGE, DIGEST, [], {})
    check_signatures(IMAGE, DIGEST, [], {"registry.example.com/*": [], "default": ["not read"]})


def test_the_first_pattern_that_fits_decides():
    keys = {"default": ["d"], "registry.example.com/v*": ["a"], "registry.example.com/*": ["b"]}
    assert keys_for(IMAGE, keys) == ["a"]
    assert keys_for("registry.example.com/sglang:1", keys) == ["b"]
    assert keys_for("vllm/vllm-openai:v0.33.0", keys) == ["d"]


def test_an_unsigned_image_is_refused(key):
    refusal = refusal_of([], {"default": [public(key)]})
    assert refusal.found == f"the image {IMAGE} ({DIGEST}) unsigned"
    assert "serving_lock_refresh=true" in refusal.change


@pytest.mark.parametrize(
    ("data", "change", "reason"),
    [
        (payload(), lambda data: data + b" ", "it is of another key, or the payload was changed"),
        (payload("sha256:" + "e" * 64), None, "it is of sha256:eeee"),
        (payload(kind="attestation"), None, "it is a attestation"),
        (b"{}", None, "its payload names no image"),
        (b"no json", None, "its payload names no image"),
    ],
)
def test_a_signature_that_does_not_count_is_refused_with_the_reason(key, data, change, reason):
    signature = key.sign(data, ECDSA)
    refusal = refusal_of([signed(change(data) if change else data, signature)], {"default": [public(key)]})
    assert f"with 1 signature(s), none of which counts: {reason}" in refusal.found


def test_a_signature_of_another_key(key):
    other = ec.generate_private_key(ec.SECP256R1())
    found = refusal_of([signed(payload(), other.sign(payload(), ECDSA))], {"default": [public(key)]}).found
    assert "it is of another key" in found


@pytest.mark.parametrize("broken", [{"payload": "%", "signature": "AA=="}, {"payload": "AA=="}, {"signature": None}])
def test_a_signature_that_cannot_be_read(key, broken):
    assert "it cannot be read" in refusal_of([broken], {"default": [public(key)]}).found


@pytest.mark.parametrize(
    "text", ["", "keys/cosign.pub", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"]
)
def test_a_key_that_is_none(text):
    refusal = refusal_of([], {"default": [text]})
    assert refusal.found.startswith(f"a key of {IMAGE} that cannot be read")
    assert "cosign.pub" in refusal.needed
