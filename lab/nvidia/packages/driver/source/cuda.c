// libcuda.so.1 of the lab. Its memory is the host's; its errors are those of the machine's state: no device (100) without
// module or device file, system not ready (802) behind NVSwitches without a fabric manager, mismatch (803) when the
// loaded module is of another version. Numbers are those of cuda.h.
#include "lab.h"

enum { SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_SUPPORTED = 801, NOT_READY = 802, MISMATCH = 803 };
#define MOST 32
#define MIB (1024ull * 1024)

typedef struct context { int device, file; } *Context;
static struct lab_gpu gpus[MOST];
static int count, started;
static __thread Context current;

int cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }

int cuInit(unsigned flags)
{
	int file;

	if (flags)
		return INVALID_VALUE;
	if (!lab_loaded()[0])
		return NO_DEVICE;
	if (strcmp(lab_loaded(), DRIVER_VERSION))
		return MISMATCH;
	lab_device_files();
	if (!lab_root()[0]) {
		if ((file = open("/dev/nvidiactl", O_RDWR)) < 0)
			return NO_DEVICE;
		close(file);
	}
	if (!(count = lab_gpus(gpus, MOST)))
		return NO_DEVICE;
	if (lab_number("switches") && !lab_driver_number("lab_fabric_sessions"))
		return NOT_READY;
	started = 1;
	return SUCCESS;
}

#define READY(device) do { if (!started) return NOT_INITIALIZED; if ((device) < 0 || (device) >= count) return INVALID_DEVICE; } while (0)

int cuDeviceGetCount(int *to) { READY(0); *to = count; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { READY(ordinal); *device = ordinal; return SUCCESS; }
int cuDeviceGetName(char *to, int length, int device) { READY(device); snprintf(to, length, "%s", lab_hardware("gpu_name")); return SUCCESS; }
int cuDeviceGetUuid(unsigned char *to, int device)
{
	static const unsigned char start[10] = {0x1a, 0xb0, 0, 0, 0, 0, 0x40, 0, 0x80, 0};

	READY(device);
	memset(to, 0, 16);
	memcpy(to, start, sizeof start);
	to[14] = gpus[device].minor >> 8;
	to[15] = gpus[device].minor;
	return SUCCESS;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { READY(device); *bytes = (lab_number("memory_mib") - lab_number("reserved_mib")) * MIB; return SUCCESS; }
int cuDeviceGetPCIBusId(char *to, int length, int device) { READY(device); snprintf(to, length, "%s", gpus[device].address); return SUCCESS; }
int cuDeviceGetAttribute(int *to, int attribute, int device)
{
	int major = 0, minor = 0;

	READY(device);
	sscanf(lab_hardware("compute_capability"), "%d.%d", &major, &minor);
	if (attribute != 75 && attribute != 76)
		return NOT_SUPPORTED;
	*to = attribute == 75 ? major : minor;
	return SUCCESS;
}
int cuDeviceCanAccessPeer(int *to, int device, int peer) { READY(device); READY(peer); *to = device != peer && lab_number("nvlinks") > 0; return SUCCESS; }

int cuCtxCreate_v2(Context *context, unsigned flags, int device)
{
	char path[32];

	(void)flags;
	READY(device);
	snprintf(path, sizeof path, "/dev/nvidia%d", gpus[device].minor);
	*context = current = malloc(sizeof **context);
	current->device = device;
	current->file = lab_root()[0] ? -1 : open(path, O_RDWR);
	return current->file < 0 && !lab_root()[0] ? NO_DEVICE : SUCCESS;
}
int cuCtxCreate(Context *context, unsigned flags, int device) { return cuCtxCreate_v2(context, flags, device); }
int cuDevicePrimaryCtxRetain(Context *context, int device) { return cuCtxCreate_v2(context, 0, device); }
int cuDevicePrimaryCtxRelease_v2(int device) { READY(device); return SUCCESS; }
int cuCtxSetCurrent(Context context) { current = context; return SUCCESS; }
int cuCtxGetDevice(int *device) { if (!current) return INVALID_CONTEXT; *device = current->device; return SUCCESS; }
int cuCtxSynchronize(void) { return current ? SUCCESS : INVALID_CONTEXT; }
int cuCtxEnablePeerAccess(Context peer, unsigned flags) { return peer && !flags ? SUCCESS : INVALID_CONTEXT; }
int cuCtxDestroy_v2(Context context)
{
	if (!context)
		return INVALID_CONTEXT;
	if (context->file >= 0)
		close(context->file);
	if (current == context)
		current = NULL;
	free(context);
	return SUCCESS;
}
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes)
{
	void *memory;

	if (!current)
		return INVALID_CONTEXT;
	if (!bytes)
		return INVALID_VALUE;
	if (!(memory = malloc(bytes)))
		return OUT_OF_MEMORY;
	*pointer = (unsigned long long)memory;
	return SUCCESS;
}
int cuMemFree_v2(unsigned long long pointer) { free((void *)pointer); return current ? SUCCESS : INVALID_CONTEXT; }
int cuMemGetInfo_v2(size_t *available, size_t *total) { cuDeviceTotalMem_v2(total, 0); *available = *total; return current ? SUCCESS : INVALID_CONTEXT; }
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes) { memcpy((void *)to, from, bytes); return current ? SUCCESS : INVALID_CONTEXT; }
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes) { memcpy(to, (void *)from, bytes); return current ? SUCCESS : INVALID_CONTEXT; }
int cuMemcpyDtoD_v2(unsigned long long to, unsigned long long from, size_t bytes) { memcpy((void *)to, (void *)from, bytes); return current ? SUCCESS : INVALID_CONTEXT; }
int cuMemcpyPeer(unsigned long long to, Context to_context, unsigned long long from, Context from_context, size_t bytes)
{
	return to_context && from_context ? cuMemcpyDtoD_v2(to, from, bytes) : INVALID_CONTEXT;
}
int cuMemsetD8_v2(unsigned long long to, unsigned char value, size_t bytes) { memset((void *)to, value, bytes); return current ? SUCCESS : INVALID_CONTEXT; }

int cuGetErrorName(int error, const char **name)
{
	switch (error) {
	case SUCCESS: *name = "CUDA_SUCCESS"; break;
	case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
	case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
	case NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
	case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
	case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
	case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
	case NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
	case NOT_READY: *name = "CUDA_ERROR_SYSTEM_NOT_READY"; break;
	case MISMATCH: *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; break;
	default: *name = "CUDA_ERROR_UNKNOWN"; return INVALID_VALUE;
	}
	return SUCCESS;
}
int cuGetErrorString(int error, const char **words)
{
	switch (error) {
	case NO_DEVICE: *words = "no CUDA-capable device is detected"; return SUCCESS;
	case NOT_READY: *words = "system not yet initialized"; return SUCCESS;
	case MISMATCH: *words = "system has unsupported display driver / cuda driver combination"; return SUCCESS;
	default: return cuGetErrorName(error, words);
	}
}
