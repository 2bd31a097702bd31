"""Fingerprints of the primary keys in a file of OpenPGP public keys, without a keyring and without gpg.

Source: RFC 9580, 4.2 (packet headers), 5.5.4.1 (fingerprint of a version 4 key), 6.2 (ASCII armor).
"""

from __future__ import annotations

import base64
import binascii
import hashlib

from metalserve.errors import Refusal

_BEGIN, _END = "-----BEGIN PGP PUBLIC KEY BLOCK-----", "-----END PGP PUBLIC KEY BLOCK-----"
_PUBLIC_KEY = 6


def fingerprints(text: str) -> list[str]:
    """The fingerprints of all primary keys in an armored file, in its order, in capital letters.

    Raises:
        Refusal: the text is not an armored file of version 4 keys.
    """
    found = []
    for block in text.split(_BEGIN)[1:]:
        content = block.partition(_END)[0].replace("\r", "")
        # Header lines end with an empty one; the line that begins with "=" is a checksum.
        body = content.partition("\n\n")[2]
        lines = [line.strip() for line in body.splitlines()]
        try:
            packets = base64.b64decode("".join(line for line in lines if not line.startswith("=")), validate=True)
            found += _primary_keys(packets)
        except (binascii.Error, ValueError, IndexError) as error:
            raise _unreadable(str(error)) from error
    if not found:
        raise _unreadable("no public key in it")
    return found


def check_key(text: str, allowed: list[str], *, origin: str) -> str:
    """The text itself, once every key in it is one that is allowed.

    Args:
        text: an armored file of public keys.
        allowed: fingerprints, with or without blanks, in any case.
        origin: where the text came from, for the sentence of a refusal.

    Raises:
        Refusal: a key that is not allowed, or no key at all.
    """
    wanted = {"".join(entry.split()).upper() for entry in allowed}
    strange = [key for key in fingerprints(text) if key not in wanted]
    if strange:
        raise Refusal(
            found=f"the package signing key from {origin} has the fingerprint {', '.join(strange)}",
            needed=f"{' or '.join(sorted(wanted))}, and no other key beside it",
            change="nvidia_driver_repository_key, or nvidia_driver_repository_key_fingerprints for a mirror that signs "
            "with a key of its own",
        )
    return text


def _unreadable(why: str) -> Refusal:
    return Refusal(
        found=f"the package signing key cannot be read: {why}",
        needed="an ASCII-armored file of OpenPGP public keys (version 4)",
        change="nvidia_driver_repository_key",
    )


def _primary_keys(data: bytes) -> list[str]:
    keys = []
    place = 0
    while place < len(data):
        header = data[place]
        if not header & 0x80:
            raise ValueError("broken packet")
        if header & 0x40:
            tag = header & 0x3F
            length, place = _new_length(data, place + 1)
        else:
            tag = (header & 0x3C) >> 2
            width = {0: 1, 1: 2, 2: 4}.get(header & 3)
            if width is None:
                raise ValueError("a packet without a length")
            length = int.from_bytes(data[place + 1 : place + 1 + width], "big")
            place += 1 + width
        body = data[place : place + length]
        if len(body) != length:
            raise ValueError("cut off")
        place += length
        if tag == _PUBLIC_KEY:
            if body[0] != 4:
                raise ValueError(f"a key of version {body[0]}")
            digest = hashlib.sha1(b"\x99" + length.to_bytes(2, "big") + body)  # noqa: S324 - the format's own
            keys.append(digest.hexdigest().upper())
    return keys


def _new_length(data: bytes, place: int) -> tuple[int, int]:
    first = data[place]
    if first < 192:
        return first, place + 1
    if first < 224:
        return ((first - 192) << 8) + data[place + 1] + 192, place + 2
    if first == 255:
        return int.from_bytes(data[place + 1 : place + 5], "big"), place + 5
    raise ValueError("a packet of partial length")
