// What the simulated libraries and tools ask the machine. In a VM the answers come from the modules lab_gpus and nvidia
// through sysfs, also inside a container. Where there is no such module (a lab host that is a container),
// /etc/metalserve-lab/device-root names a directory that stands for the root of /sys and /proc (lab/nvidia/device-root).
#pragma once
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline const char *lab_root(void)
{
	static char root[256];
	static int known;
	FILE *file;

	if (!known++ && (file = fopen("/etc/metalserve-lab/device-root", "r"))) {
		if (fgets(root, sizeof root, file))
			root[strcspn(root, "\n")] = 0;
		fclose(file);
	}
	return root;
}

// The first line of a file below the root; empty when there is none.
static inline const char *lab_read(const char *path)
{
	static char text[4][256];
	static int next;
	char *line = text[next++ % 4], name[1024];
	FILE *file;

	line[0] = 0;
	snprintf(name, sizeof name, "%s%s", lab_root(), path);
	if ((file = fopen(name, "r"))) {
		if (!fgets(line, sizeof text[0], file))
			line[0] = 0;
		line[strcspn(line, "\n")] = 0;
		fclose(file);
	}
	return line;
}

static inline const char *lab_hardware(const char *parameter)
{
	char path[256];

	snprintf(path, sizeof path, "/sys/module/lab_gpus/parameters/%s", parameter);
	return lab_read(path);
}

static inline int lab_number(const char *parameter)
{
	return atoi(lab_hardware(parameter));
}

static inline const char *lab_loaded(void)
{
	return lab_read("/sys/module/nvidia/version");
}

static inline int lab_driver_number(const char *parameter)
{
	char path[256];

	snprintf(path, sizeof path, "/sys/module/nvidia/parameters/%s", parameter);
	return atoi(lab_read(path));
}

struct lab_gpu {
	char address[16]; // as sysfs writes it
	int minor;
};

static inline int lab_is_gpu(const struct dirent *entry)
{
	char path[300];

	snprintf(path, sizeof path, "/sys/bus/pci/devices/%.16s/vendor", entry->d_name);
	if (strcmp(lab_read(path), "0x10de"))
		return 0;
	snprintf(path, sizeof path, "/sys/bus/pci/devices/%.16s/class", entry->d_name);
	return !strncmp(lab_read(path), "0x0302", 6) || !strncmp(lab_read(path), "0x0300", 6);
}

// Where GPUs are only a tree of files, device files may be missing too; where they are there, they count.
static inline int lab_without_files(void)
{
	return lab_root()[0] && access("/dev/nvidiactl", F_OK);
}

// The GPUs that this process may use: those the driver holds and that have a device file here.
static inline int lab_gpus(struct lab_gpu *gpus, int most)
{
	struct dirent **entries;
	char path[600], driver[256];
	int found = 0, minor = 0, count, i;

	snprintf(path, sizeof path, "%s/sys/bus/pci/devices", lab_root());
	count = scandir(path, &entries, lab_is_gpu, alphasort);
	for (i = 0; i < count; i++) {
		ssize_t length;

		snprintf(path, sizeof path, "%s/sys/bus/pci/devices/%.16s/driver", lab_root(), entries[i]->d_name);
		length = readlink(path, driver, sizeof driver - 1);
		driver[length > 0 ? length : 0] = 0;
		if (length > 0 && !strcmp(strrchr(driver, '/') ? strrchr(driver, '/') + 1 : driver, "nvidia")) {
			snprintf(path, sizeof path, "/dev/nvidia%d", minor);
			if (found < most && (lab_without_files() || !access(path, R_OK | W_OK))) {
				snprintf(gpus[found].address, sizeof gpus[found].address, "%.15s", entries[i]->d_name);
				gpus[found++].minor = minor;
			}
			minor++;
		}
		free(entries[i]);
	}
	if (count >= 0)
		free(entries);
	return found;
}

// The real libraries have device files made by the setuid helper, too.
static inline void lab_device_files(void)
{
	if (!lab_root()[0] && access("/dev/nvidiactl", F_OK) && !access("/usr/bin/nvidia-modprobe", X_OK) && system("/usr/bin/nvidia-modprobe -c 0 -u"))
		fprintf(stderr, "nvidia-modprobe failed\n");
}
