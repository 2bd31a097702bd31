"""The catalogue of GPU errors: every entry has a class, and the classes say what a host may do."""

from __future__ import annotations

from importlib.resources import files

import pytest
import yaml

from metalserve.xid import sxid_meaning, xid_meaning

DATA = yaml.safe_load(files("metalserve.catalogue").joinpath("xid.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("code", DATA["codes"])
def test_every_code_has_a_class_with_a_severity_and_a_remedy(code):
    meaning = xid_meaning(code)
    assert meaning.severity in ("fail", "warn", "ok")
    assert meaning.name
    assert meaning.remedy


@pytest.mark.parametrize(
    ("code", "kind", "severity"),
    [
        (79, "reboot", "fail"),
        (119, "reset", "fail"),
        (48, "hardware", "fail"),
        (54, "power", "fail"),
        (13, "application", "warn"),
        (94, "restart", "warn"),
        (154, "recovery", "warn"),
        (63, "information", "ok"),
    ],
)
def test_classes_of_well_known_codes(code, kind, severity):
    assert (xid_meaning(code).kind, xid_meaning(code).severity) == (kind, severity)


def test_a_code_that_no_source_lists_is_a_warning():
    assert (xid_meaning(9999).kind, xid_meaning(9999).severity) == ("unknown", "warn")


@pytest.mark.parametrize(
    ("message", "severity"),
    [
        ("Fatal, Link 46 MC TS crumbstore MCTO", "fail"),
        ("Non-fatal, Link 46 egress nvs seq 1", "ok"),
        ("Severity 1 Engine instance 46", "warn"),
    ],
)
def test_the_driver_s_word_decides_on_an_nvswitch_error(message, severity):
    assert sxid_meaning(message).severity == severity
