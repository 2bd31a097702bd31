#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Facts of a GPU host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_host
short_description: Facts of an NVIDIA GPU host
description:
  - Describes processor, memory, disks, PCI devices, NVIDIA driver, GPUs, NVLink, Docker, container toolkit, GPU errors
    since boot and TCP listeners.
  - Works with a good, a broken and no driver, with nouveau, and on hosts without a GPU.
  - Needs nothing but Python 3.9 on the host. The action plugin of the same name carries nvidia-ml-py from the
    controller; where neither it nor the NVML library can be used, C(nvidia-smi) is read.
  - Each question is asked in a process of its own and within a time limit. What could not be read is null, and
    C(probe_errors) says why. The module itself never fails for it.
options:
  disk_paths:
    description: Absolute paths whose file system is described. They need not exist yet.
    type: list
    elements: str
    default: [/]
  models_dir:
    description: Absolute path where models live. What is there of them is told.
    type: str
  releases_dir:
    description: Absolute path where deployments keep their releases. Which deployments have some is told.
    type: str
  probe_timeout_seconds:
    description: Seconds each question may take. All are asked at the same time.
    type: float
    default: 10
  nvml_timeout_seconds:
    description: Seconds the question to the NVIDIA driver may take.
    type: float
    default: 30
  root:
    description: Where the host's file system begins.
    type: path
    default: /
  device_root:
    description: Where sysfs PCI, C(/sys/module) and C(/proc/driver) begin. The default is O(root).
    type: path
  pynvml:
    description:
      - The file C(pynvml.py) of nvidia-ml-py, compressed with zlib and coded in base64.
      - The action plugin fills it in. An empty text stands for none.
    type: str
attributes:
  check_mode:
    description: Changes nothing.
    support: full
  facts:
    description: Returns C(ansible_facts['gpu_host']).
    support: full
author:
  - metalserve
"""

EXAMPLES = r"""
- name: Collect the facts of the host
  gpu_host:
    disk_paths:
      - /var/lib/docker
      - /var/lib/metalserve/models

- name: Show the GPUs
  ansible.builtin.debug:
    msg: "{{ ansible_facts['gpu_host']['gpus'] | map(attribute='name') | list }}"
"""

RETURN = r"""
ansible_facts:
  description: The facts. Sizes are bytes; a value that could not be read is null.
  returned: always
  type: dict
  contains:
    gpu_host:
      description: The host.
      type: dict
      contains:
        schema: {description: Version of this structure., type: int, sample: 1}
        kernel: {description: Release of the running kernel., type: str, sample: 6.1.0-32-amd64}
        kernel_headers: {description: Whether modules can be built for the running kernel., type: bool}
        boot_id: {description: "This boot's id, a new one after each boot.", type: str}
        architecture: {description: Machine architecture., type: str, sample: x86_64}
        os: {description: "id, version_id and like (a list that begins with the id) of /etc/os-release.", type: dict}
        virtualization: {description: "none on bare metal, else the word of systemd-detect-virt.", type: str}
        systemd: {description: Release of systemd., type: int, sample: 257}
        services:
          description: "State of NVIDIA's services: active, inactive, failed or missing; null where systemd is silent."
          type: dict
        cpu: {description: "model, sockets, cores, threads, instruction_sets.", type: dict}
        memory: {description: "total_bytes, available_bytes, numa_nodes (node, total_bytes).", type: dict}
        disks: {description: "For each path asked: path, mount, total_bytes, free_bytes.", type: list}
        secure_boot: {description: Whether Secure Boot is on., type: bool}
        mok_enrolled:
          description: Whether the firmware trusts the key with which DKMS signs. False without a key.
          type: bool
        nouveau_bound: {description: Whether nouveau drives an NVIDIA GPU., type: bool}
        driver:
          description:
            - C(state) is none, nouveau, not_loaded, mismatch (module loaded and userland differ) or ok.
            - >-
              loaded, on_disk (for the running kernel), userland, fabric_manager are versions; on_disk_newest_kernel is
              null or the kernel and module version of a newer kernel that the next boot may pick; flavour is open or
              proprietary, of the loaded module if there is one; flavour_on_disk and signer are of the module on disk;
              dkms lists kernel, module (name and version) and state (installed, built, added); cuda is the
              CUDA level of the driver; holders are the processes (pid, process, deployment) that have an NVIDIA device
              open.
          type: dict
        nvswitch_count: {description: NVSwitches on the PCI bus., type: int}
        gpus:
          description:
            - >-
              index, uuid, pci_address, pci_id, name, memory_total_bytes, memory_reserved_bytes, memory_usable_bytes
              (total less reserved: what CUDA reports), memory_used_bytes (without the reserve), compute_capability,
              mig_enabled, ecc_enabled, remapped_rows, nvlink_active, numa_node, pcie_width, pcie_max_width,
              pcie_generation (an idle GPU lowers it), pcie_max_generation, persistence, compute_mode,
              throttle_reasons, sram_uncorrectable (over the GPU's life), sram_threshold_exceeded, fabric_state,
              recovery_action, pci_driver, source.
            - source is pci for a GPU that only the PCI bus knows. Its index is null when the driver knows other GPUs.
          type: list
        links:
          description: How each GPU of the driver reaches each other one, as in C(nvidia-smi topo -m).
          type: list
          sample: [[X, NV18], [NV18, X]]
        acs_redirect:
          description: PCI addresses of the bridges above GPUs whose ACS sends traffic between GPUs to the processor.
          type: list
        iommu: {description: "off, pt (direct) or on (translated).", type: str}
        xid_errors: {description: "GPU errors since boot: code, pci_address, message (the latest), count.", type: list}
        sxid_errors: {description: "NVSwitch errors since boot, in the same form.", type: list}
        models:
          description: "Revisions under O(models_dir): key, revision, published, size_bytes."
          type: list
        deployments: {description: "Names under O(releases_dir) that have releases.", type: list}
        docker:
          description: "version and api of the daemon, cdi, running, images (repository@digest)."
          type: dict
        container_toolkit: {description: version., type: dict}
        cdi:
          description:
            - "specs: path, driver_version (null where it names none) and devices of each NVIDIA specification."
          type: dict
        listening: {description: "TCP listeners: address, port, pid, process, deployment.", type: list}
        probe_errors: {description: "What could not be read and why: probe, error.", type: list}
"""

from functools import partial

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.metalserve_remote.host_facts import collect
from ansible.module_utils.metalserve_remote.host_nvml import load_pynvml


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "disk_paths": {"type": "list", "elements": "str", "default": ["/"]},
            "models_dir": {"type": "str"},
            "releases_dir": {"type": "str"},
            "probe_timeout_seconds": {"type": "float", "default": 10},
            "nvml_timeout_seconds": {"type": "float", "default": 30},
            "root": {"type": "path", "default": "/"},
            "device_root": {"type": "path"},
            # Not a secret: it keeps 60 kB out of the log and of the output at high verbosity.
            "pynvml": {"type": "str", "no_log": True},
        },
        supports_check_mode=True,
    )
    models_dir, releases_dir = module.params["models_dir"], module.params["releases_dir"]
    given = {"disk_paths": module.params["disk_paths"], "models_dir": [models_dir], "releases_dir": [releases_dir]}
    for name, paths in given.items():
        relative = [path for path in paths if path is not None and not path.startswith("/")]
        if relative:
            module.fail_json(
                msg=f"{name} contains {', '.join(map(repr, relative))}. Needed: absolute paths. "
                f"Change: gpu_facts_{name}."
            )
    # The NVML library of this machine does not answer for a host that is only a tree of files.
    packed = module.params["pynvml"] if module.params["root"] == "/" else None
    facts = collect(
        module.params["root"],
        module.params["disk_paths"],
        models_dir=models_dir,
        releases_dir=releases_dir,
        device_root=module.params["device_root"],
        nvml=partial(load_pynvml, packed) if packed else None,
        limit_seconds=module.params["probe_timeout_seconds"],
        nvml_limit_seconds=module.params["nvml_timeout_seconds"],
    )
    module.exit_json(changed=False, ansible_facts={"gpu_host": facts})


if __name__ == "__main__":
    main()
