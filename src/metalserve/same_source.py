"""Whether the package that runs is the one that lies beside the playbooks."""

from __future__ import annotations

from pathlib import Path

_SUFFIXES = (".py", ".yaml", ".json")


def package_difference(tree: Path, package: Path | None = None) -> str:
    """The first file in which the package and the sources of a checkout differ; empty where they are the same.

    An image that was built before the last commit runs old code under new playbooks. Without sources in the checkout
    there is nothing to compare.

    Args:
        tree: the checkout.
        package: the directory of the package; without it the one that runs.
    """
    sources, package = tree / "src/metalserve", package or Path(__file__).parent
    if not sources.is_dir() or sources.resolve() == package.resolve():
        return ""
    names = {
        path.relative_to(folder).as_posix()
        for folder in (sources, package)
        for path in folder.rglob("*")
        if path.suffix in _SUFFIXES
    }
    return next((name for name in sorted(names) if _content(sources / name) != _content(package / name)), "")


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
