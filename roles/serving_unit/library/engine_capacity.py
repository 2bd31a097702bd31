#!/usr/bin/python
# Licensed under the Apache License, Version 2.0.
"""Ansible module: the engine's own word on its capacity, against the plan."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_capacity
short_description: Compare the capacity that vLLM reports with the plan
description:
  - Reads C(vllm:cache_config_info) and keeps both numbers beside the release. Changes nothing else.
options:
  url:
    description: The engine's metrics route.
    type: str
    required: true
  planned:
    description: The plan, with C(num_blocks), C(block_size_tokens), C(kv_cache_tokens) and C(max_concurrency).
    type: dict
    required: true
  result_path:
    description: File in which both are kept.
    type: path
    required: true
author: [metalserve]
"""

EXAMPLES = r"""
- name: Compare capacity and plan
  engine_capacity:
    url: http://127.0.0.1:8000/metrics
    planned: {num_blocks: 512, block_size_tokens: 256, kv_cache_tokens: 95325, max_concurrency: 23.27}
    result_path: /etc/metalserve/tiny/current/capacity.json
"""

RETURN = r"""
difference_percent:
  description: By how much the engine holds more (or less) than planned.
  returned: success
  type: float
message:
  description: The comparison in one sentence.
  returned: success
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.capacity import compare, parse_capacity, read_metrics, record


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "planned": {"type": "dict", "required": True},
            "result_path": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    try:
        comparison = compare(wanted["planned"], parse_capacity(read_metrics(wanted["url"])))
        changed = record(Path(wanted["result_path"]), comparison, dry_run=module.check_mode)
    except (OSError, ValueError) as error:
        if module.check_mode:
            module.exit_json(changed=False, difference_percent=None, message="the engine does not run yet")
        module.fail_json(msg=f"The capacity at {wanted['url']} could not be read or kept: {error}.")
    measure = comparison["values"][comparison["measure"]]
    module.exit_json(
        changed=changed,
        difference_percent=comparison["difference_percent"],
        message=f"{comparison['measure']}: planned {measure['planned']}, the engine reports {measure['reported']:.0f} "
        f"({comparison['difference_percent']:+} %)",
    )


if __name__ == "__main__":
    main()
