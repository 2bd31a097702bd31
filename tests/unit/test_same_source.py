"""An image that was built before the last commit is noticed before anything is changed."""

from __future__ import annotations

import shutil
from pathlib import Path

from metalserve import same_source

PACKAGE = Path(same_source.__file__).parent


def checkout(folder):
    return shutil.copytree(PACKAGE, folder / "src/metalserve", ignore=shutil.ignore_patterns("__pycache__"))


def test_the_same_files_are_the_same(tmp_path):
    checkout(tmp_path)
    assert same_source.package_difference(tmp_path) == ""


def test_the_package_of_the_checkout_itself_is_not_compared():
    assert same_source.package_difference(PACKAGE.parents[1]) == ""


def test_a_checkout_without_sources_is_not_compared(tmp_path):
    assert same_source.package_difference(tmp_path) == ""


def test_a_changed_a_new_and_a_missing_file_are_named(tmp_path):
    sources = checkout(tmp_path)
    (sources / "errors.py").write_text("# changed\n")
    assert same_source.package_difference(tmp_path) == "errors.py"
    shutil.copy(PACKAGE / "errors.py", sources / "errors.py")
    (sources / "catalogue/more.yaml").touch()
    assert same_source.package_difference(tmp_path) == "catalogue/more.yaml"
    (sources / "catalogue/more.yaml").unlink()
    (sources / "plain.py").unlink()
    assert same_source.package_difference(tmp_path) == "plain.py"


def test_what_python_leaves_behind_does_not_count(tmp_path):
    sources = checkout(tmp_path)
    (sources / "__pycache__").mkdir()
    (sources / "__pycache__/plain.cpython-311.pyc").touch()
    assert same_source.package_difference(tmp_path) == ""
