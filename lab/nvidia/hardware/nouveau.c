// SPDX-License-Identifier: GPL-2.0
// Stands for the kernel's own nouveau, which Debian's cloud kernel is built without: the same name and aliases, so udev
// loads it and it binds every NVIDIA GPU that nobody else has.
#include <linux/module.h>
#include <linux/pci.h>

static int modeset = -1;
module_param(modeset, int, 0400);

static int probe(struct pci_dev *device, const struct pci_device_id *id)
{
	pci_info(device, "NVIDIA GPU (simulated)\n");
	return 0;
}

static const struct pci_device_id ids[] = {
	{ PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID, PCI_ANY_ID, PCI_ANY_ID, PCI_BASE_CLASS_DISPLAY << 16, 0xff << 16 },
	{}
};
MODULE_DEVICE_TABLE(pci, ids);
static struct pci_driver driver = { .name = "nouveau", .id_table = ids, .probe = probe };

// As nouveau_drm_init: with modeset=0 the module stays and drives nothing.
static int __init nouveau_init(void)
{
	return modeset ? pci_register_driver(&driver) : 0;
}

static void __exit nouveau_exit(void)
{
	if (modeset)
		pci_unregister_driver(&driver);
}

module_init(nouveau_init);
module_exit(nouveau_exit);
MODULE_LICENSE("GPL");
