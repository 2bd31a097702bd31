// SPDX-License-Identifier: MIT OR GPL-2.0
// A module that is to the kernel what nvidia.ko is: name, version, aliases, devices, /proc files, and a use count that
// an open device really holds. It drives nothing.
#include <linux/atomic.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#define MAJOR_NUMBER 195
#define CONTROL_MINOR 255
#define SET_PERSISTENT 1

// Read by the simulated NVML and CUDA libraries.
static int lab_fabric_sessions, lab_persistence;
module_param(lab_fabric_sessions, int, 0444);
module_param(lab_persistence, int, 0444);
static int NVreg_OpenRmEnableUnsupportedGpus = 1;
module_param(NVreg_OpenRmEnableUnsupportedGpus, int, 0444);

static int gpus, nvswitches, nvswitch_major;
static struct proc_dir_entry *proc, *proc_gpus, *proc_nvswitch, *proc_nvswitch_devices;

// nvidia-uvm and the others use it, so that they keep this module loaded.
int lab_nvidia_anchor(void);
int lab_nvidia_anchor(void)
{
	return gpus;
}
EXPORT_SYMBOL(lab_nvidia_anchor);

static int open_device(struct inode *inode, struct file *file)
{
	return iminor(inode) < gpus || iminor(inode) == CONTROL_MINOR ? 0 : -ENXIO;
}

static long control(struct file *file, unsigned int command, unsigned long argument)
{
	if (command != SET_PERSISTENT)
		return -ENOTTY;
	if (!file->private_data)
		lab_persistence++;
	file->private_data = &lab_persistence;
	return 0;
}

static int close_device(struct inode *inode, struct file *file)
{
	if (file->private_data)
		lab_persistence--;
	return 0;
}

static const struct file_operations device_operations = {
	.owner = THIS_MODULE, .open = open_device, .release = close_device, .unlocked_ioctl = control,
};

static int open_nvswitch(struct inode *inode, struct file *file)
{
	lab_fabric_sessions++;
	return 0;
}

static int close_nvswitch(struct inode *inode, struct file *file)
{
	lab_fabric_sessions--;
	return 0;
}

static const struct file_operations nvswitch_operations = {
	.owner = THIS_MODULE, .open = open_nvswitch, .release = close_nvswitch,
};

static int show_information(struct seq_file *file, void *unused)
{
	struct pci_dev *device = file->private;

	seq_printf(file, "Model: \t\t NVIDIA (simulated)\nBus Location: \t %s\nDevice Minor: \t %d\n", pci_name(device), (int)(long)pci_get_drvdata(device));
	return 0;
}

static int probe_gpu(struct pci_dev *device, const struct pci_device_id *id)
{
	struct proc_dir_entry *directory = proc_mkdir(pci_name(device), proc_gpus);

	pci_set_drvdata(device, (void *)(long)gpus++);
	proc_create_single_data("information", 0444, directory, show_information, device);
	return 0;
}

static void remove_gpu(struct pci_dev *device)
{
	remove_proc_subtree(pci_name(device), proc_gpus);
}

static int probe_nvswitch(struct pci_dev *device, const struct pci_device_id *id)
{
	nvswitches++;
	proc_mkdir(pci_name(device), proc_nvswitch_devices);
	return 0;
}

static const struct pci_device_id gpu_ids[] = {
	{ PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID, PCI_ANY_ID, PCI_ANY_ID, PCI_CLASS_DISPLAY_VGA << 8, ~0 },
	{ PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID, PCI_ANY_ID, PCI_ANY_ID, PCI_CLASS_DISPLAY_3D << 8, ~0 },
	{}
};
static const struct pci_device_id nvswitch_ids[] = {
	{ PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID, PCI_ANY_ID, PCI_ANY_ID, 0x068000, ~0 },
	{}
};
MODULE_DEVICE_TABLE(pci, gpu_ids);
static struct pci_driver gpu_driver = { .name = "nvidia", .id_table = gpu_ids, .probe = probe_gpu, .remove = remove_gpu };
static struct pci_driver nvswitch_driver = { .name = "nvidia-nvswitch", .id_table = nvswitch_ids, .probe = probe_nvswitch };

static int show_version(struct seq_file *file, void *unused)
{
	seq_puts(file, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " DRIVER_VERSION
		 "  Release Build  (metalserve@lab)\nGCC version:  gcc version " __VERSION__ "\n");
	return 0;
}

static void undo(void)
{
	proc_remove(proc_nvswitch);
	proc_remove(proc);
	unregister_chrdev(MAJOR_NUMBER, "nvidia");
}

static int __init nvidia_init(void)
{
	int error = __register_chrdev(MAJOR_NUMBER, 0, CONTROL_MINOR + 1, "nvidia", &device_operations);

	if (error < 0)
		return error;
	proc = proc_mkdir("driver/nvidia", NULL);
	proc_gpus = proc_mkdir("gpus", proc);
	proc_create_single("version", 0444, proc, show_version);
	proc_nvswitch = proc_mkdir("driver/nvidia-nvswitch", NULL);
	proc_nvswitch_devices = proc_mkdir("devices", proc_nvswitch);
	error = pci_register_driver(&nvswitch_driver);
	if (!error) {
		error = pci_register_driver(&gpu_driver);
		if (error)
			pci_unregister_driver(&nvswitch_driver);
	}
	if (error) {
		undo();
		return error;
	}
	// As the real module: without a GPU of its own it does not stay.
	if (!gpus) {
		pr_err("NVRM: No NVIDIA GPU found; nouveau, rivafb, nvidiafb or rivatv may have obtained ownership of it.\n");
		pci_unregister_driver(&gpu_driver);
		pci_unregister_driver(&nvswitch_driver);
		undo();
		return -ENODEV;
	}
	if (nvswitches)
		nvswitch_major = __register_chrdev(0, 0, CONTROL_MINOR + 1, "nvidia-nvswitch", &nvswitch_operations);
	pr_info("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  " DRIVER_VERSION "\n");
	return 0;
}

static void __exit nvidia_exit(void)
{
	if (nvswitch_major > 0)
		unregister_chrdev(nvswitch_major, "nvidia-nvswitch");
	pci_unregister_driver(&gpu_driver);
	pci_unregister_driver(&nvswitch_driver);
	undo();
}

module_init(nvidia_init);
module_exit(nvidia_exit);
MODULE_VERSION(DRIVER_VERSION);
MODULE_LICENSE("Dual MIT/GPL");
