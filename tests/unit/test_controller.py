"""Which run of Ansible this is, and whether another one still lives."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys

from metalserve.controller import has_ended, this_run


def _tell(queue):
    queue.put(this_run())


def test_a_worker_belongs_to_the_run_that_forked_it():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_tell, args=(queue,))
    worker.start()
    seen = queue.get(timeout=30)
    worker.join()
    assert seen == this_run()


def test_a_run_that_lives_has_not_ended():
    assert not has_ended(this_run())


def test_a_run_whose_process_is_gone_has_ended():
    code = "from metalserve.controller import this_run; import json; print(json.dumps(this_run()))"
    other = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert other["process"] != str(os.getpid())
    assert has_ended(other)


def test_a_number_that_another_process_has_now_does_not_keep_a_run_alive():
    assert has_ended({**this_run(), "started": "1"})


def test_nothing_is_known_of_another_machine():
    assert not has_ended({**this_run(), "machine": "elsewhere", "started": "1"})
    assert not has_ended({**this_run(), "machine": "", "started": "1"})
