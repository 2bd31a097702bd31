// SPDX-License-Identifier: GPL-2.0
// The GPUs and NVSwitches of a lab VM: a PCI host bridge with devices that have nothing but a configuration space.
//
// The kernel enumerates them like any others, so sysfs, udev's loading by alias, binding and unbinding of drivers are
// real. What a device is comes as parameters (hardware/*.conf); what NVML says about it is read from them as well.
#include <linux/module.h>
#include <linux/pci.h>

#define DOMAIN 1
#define MOST_DEVICES 32
#define NVIDIA 0x10de

static int gpus = 1, switches;
static int gpu_device = 0x20b2, gpu_subsystem = 0x1463, switch_device = 0x1af1;
module_param(gpus, int, 0444);
module_param(switches, int, 0444);
module_param(gpu_device, int, 0444);
module_param(gpu_subsystem, int, 0444);
module_param(switch_device, int, 0444);

// For NVML only. Writable: a GPU may fall off the bus, a row may be remapped, while the machine runs.
static char *gpu_name = "NVIDIA A100-SXM4-80GB", *compute_capability = "8.0";
module_param(gpu_name, charp, 0444);
module_param(compute_capability, charp, 0444);
static int memory_mib = 81920, reserved_mib = 869, architecture = 7, nvlinks = 12, nvlink_version = 3, pcie_generation = 4;
static int fabric_state_reported, ecc = 1, lost_gpu = -1, remap_failure, recovery_action;
module_param(memory_mib, int, 0444);
module_param(reserved_mib, int, 0444);
module_param(architecture, int, 0444);
module_param(nvlinks, int, 0644);
module_param(nvlink_version, int, 0444);
module_param(pcie_generation, int, 0444);
module_param(fabric_state_reported, int, 0444);
module_param(ecc, int, 0644);
module_param(lost_gpu, int, 0644);
module_param(remap_failure, int, 0644);
module_param(recovery_action, int, 0644);

static u8 space[MOST_DEVICES][256];
static int devices;
static struct pci_sysdata sysdata = { .domain = DOMAIN, .node = NUMA_NO_NODE };
static struct pci_bus *root;

static int read_space(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	*value = ~0;
	if (PCI_FUNC(devfn) || PCI_SLOT(devfn) >= devices)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (where + size <= 256) {
		*value = 0;
		memcpy(value, &space[PCI_SLOT(devfn)][where], size);
	}
	return PCIBIOS_SUCCESSFUL;
}

static int write_space(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 value)
{
	if (PCI_FUNC(devfn) || PCI_SLOT(devfn) >= devices)
		return PCIBIOS_DEVICE_NOT_FOUND;
	// There is no memory behind these devices: base addresses stay zero, which says so.
	if (where == PCI_COMMAND)
		memcpy(&space[PCI_SLOT(devfn)][where], &value, min(size, 2));
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops operations = { .read = read_space, .write = write_space };

static void put(u8 *at, u32 value, int size)
{
	memcpy(at, &value, size);
}

static void add_device(int device, int subsystem, u32 class, int generation)
{
	u8 *at = space[devices++];

	put(at + PCI_VENDOR_ID, NVIDIA, 2);
	put(at + PCI_DEVICE_ID, device, 2);
	put(at + PCI_STATUS, PCI_STATUS_CAP_LIST, 2);
	put(at + PCI_CLASS_REVISION, class << 8 | 0xa1, 4);
	put(at + PCI_SUBSYSTEM_VENDOR_ID, NVIDIA, 2);
	put(at + PCI_SUBSYSTEM_ID, subsystem, 2);
	put(at + PCI_CAPABILITY_LIST, 0x40, 1);
	put(at + 0x40, PCI_CAP_ID_EXP, 1);
	put(at + 0x40 + PCI_EXP_FLAGS, 2 | PCI_EXP_TYPE_ENDPOINT << 4, 2);
	put(at + 0x40 + PCI_EXP_LNKCAP, generation | 16 << 4, 4);
	put(at + 0x40 + PCI_EXP_LNKSTA, 1 | 16 << 4, 2); // idle: first generation, all lanes
	put(at + 0x40 + PCI_EXP_LNKCAP2, (1 << (generation + 1)) - 2, 4);
}

static int __init lab_gpus_init(void)
{
	LIST_HEAD(resources);
	int i;

	if (gpus < 0 || switches < 0 || gpus + switches > MOST_DEVICES)
		return -EINVAL;
	for (i = 0; i < gpus; i++)
		add_device(gpu_device, gpu_subsystem, 0x030200, pcie_generation);
	for (i = 0; i < switches; i++)
		add_device(switch_device, 0, 0x068000, 4);
	root = pci_scan_root_bus(NULL, 0, &operations, &sysdata, &resources);
	if (!root)
		return -ENODEV;
	pci_bus_add_devices(root);
	return 0;
}

static void __exit lab_gpus_exit(void)
{
	pci_lock_rescan_remove();
	pci_stop_root_bus(root);
	pci_remove_root_bus(root);
	pci_unlock_rescan_remove();
}

module_init(lab_gpus_init);
module_exit(lab_gpus_exit);
MODULE_DESCRIPTION("PCI devices that look like NVIDIA GPUs and NVSwitches");
MODULE_LICENSE("GPL");
