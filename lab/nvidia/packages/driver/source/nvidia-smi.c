// nvidia-smi of the lab: the forms that metalserve reads and the list that a person asks for, all through
// libnvidia-ml.so.1, with the messages and exit codes of the real one when that does not start.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *Device;
static void *library;

static int call(const char *name, void *a, void *b, void *c, void *d)
{
	int (*function)(void *, void *, void *, void *) = (int (*)(void *, void *, void *, void *))dlsym(library, name);

	return function ? function(a, b, c, d) : 13;
}

struct gpu {
	char name[96], uuid[96];
	struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci;
	struct { unsigned version; unsigned long long total, reserved, free, used; } memory;
	int major, minor, capability, ecc_known, mig_known, links;
	unsigned ecc, mig, pending, width, generation, correctable, uncorrectable, remap_pending, remap_failure;
};

static int links_of(Device device)
{
	unsigned active;
	int link = 0;

	while (link < 36 && !call("nvmlDeviceGetNvLinkState", device, (void *)(long)link, &active, NULL))
		link++;
	return link;
}

static int read_gpu(long index, struct gpu *gpu)
{
	Device device;
	int error = call("nvmlDeviceGetHandleByIndex_v2", (void *)index, &device, NULL, NULL);

	if (error)
		return error;
	memset(gpu, 0, sizeof *gpu);
	gpu->memory.version = sizeof gpu->memory | 2 << 24;
	call("nvmlDeviceGetName", device, gpu->name, (void *)sizeof gpu->name, NULL);
	call("nvmlDeviceGetUUID", device, gpu->uuid, (void *)sizeof gpu->uuid, NULL);
	call("nvmlDeviceGetPciInfo_v3", device, &gpu->pci, NULL, NULL);
	call("nvmlDeviceGetMemoryInfo_v2", device, &gpu->memory, NULL, NULL);
	call("nvmlDeviceGetCurrPcieLinkWidth", device, &gpu->width, NULL, NULL);
	call("nvmlDeviceGetMaxPcieLinkGeneration", device, &gpu->generation, NULL, NULL);
	call("nvmlDeviceGetCudaComputeCapability", device, &gpu->major, &gpu->minor, NULL);
	gpu->ecc_known = !call("nvmlDeviceGetEccMode", device, &gpu->ecc, &gpu->pending, NULL);
	gpu->mig_known = !call("nvmlDeviceGetMigMode", device, &gpu->mig, &gpu->pending, NULL);
	gpu->links = links_of(device);
	int (*rows)(Device, unsigned *, unsigned *, unsigned *, unsigned *) = (int (*)(Device, unsigned *, unsigned *, unsigned *, unsigned *))dlsym(library, "nvmlDeviceGetRemappedRows");
	rows(device, &gpu->correctable, &gpu->uncorrectable, &gpu->remap_pending, &gpu->remap_failure);
	return 0;
}

static const char *mode(int known, unsigned on) { return known ? on ? "Enabled" : "Disabled" : "N/A"; }

static void print_xml(unsigned count, const char *driver, int cuda)
{
	struct gpu gpu;
	unsigned i;

	printf("<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v12.dtd\">\n<nvidia_smi_log>\n");
	printf("\t<driver_version>%s</driver_version>\n\t<cuda_version>%d.%d</cuda_version>\n\t<attached_gpus>%u</attached_gpus>\n", driver, cuda / 1000, cuda % 1000 / 10, count);
	for (i = 0; i < count; i++) {
		if (read_gpu(i, &gpu))
			continue;
		printf("\t<gpu id=\"%s\">\n\t\t<product_name>%s</product_name>\n\t\t<uuid>%s</uuid>\n\t\t<minor_number>%u</minor_number>\n", gpu.pci.bus_id, gpu.name, gpu.uuid, i);
		printf("\t\t<mig_mode><current_mig>%s</current_mig></mig_mode>\n\t\t<ecc_mode><current_ecc>%s</current_ecc></ecc_mode>\n", mode(gpu.mig_known, gpu.mig), mode(gpu.ecc_known, gpu.ecc));
		printf("\t\t<pci>\n\t\t\t<pci_bus_id>%s</pci_bus_id>\n\t\t\t<pci_device_id>%08X</pci_device_id>\n\t\t\t<pci_gpu_link_info><link_widths><max_link_width>%ux</max_link_width><current_link_width>%ux</current_link_width></link_widths></pci_gpu_link_info>\n\t\t</pci>\n", gpu.pci.bus_id, gpu.pci.id, gpu.width, gpu.width);
		printf("\t\t<fb_memory_usage><total>%llu MiB</total><reserved>%llu MiB</reserved><used>%llu MiB</used><free>%llu MiB</free></fb_memory_usage>\n", gpu.memory.total >> 20, gpu.memory.reserved >> 20, gpu.memory.used >> 20, gpu.memory.free >> 20);
		printf("\t\t<remapped_rows><remapped_row_corr>%u</remapped_row_corr><remapped_row_unc>%u</remapped_row_unc><remapped_row_pending>%s</remapped_row_pending><remapped_row_failure>%s</remapped_row_failure></remapped_rows>\n\t</gpu>\n", gpu.correctable, gpu.uncorrectable, gpu.remap_pending ? "Yes" : "No", gpu.remap_failure ? "Yes" : "No");
	}
	printf("</nvidia_smi_log>\n");
}

// One field of --query-gpu.
static void print_field(const char *field, unsigned index, const struct gpu *gpu, const char *driver)
{
	if (!strcmp(field, "index")) printf("%u", index);
	else if (!strcmp(field, "name")) printf("%s", gpu->name);
	else if (!strcmp(field, "uuid") || !strcmp(field, "gpu_uuid")) printf("%s", gpu->uuid);
	else if (!strcmp(field, "driver_version")) printf("%s", driver);
	else if (!strcmp(field, "pci.bus_id") || !strcmp(field, "gpu_bus_id")) printf("%s", gpu->pci.bus_id);
	else if (!strcmp(field, "compute_cap")) printf("%d.%d", gpu->major, gpu->minor);
	else if (!strcmp(field, "memory.total")) printf("%llu", gpu->memory.total >> 20);
	else { fprintf(stderr, "Field \"%s\" is not a valid field to query.\n", field); exit(2); }
}

static void print_query(char *fields, unsigned count, const char *driver)
{
	struct gpu gpu;
	unsigned i;

	for (i = 0; i < count; i++) {
		char *copy = strdup(fields), *rest = copy, *field;
		int first = 1;

		if (read_gpu(i, &gpu))
			continue;
		while ((field = strsep(&rest, ","))) {
			printf(first ? "" : ", ");
			print_field(field, i, &gpu, driver);
			first = 0;
		}
		printf("\n");
		free(copy);
	}
}

static void print_topology(unsigned count)
{
	struct gpu gpu;
	unsigned row, column;

	for (column = 0; column < count; column++)
		printf("\tGPU%u", column);
	printf("\n");
	for (row = 0; row < count; row++) {
		read_gpu(row, &gpu);
		printf("GPU%u", row);
		for (column = 0; column < count; column++) {
			if (row == column) printf("\t X ");
			else if (gpu.links) printf("\tNV%d", gpu.links);
			else printf("\tNODE");
		}
		printf("\n");
	}
}

int main(int argc, char **argv)
{
	char driver[96];
	unsigned count, i;
	struct gpu gpu;
	int cuda, error, link;

	library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	if (!library) {
		puts("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display Driver is properly installed and present in your system.");
		return 12;
	}
	error = call("nvmlInit_v2", NULL, NULL, NULL, NULL);
	if (error == 9) {
		puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.");
		return error;
	}
	if (error) {
		const char *(*words)(int) = (const char *(*)(int))dlsym(library, "nvmlErrorString");

		printf("Failed to initialize NVML: %s\nNVML library version: %s\n", words(error), DRIVER_VERSION);
		return error;
	}
	call("nvmlSystemGetDriverVersion", driver, (void *)sizeof driver, NULL, NULL);
	call("nvmlSystemGetCudaDriverVersion_v2", &cuda, NULL, NULL, NULL);
	call("nvmlDeviceGetCount_v2", &count, NULL, NULL, NULL);
	if (!count) {
		puts("No devices were found");
		return 6;
	}
	if (argc == 3 && !strcmp(argv[1], "-q") && !strcmp(argv[2], "-x")) {
		print_xml(count, driver, cuda);
	} else if (argc >= 2 && !strncmp(argv[1], "--query-gpu=", 12)) {
		print_query(argv[1] + 12, count, driver);
	} else if (argc == 3 && !strcmp(argv[1], "topo")) {
		print_topology(count);
	} else {
		for (i = 0; i < count; i++) {
			if (read_gpu(i, &gpu))
				continue;
			printf("GPU %u: %s (UUID: %s)\n", i, gpu.name, gpu.uuid);
			for (link = 0; argc == 3 && !strcmp(argv[1], "nvlink") && link < gpu.links; link++)
				printf("\t Link %d: %s GB/s\n", link, gpu.major == 8 ? "25.781" : "26.562");
		}
	}
	return 0;
}
