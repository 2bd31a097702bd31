// nvidia-persistenced of the lab: keeps every GPU open, so that the driver stays initialised and in use.
#include <signal.h>
#include <sys/ioctl.h>
#include "lab.h"

static void end(int number) { _exit(number == SIGTERM ? 0 : 1); }

int main(int argc, char **argv)
{
	char path[32];
	int file, minor;

	if (argc > 1 && !strcmp(argv[1], "--version")) {
		puts("nvidia-persistenced:  version " DRIVER_VERSION);
		return 0;
	}
	lab_device_files();
	file = open("/dev/nvidiactl", O_RDWR);
	if (file < 0) {
		fprintf(stderr, "nvidia-persistenced failed to initialize. Check syslog for more details.\n");
		return 1;
	}
	for (minor = 0; snprintf(path, sizeof path, "/dev/nvidia%d", minor), !access(path, R_OK); minor++)
		if (open(path, O_RDWR) < 0)
			return 1;
	ioctl(file, 1);
	signal(SIGTERM, end);
	for (;;)
		pause();
}
