// SPDX-License-Identifier: MIT OR GPL-2.0
// As nvidia-uvm.ko: uses nvidia.ko and owns a device that holds it.
#include <linux/fs.h>
#include <linux/module.h>

int lab_nvidia_anchor(void);
static int major;
static const struct file_operations operations = { .owner = THIS_MODULE };

static int __init uvm_init(void)
{
	lab_nvidia_anchor();
	major = __register_chrdev(0, 0, 2, "nvidia-uvm", &operations);
	return major < 0 ? major : 0;
}

static void __exit uvm_exit(void)
{
	unregister_chrdev(major, "nvidia-uvm");
}

module_init(uvm_init);
module_exit(uvm_exit);
MODULE_VERSION(DRIVER_VERSION);
MODULE_LICENSE("Dual MIT/GPL");
