// nv-fabricmanager of the lab: runs beside NVSwitches and a driver of exactly its own version, and refuses otherwise. As
// long as it holds the switches' device, the simulated CUDA and NVML call the fabric complete.
#include <signal.h>
#include <sys/types.h>
#include "lab.h"

static void end(int number) { _exit(number == SIGTERM ? 0 : 1); }

int main(int argc, char **argv)
{
	int file;

	if (argc > 1 && (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-v"))) {
		puts("Fabric Manager version is : " DRIVER_VERSION);
		return 0;
	}
	if (!lab_loaded()[0]) {
		fprintf(stderr, "request to query NVSwitch device information from NVSwitch driver failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]\n");
		return 1;
	}
	if (strcmp(lab_loaded(), DRIVER_VERSION)) {
		fprintf(stderr, "fabric manager NVIDIA GPU driver interface version %s don't match with driver version %s. Please update with matching NVIDIA driver package.\n", DRIVER_VERSION, lab_loaded());
		return 1;
	}
	lab_device_files();
	file = open("/dev/nvidia-nvswitchctl", O_RDWR);
	if (file < 0) {
		fprintf(stderr, "request to query NVSwitch device information from NVSwitch driver failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]\n");
		return 1;
	}
	signal(SIGTERM, end);
	fprintf(stderr, "Successfully configured all the available NVSwitches to route GPU NVLink traffic. NVLink Peer-to-Peer support will be enabled once the GPUs are successfully registered with the NVLink fabric.\n");
	for (;;)
		pause();
}
