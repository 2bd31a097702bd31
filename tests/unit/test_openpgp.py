"""Fingerprints of key files, against what gpg said of the same files when they were made."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from metalserve.errors import Refusal
from metalserve.openpgp import check_key, fingerprints

DATA = Path(__file__).parent / "fixtures/openpgp"
ONE, TWO = "4106DD03B2D78DD09A23A08CCDBAA6682FFE28CF", "4CA18035BAEDD1789052BA56CD295B9E1815A148"
KEY = (DATA / "one.asc").read_text()


def test_a_subkey_is_not_counted():
    assert fingerprints(KEY) == [ONE]


def test_every_key_of_a_file_is_seen():
    assert fingerprints((DATA / "both.asc").read_text()) == [ONE, TWO]
    assert fingerprints(KEY + (DATA / "both.asc").read_text()) == [ONE, ONE, TWO]


def test_header_lines_and_other_line_ends_do_not_matter():
    first = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n"
    assert fingerprints(KEY.replace(first, first + "Comment: none\n")) == [ONE]
    assert fingerprints(KEY.replace("\n", "\r\n")) == [ONE]


@pytest.mark.skipif(shutil.which("gpg") is None, reason="gpg is not installed: nothing to compare with")
@pytest.mark.parametrize("name", ["one.asc", "both.asc"])
def test_gpg_says_the_same(name, tmp_path):
    tmp_path.chmod(0o700)
    command = ["gpg", "--homedir", tmp_path, "--batch", "--show-keys", "--with-colons", DATA / name]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    following = [b.split(":")[9] for a, b in itertools.pairwise(lines) if a.startswith("pub:")]
    assert fingerprints((DATA / name).read_text()) == following


def test_the_right_key_passes_however_its_fingerprint_is_written():
    assert check_key(KEY, ["4106 DD03 B2D7 8DD0 9A23  A08C CDBA A668 2FFE 28CF".lower()], origin="x") == KEY


@pytest.mark.parametrize(("name", "strange"), [("one.asc", ONE), ("both.asc", TWO)])
def test_a_key_that_is_not_the_expected_one_is_refused(name, strange):
    allowed = [ONE] if strange == TWO else [TWO]
    with pytest.raises(Refusal) as refusal:
        check_key((DATA / name).read_text(), allowed, origin="https://mirror/key")
    text = str(refusal.value)
    assert f"key from https://mirror/key has the fingerprint {strange}" in text
    assert f"Needed: {allowed[0]}, and no other key beside it" in text
    assert "nvidia_driver_repository_key_fingerprints" in text


@pytest.mark.parametrize(
    "text",
    ["", "<html>404</html>", KEY.replace("mDME", "mDM"), KEY[:200], KEY.replace("\n\n", "\n")],
    ids=["empty", "a page", "damaged", "cut off", "no empty line"],
)
def test_what_is_no_key_is_refused(text):
    with pytest.raises(Refusal, match=r"cannot be read: .* Needed: an ASCII-armored file .* Change: nvidia_driver_rep"):
        check_key(text, [ONE], origin="x")
