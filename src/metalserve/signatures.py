"""Signatures of images as cosign writes them: read from the registry once, kept in the lock, checked at every run.

`cosign sign --key` puts an image beside the signed one, with the tag sha256-<digest>.sig. Each of its layers is a
payload, a small JSON document that names the digest; the signature over the payload's bytes is in the layer's
annotations. The digest is what is signed: a signature in the lock is as good as one in the registry, and a run needs no
network.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from metalserve.errors import Refusal
from metalserve.remote.image_names import repository_of


def keys_for(reference: str, keys: Mapping[str, Sequence[str]]) -> list[str]:
    """The keys of an image: those of the first pattern that its repository fits, else those of `default`.

    Args:
        reference: the image, with or without its tag.
        keys: {pattern of a repository, or `default`: [public key in PEM]}; an empty list asks for no signature.
    """
    repository = repository_of(reference)
    for pattern, listed in keys.items():
        if pattern != "default" and fnmatch(repository, pattern):
            return list(listed)
    return list(keys.get("default") or [])


def check_signatures(
    reference: str, digest: str, signatures: Sequence[Mapping[str, str]], keys: Mapping[str, Sequence[str]]
) -> None:
    """Refuse an image that none of its keys has signed; without keys for it nothing is asked.

    Raises:
        Refusal: no signature, signatures by other keys, of another image, or a key that is none.
    """
    wanted = keys_for(reference, keys)
    if not wanted:
        return
    public = [_read_key(text, reference) for text in wanted]
    reasons = [_wrong(signature, digest, public) for signature in signatures]
    if "" in reasons:
        return
    raise Refusal(
        found=f"the image {reference} ({digest}) "
        + (f"with {len(reasons)} signature(s), none of which counts: {'; '.join(reasons)}" if reasons else "unsigned"),
        needed=f"a signature by one of its {len(public)} key(s) over exactly this digest, as `cosign sign --key` puts "
        "it into the registry beside the image",
        change="sign it, then run playbooks/ops/lock.yml with -e serving_lock_refresh=true, which reads signatures; or "
        "serving_image_keys",
    )


def _wrong(signature: Mapping[str, str], digest: str, keys: Sequence[Any]) -> str:
    """Why a signature does not count; empty when it does."""
    try:
        payload = base64.b64decode(signature["payload"], validate=True)
        value = base64.b64decode(signature["signature"], validate=True)
    except (KeyError, TypeError, binascii.Error):
        return "it cannot be read"
    if not any(_verifies(key, payload, value) for key in keys):
        return "it is of another key, or the payload was changed"
    try:
        critical = json.loads(payload)["critical"]
        named, kind = critical["image"]["docker-manifest-digest"], critical["type"]
    except (ValueError, KeyError, TypeError):
        return "its payload names no image"
    if kind != "cosign container image signature":
        return f"it is a {kind}"
    return "" if named == digest else f"it is of {named}"


def _verifies(key: Any, payload: bytes, signature: bytes) -> bool:
    # Here, because most runs check no signature and planning needs none of it.
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, payload, ec.ECDSA(SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, payload, padding.PKCS1v15(), SHA256())
        else:
            key.verify(signature, payload)
    except InvalidSignature:
        return False
    return True


def _read_key(text: str, reference: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(str(text).encode())
    except ValueError:
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey):
        raise Refusal(
            found=f"a key of {reference} that cannot be read ({str(text).strip()[:40]!r})",
            needed="a public key in PEM, as `cosign generate-key-pair` writes it into cosign.pub",
            change="serving_image_keys; a file is read with lookup('file', ...)",
        )
    return key
