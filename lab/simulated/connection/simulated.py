"""Hosts that are a function on this machine: what plays do with many hosts, or with lost ones, without any host."""

from __future__ import annotations

import functools
import json
import os
import runpy
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
name: simulated
author: metalserve
short_description: Hosts that are a function on this machine
description:
  - Everything that a controller does is done as ever, to the module that is packed for the host. In the place of the
    host a function says what the module would have answered, C(answer(host, module, arguments)) of a Python file. It
    returns the answer, or V(None) for a host that cannot be reached.
  - Shell commands, such as those for temporary directories, run on this machine.
options:
  answers:
    description: The Python file.
    required: true
    type: path
    vars: [{name: simulated_answers}]
  home:
    description: Directory of this machine that is the host's home.
    required: true
    type: path
    vars: [{name: simulated_home}]
"""

_configure_module = ActionBase._configure_module


@functools.wraps(_configure_module)
def _note_and_configure(self: Any, module_name: str, module_args: Any, task_vars: Any) -> Any:
    self._connection.asked = (module_name.rpartition(".")[2], dict(module_args))
    return _configure_module(self, module_name, module_args, task_vars)


ActionBase._configure_module = _note_and_configure


@functools.cache
def _answers(path: str) -> Callable[[str, str, Mapping[str, Any]], dict[str, Any] | None]:
    answer: Callable[[str, str, Mapping[str, Any]], dict[str, Any] | None] = runpy.run_path(path)["answer"]
    return answer


class Connection(ConnectionBase):  # type: ignore[misc]  # ansible-core has no types
    """Asks the function."""

    transport = "simulated"
    has_pipelining = True
    asked: tuple[str, dict[str, Any]]

    def _connect(self) -> Connection:
        self._connected = True
        return self

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        """Answer for a module, or run a shell command here."""
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        home = Path(self.get_option("home"))
        if in_data is None:
            home.mkdir(parents=True, exist_ok=True)
            done = subprocess.run(
                cmd, shell=True, env={**os.environ, "HOME": str(home)}, capture_output=True, check=False
            )
            return done.returncode, done.stdout, done.stderr
        answer = _answers(self.get_option("answers"))(self._play_context.remote_addr, *self.asked)
        if answer is None:
            raise AnsibleConnectionFailure("no route to host")
        return 0, json.dumps(answer).encode(), b""

    def put_file(self, in_path: str, out_path: str) -> None:
        """Copy a file on this machine."""
        super().put_file(in_path, out_path)
        shutil.copyfile(in_path, out_path)

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Copy a file on this machine."""
        super().fetch_file(in_path, out_path)
        shutil.copyfile(in_path, out_path)

    def close(self) -> None:
        """Nothing is open."""
        self._connected = False
