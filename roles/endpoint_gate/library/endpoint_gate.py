#!/usr/bin/python
"""Ansible module: decide by behaviour whether an endpoint may take traffic."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: endpoint_gate
short_description: Check by behaviour that an OpenAI-compatible endpoint may take traffic
description:
  - Asks an endpoint questions with known answers (model list, chat, streaming, tool calls, JSON schema, an
    unknown model, a burst) and gives one row per check.
  - Changes nothing on the endpoint. Needs Python 3.9 or newer on the host that runs it and nothing else.
  - Keeps the last result in a file when O(result_path) is given. The file is written again only when the
    release or the outcome of a check differs from what is stored, so that a second run reports no change.
options:
  url:
    description: Base URL of the API, such as V(http://127.0.0.1:8000), with or without C(/v1).
    type: str
    required: true
  model:
    description: Served name that is asked.
    type: str
    required: true
  served_names:
    description: Further names that the model list must hold.
    type: list
    elements: str
    default: []
  engine:
    description: Engine behind the endpoint. It tells which known differences are expected.
    type: str
    choices: [vllm, sglang]
    default: vllm
  thinking:
    description:
      - What to tell the chat template of a reasoning model. V(off) and V(on) send C(enable_thinking), V(absent)
        sends nothing. A template without that variable ignores it.
    type: str
    choices: [absent, 'off', 'on']
    default: absent
  chat_template_kwargs:
    description: Further variables of the chat template. They win over O(thinking).
    type: dict
    default: {}
  max_tokens:
    description: Room for one answer, in tokens. Without it 256, or 4096 with O(thinking=on).
    type: int
  checks:
    description: Checks to run. An empty list runs all.
    type: list
    elements: str
    choices:
      - models
      - chat
      - stream
      - tool_forced
      - tool_auto
      - json_schema
      - unknown_model
      - names
      - usage
      - unicode
      - tools_parallel
      - reasoning
      - long_prompt
      - key
      - routes
      - burst
    default: []
  burst_size:
    description: Concurrent requests of the burst.
    type: int
    default: 16
  hidden_routes:
    description: Routes that must not answer without a key, asked with GET. An empty list takes those of the engine.
    type: list
    elements: str
    default: []
  long_prompt_tokens:
    description: The longest prompt that is asked, in tokens. The context length where that is shorter.
    type: int
    default: 32768
  timeout_seconds:
    description: Limit of the whole gate, in seconds. A check that has not run by then fails.
    type: float
    default: 300
  request_timeout_seconds:
    description: Limit of one request, in seconds.
    type: float
    default: 120
  api_key_file:
    description: File on the host that holds the API key on one line.
    type: path
  result_path:
    description: Where to keep the result as JSON, mode 0644. The folder must exist. Needs O(release_id).
    type: path
  release_id:
    description: Release that is being judged. It is stored with the result.
    type: str
  fail_on_refusal:
    description: Fail when a check is not passed. Otherwise only RV(passed) says so.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
    description:
      - The gate runs but stores nothing. When nothing listens at O(url), which is so on a host that is still
        bare, the result is skipped. A refusal is a warning and does not fail, because the release that a real
        run would judge is not there yet.
  diff_mode:
    support: full
    description: Shows the release and the outcome of each check, stored and new.
author: metalserve
"""

EXAMPLES = r"""
- name: Judge the release that was activated
  endpoint_gate:
    url: http://127.0.0.1:8000
    model: qwen3.6-35b-a3b-fp8
    thinking: 'off'
    release_id: 0f3c9a
    result_path: /etc/metalserve/qwen/releases/0f3c9a/gate.json

- name: See whether an endpoint still answers as it should, without failing
  endpoint_gate:
    url: http://127.0.0.1:30000
    model: qwen3.6-35b-a3b-fp8
    engine: sglang
    checks: [models, chat]
    fail_on_refusal: false
  register: gate
"""

RETURN = r"""
passed:
  description: Whether every check passed. Null when the gate did not run (check mode, nothing listens).
  type: bool
  returned: always
rows:
  description: One entry per check, in the order they ran.
  type: list
  elements: dict
  returned: always
  contains:
    name:
      description: The check.
      type: str
    ok:
      description: Whether it passed.
      type: bool
    seconds:
      description: How long it took.
      type: float
    detail:
      description: One line about what was seen. On failure what was found and expected, and the body's start.
      type: str
  sample:
    - {name: chat, ok: true, seconds: 0.21, detail: "answered 42; usage 24 + 3 = 27 tokens"}
table:
  description: The rows as aligned lines, for printing.
  type: list
  elements: str
  returned: always
msg:
  description: The verdict. When refused it holds the failed rows.
  type: str
  returned: always
"""

import datetime
import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote import gate, gate_record, http_client
from ansible.module_utils.metalserve_remote.gate_key import read_api_key


def argument_spec() -> dict:
    return {
        "url": {"type": "str", "required": True},
        "model": {"type": "str", "required": True},
        "served_names": {"type": "list", "elements": "str", "default": []},
        "engine": {"type": "str", "choices": list(gate.ENGINE_NAMES), "default": "vllm"},
        "thinking": {"type": "str", "choices": list(gate.THINKING), "default": "absent"},
        "chat_template_kwargs": {"type": "dict", "default": {}},
        "max_tokens": {"type": "int"},
        "checks": {"type": "list", "elements": "str", "choices": list(gate.CHECK_NAMES), "default": []},
        "burst_size": {"type": "int", "default": gate.DEFAULT_BURST_SIZE},
        "hidden_routes": {"type": "list", "elements": "str", "default": []},
        "long_prompt_tokens": {"type": "int", "default": gate.DEFAULT_LONG_PROMPT_TOKENS},
        "timeout_seconds": {"type": "float", "default": gate.DEFAULT_TIMEOUT_SECONDS},
        "request_timeout_seconds": {"type": "float", "default": gate.DEFAULT_REQUEST_TIMEOUT_SECONDS},
        # The path is no secret, what it holds is.
        "api_key_file": {"type": "path", "no_log": False},
        "result_path": {"type": "path"},
        "release_id": {"type": "str"},
        "fail_on_refusal": {"type": "bool", "default": True},
    }


def run(module: AnsibleModule) -> None:
    """Run the gate, keep its result, and end the module."""
    params = module.params
    for name in ("burst_size", "long_prompt_tokens", "timeout_seconds", "request_timeout_seconds", "max_tokens"):
        if params[name] is not None and params[name] <= 0:
            module.fail_json(msg=f"{name} is {params[name]:g}. Needed: more than 0. Change: {name}.")
    try:
        endpoint = http_client.parse_base_url(params["url"])
    except ValueError as error:
        module.fail_json(msg=f"{error}. Change: url.")

    if module.check_mode:
        reason = http_client.why_unreachable(endpoint)
        if reason:
            message = f"The gate did not run, because this is check mode and there is {reason}."
            module.exit_json(changed=False, skipped=True, passed=None, rows=[], table=[], msg=message)

    api_key = None
    if params["api_key_file"]:
        try:
            api_key = read_api_key(params["api_key_file"])
        except ValueError as error:
            module.fail_json(msg=f"{error}. Change: api_key_file.")

    result = gate.run_gate(
        params["url"],
        params["model"],
        timeout_seconds=params["timeout_seconds"],
        request_timeout_seconds=params["request_timeout_seconds"],
        api_key=api_key,
        checks=params["checks"],
        served_names=params["served_names"],
        engine=params["engine"],
        thinking=params["thinking"],
        chat_template_kwargs=params["chat_template_kwargs"],
        max_tokens=params["max_tokens"],
        burst_size=params["burst_size"],
        hidden_routes=params["hidden_routes"],
        long_prompt_tokens=params["long_prompt_tokens"],
    )
    answer = {
        "changed": False,
        "passed": result.passed,
        "rows": [row.as_dict() for row in result.rows],
        "table": result.table(),
        "msg": result.verdict() if result.passed else result.refusal(),
    }
    if params["result_path"]:
        answer.update(keep(module, result))
    if result.passed or not params["fail_on_refusal"]:
        module.exit_json(**answer)
    if module.check_mode:
        module.warn(f"A real run would fail if it found what is there now: {answer['msg']}")
        module.exit_json(**answer)
    module.fail_json(**answer)


def keep(module: AnsibleModule, result: gate.GateResult) -> dict:
    """Store the result when it says something new; gives `changed` and the difference."""
    path = module.params["result_path"]
    record = gate_record.new_record(
        result,
        module.params["release_id"],
        datetime.datetime.now(datetime.timezone.utc),  # noqa: UP017 - datetime.UTC is newer than Python 3.9
    )
    try:
        before, after = gate_record.keep_record(Path(path), record, dry_run=module.check_mode)
    except OSError as error:
        module.fail_json(
            msg=f"The result cannot be written to {path}: {error.strerror}. Needed: a folder that exists and "
            f"can be written. Change: result_path. {result.verdict()}",
        )
    if before == after:
        return {"changed": False}
    texts = [json.dumps(each, indent=2, sort_keys=True) + "\n" if each else "" for each in (before, after)]
    return {
        "changed": True,
        "diff": {"before": texts[0], "after": texts[1], "before_header": path, "after_header": path},
    }


def main() -> None:
    run(
        AnsibleModule(
            argument_spec=argument_spec(),
            required_by={"result_path": ("release_id",)},
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
