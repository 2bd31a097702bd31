// SPDX-License-Identifier: MIT OR GPL-2.0
// As nvidia-drm.ko: uses nvidia-modeset.ko.
#include <linux/module.h>

int lab_modeset_anchor(void);

static int __init drm_init(void)
{
	lab_modeset_anchor();
	return 0;
}

static void __exit drm_exit(void)
{
}

module_init(drm_init);
module_exit(drm_exit);
MODULE_VERSION(DRIVER_VERSION);
MODULE_LICENSE("Dual MIT/GPL");
