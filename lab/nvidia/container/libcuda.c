// A stand-in for libcuda.so.1 in containers of the lab. Its GPUs are the nodes /dev/nvidia0, /dev/nvidia1, ... that it
// can open: so it sees what the CDI specification gave to the container, and nothing else. Memory is ordinary memory.
//   LAB_CUINIT=802           cuInit returns this error
//   LAB_BROKEN_MEMORY=1      what is read back differs from what was written
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_GPUS 16
static int gpus[MOST_GPUS], count;

static const struct { int code; const char *name; } errors[] = {
	{1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {100, "CUDA_ERROR_NO_DEVICE"},
	{101, "CUDA_ERROR_INVALID_DEVICE"}, {802, "CUDA_ERROR_SYSTEM_NOT_READY"},
	{803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}, {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"},
	{999, "CUDA_ERROR_UNKNOWN"},
};

int cuGetErrorName(int code, const char **name)
{
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].code == code)
			return *name = errors[i].name, 0;
	return 1;
}

int cuInit(unsigned flags)
{
	const char *wanted = getenv("LAB_CUINIT");
	char path[32];

	(void)flags;
	if (wanted)
		return atoi(wanted);
	count = 0;
	for (int i = 0; i < MOST_GPUS; i++) {
		snprintf(path, sizeof path, "/dev/nvidia%d", i);
		int file = open(path, O_RDWR);
		if (file < 0)
			continue;
		close(file);
		gpus[count++] = i;
	}
	return count ? 0 : 100;
}

int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuDeviceGetCount(int *number) { return *number = count, 0; }
int cuDeviceGet(int *device, int index) { return index < count ? (*device = index, 0) : 101; }
int cuDeviceGetName(char *name, int size, int device)
{
	return snprintf(name, size, "NVIDIA lab GPU %d", gpus[device]), 0;
}
int cuDeviceGetUuid(unsigned char *uuid, int device)
{
	return memset(uuid, 0, 16), uuid[15] = gpus[device], 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return (void)device, *bytes = 84987740160, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &gpus[device], 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, 0; }
int cuCtxSetCurrent(void *context) { return (void)context, 0; }
int cuMemAlloc_v2(uint64_t *memory, size_t bytes) { return (*memory = (uintptr_t)malloc(bytes)) ? 0 : 2; }
int cuMemFree_v2(uint64_t memory) { return free((void *)(uintptr_t)memory), 0; }
int cuMemsetD8_v2(uint64_t memory, unsigned char value, size_t bytes)
{
	return memset((void *)(uintptr_t)memory, value, bytes), 0;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
	memcpy(to, (void *)(uintptr_t)from, bytes);
	if (getenv("LAB_BROKEN_MEMORY"))
		((char *)to)[bytes / 2] ^= 1;
	return 0;
}
