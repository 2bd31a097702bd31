"""What the tests of several scenarios share.

Run a playbook on their inventory, ask an endpoint from inside its host, show a host's journal under a failed test.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
_ASK = """
import json, sys, urllib.error, urllib.request
url, body = sys.argv[1], (sys.argv[2].encode() if len(sys.argv) > 2 else None)
request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
try:
    answer = urllib.request.urlopen(request, timeout=120)
    status = answer.status
except urllib.error.HTTPError as error:
    answer, status = error, error.code
except OSError as error:
    print(json.dumps([0, str(error)]))
    sys.exit()
print(json.dumps([status, answer.read().decode()]))
"""


class Playbook:
    """The result of one ansible-playbook run.

    Attributes:
        rc: exit status.
        text: all it printed, with single blanks, because Ansible folds long lines.
        end: its last lines, for the message of a failed assertion: the failed task stands there.
    """

    def __init__(self, process):
        self.rc = process.returncode
        output = process.stdout + process.stderr
        self.text = " ".join(output.replace("''", "'").split())
        self.end = "\n".join(["", *output.splitlines()[-80:]])

    @property
    def changed(self):
        return "changed=0" not in self.text


def play(inventory, playbook, extra=None, *options, timeout=1800):
    """Run a playbook of the project, named by its path there, with extra variables."""
    environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    argv = [str(Path(sys.executable).with_name("ansible-playbook")), str(PROJECT / playbook), "-i", str(inventory)]
    if extra:
        argv += ["-e", json.dumps(extra)]
    process = subprocess.run(
        [*argv, *options], cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=timeout
    )
    return Playbook(process)


def asker(host, url, ready_route, seconds=600):
    """Wait until an engine is ready; a function that asks it (path, body) inside the host and gives (status, text)."""

    def ask(path, body=None):
        arguments = [f"{url}{path}"] if body is None else [f"{url}{path}", json.dumps(body)]
        status, text = json.loads(host.check_output("python3 -c %s" + " %s" * len(arguments), _ASK, *arguments))
        return status, text

    deadline = time.monotonic() + seconds
    while ask(ready_route)[0] != 200:
        assert time.monotonic() < deadline, f"{url} did not become ready in {seconds} s"
        time.sleep(2)
    return ask


def show_journal(item, report, unit):
    """Put the last lines of a unit's journal under the report of a failed test."""
    host = item.funcargs.get("host") if hasattr(item, "funcargs") else None
    if report.when == "call" and report.failed and host is not None:
        journal = host.run("journalctl --unit %s --lines 60 --no-pager --output cat | cut -c1-400", unit)
        report.sections.append((f"journal of {unit}", journal.stdout or journal.stderr))
