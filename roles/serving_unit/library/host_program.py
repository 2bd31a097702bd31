#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: put `metalserve-host` on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_program
short_description: Put the program metalserve-host on a host
description:
  - Packs the code that the modules of this project carry into one file that Python runs. The host needs Python 3.9 or
    newer and nothing else.
options:
  path:
    description: Where the program goes, mode 0755.
    type: path
    default: /usr/local/bin/metalserve-host
author: [metalserve]
"""

EXAMPLES = r"""
- name: Install the program
  host_program:
"""

RETURN = r"""
sha256:
  description: Digest of the program.
  returned: success
  type: str
"""

import contextlib
import hashlib
import io
import os
import pkgutil
import tempfile
import zipfile
from pathlib import Path

from ansible.module_utils import metalserve_remote
from ansible.module_utils.basic import AnsibleModule

# Imported for what it brings: Ansible carries what a module imports, and this imports all that the program needs.
from ansible.module_utils.metalserve_remote import host_command  # noqa: F401

MAIN = "import sys\n\nfrom metalserve_remote.host_command import main\n\nsys.exit(main())\n"
# One date for all members: the same code gives the same bytes.
WHEN = (2020, 1, 1, 0, 0, 0)


def program() -> bytes:
    """The zipped program with its first line."""
    sources = {"__main__.py": MAIN, "metalserve_remote/__init__.py": ""}
    for found in pkgutil.iter_modules(metalserve_remote.__path__):
        source = found.module_finder.find_spec(found.name).loader.get_source(found.name)
        sources[f"metalserve_remote/{found.name}.py"] = source
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(sources):
            member = zipfile.ZipInfo(name, WHEN)
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, sources[name])
    return b"#!/usr/bin/env python3\n" + packed.getvalue()


def main() -> None:
    module = AnsibleModule(
        argument_spec={"path": {"type": "path", "default": "/usr/local/bin/metalserve-host"}},
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    text = program()
    digest = hashlib.sha256(text).hexdigest()
    try:
        before = path.read_bytes()
    except OSError:
        before = b""
    right = before == text and path.stat().st_mode & 0o777 == 0o755
    if not right and not module.check_mode:
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(text)
                    os.fchmod(stream.fileno(), 0o755)
                    os.fsync(stream.fileno())
                Path(temporary).replace(path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    Path(temporary).unlink()
        except OSError as error:
            module.fail_json(msg=f"{path} cannot be written: {error.strerror}. Needed: its folder, writable.")
    module.exit_json(changed=not right, sha256=digest)


if __name__ == "__main__":
    main()
