// SPDX-License-Identifier: MIT OR GPL-2.0
// As nvidia-modeset.ko: uses nvidia.ko and is used by nvidia-drm.ko.
#include <linux/module.h>

int lab_nvidia_anchor(void);
int lab_modeset_anchor(void);
int lab_modeset_anchor(void)
{
	return lab_nvidia_anchor();
}
EXPORT_SYMBOL(lab_modeset_anchor);
MODULE_VERSION(DRIVER_VERSION);
MODULE_LICENSE("Dual MIT/GPL");
