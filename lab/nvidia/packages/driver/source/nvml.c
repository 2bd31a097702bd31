// libnvidia-ml.so.1 of the lab: answers for the hardware that the machine shows, with the states of the real library:
// 9 while no module is loaded, 18 while the loaded one is of another version. Names, numbers and structures are those of
// nvml.h as nvidia-ml-py 13.615.71 gives them.
#include <stdint.h>
#include "lab.h"

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, MISMATCH = 18 };
#define MOST 32
#define MIB (1024ull * 1024)

typedef struct lab_gpu *Device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { uint32_t field, scope; int64_t timestamp, latency; unsigned type; int result; union { double d; unsigned u; unsigned long long ull; } value; } Field;
typedef struct { unsigned version; uint8_t cluster[16]; int status; uint32_t clique; unsigned state; uint32_t health_mask; uint8_t health; } Fabric;
typedef struct { unsigned version; unsigned long long counters[11]; unsigned exceeded; } Sram;

static struct lab_gpu gpus[MOST];
static int count, sessions;

int nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	if (!lab_loaded()[0])
		return DRIVER_NOT_LOADED;
	if (strcmp(lab_loaded(), DRIVER_VERSION))
		return MISMATCH;
	lab_device_files();
	count = lab_gpus(gpus, MOST);
	sessions++;
	return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return sessions ? sessions--, SUCCESS : UNINITIALIZED; }

const char *nvmlErrorString(int result)
{
	switch (result) {
	case SUCCESS: return "Success";
	case UNINITIALIZED: return "Uninitialized";
	case INVALID_ARGUMENT: return "Invalid Argument";
	case NOT_SUPPORTED: return "Not Supported";
	case NOT_FOUND: return "Not Found";
	case INSUFFICIENT_SIZE: return "Insufficient Size";
	case DRIVER_NOT_LOADED: return "Driver Not Loaded";
	case GPU_IS_LOST: return "GPU is lost";
	case MISMATCH: return "Driver/library version mismatch";
	default: return "Unknown Error";
	}
}

static int text(char *to, unsigned length, const char *from)
{
	if (strlen(from) >= length)
		return INSUFFICIENT_SIZE;
	strcpy(to, from);
	return SUCCESS;
}
static int number(unsigned *to, unsigned value) { *to = value; return SUCCESS; }
static int lost(Device device) { return device->minor == lab_number("lost_gpu") && lab_hardware("lost_gpu")[0]; }
static int ecc(void) { return strncmp(lab_hardware("gpu_name"), "NVIDIA GeForce", 14) != 0; }
#define LIVE(device) do { if (!sessions) return UNINITIALIZED; if (!(device)) return INVALID_ARGUMENT; if (lost(device)) return GPU_IS_LOST; } while (0)

int nvmlSystemGetDriverVersion(char *to, unsigned length) { return sessions ? text(to, length, DRIVER_VERSION) : UNINITIALIZED; }
int nvmlSystemGetNVMLVersion(char *to, unsigned length)
{
	char version[64];

	snprintf(version, sizeof version, "%d.%s", CUDA_VERSION / 1000, DRIVER_VERSION);
	return sessions ? text(to, length, version) : UNINITIALIZED;
}
int nvmlSystemGetCudaDriverVersion(int *to) { *to = CUDA_VERSION; return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { return nvmlSystemGetCudaDriverVersion(to); }

int nvmlDeviceGetCount_v2(unsigned *to) { return sessions ? number(to, count) : UNINITIALIZED; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device)
{
	if (!sessions || index >= (unsigned)count)
		return sessions ? INVALID_ARGUMENT : UNINITIALIZED;
	*device = &gpus[index];
	return lost(*device) ? GPU_IS_LOST : SUCCESS;
}
int nvmlDeviceGetIndex(Device device, unsigned *to) { LIVE(device); return number(to, device - gpus); }
int nvmlDeviceGetMinorNumber(Device device, unsigned *to) { LIVE(device); return number(to, device->minor); }
int nvmlDeviceGetName(Device device, char *to, unsigned length) { LIVE(device); return text(to, length, lab_hardware("gpu_name")); }
int nvmlDeviceGetUUID(Device device, char *to, unsigned length)
{
	char uuid[64];

	LIVE(device);
	snprintf(uuid, sizeof uuid, "GPU-1ab00000-0000-4000-8000-%012x", device->minor);
	return text(to, length, uuid);
}
int nvmlDeviceGetSerial(Device device, char *to, unsigned length)
{
	char serial[16];

	LIVE(device);
	snprintf(serial, sizeof serial, "165000%07d", device->minor);
	return text(to, length, serial);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device)
{
	char own[64];
	int i;

	for (i = 0; i < count; i++)
		if (!nvmlDeviceGetUUID(&gpus[i], own, sizeof own) && !strcmp(own, uuid))
			return *device = &gpus[i], SUCCESS;
	return NOT_FOUND;
}
int nvmlDeviceGetPciInfo_v3(Device device, Pci *pci)
{
	unsigned function;

	LIVE(device);
	memset(pci, 0, sizeof *pci);
	sscanf(device->address, "%x:%x:%x.%x", &pci->domain, &pci->bus, &pci->device, &function);
	pci->id = (unsigned)lab_number("gpu_device") << 16 | 0x10de;
	pci->subsystem = (unsigned)lab_number("gpu_subsystem") << 16 | 0x10de;
	snprintf(pci->legacy, sizeof pci->legacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff, pci->device & 0xff);
	snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
	return SUCCESS;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, Device *device)
{
	unsigned domain, bus, slot;
	Pci pci;
	int i;

	for (i = 0; i < count; i++)
		if (!nvmlDeviceGetPciInfo_v3(&gpus[i], &pci) && sscanf(address, "%x:%x:%x", &domain, &bus, &slot) == 3 && domain == pci.domain && bus == pci.bus && slot == pci.device)
			return *device = &gpus[i], SUCCESS;
	return NOT_FOUND;
}
int nvmlDeviceGetMemoryInfo_v2(Device device, Memory2 *memory)
{
	LIVE(device);
	if (memory->version != (sizeof *memory | 2 << 24))
		return 25; // argument version mismatch
	memory->total = lab_number("memory_mib") * MIB;
	memory->reserved = lab_number("reserved_mib") * MIB;
	memory->used = 0;
	memory->free = memory->total - memory->reserved;
	return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(Device device, Memory *memory)
{
	LIVE(device);
	memory->total = lab_number("memory_mib") * MIB;
	memory->used = lab_number("reserved_mib") * MIB;
	memory->free = memory->total - memory->used;
	return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor)
{
	LIVE(device);
	return sscanf(lab_hardware("compute_capability"), "%d.%d", major, minor) == 2 ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetArchitecture(Device device, unsigned *to) { LIVE(device); return number(to, lab_number("architecture")); }
int nvmlDeviceGetBrand(Device device, unsigned *to) { LIVE(device); return number(to, ecc() ? 14 : 5); }
int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending)
{
	LIVE(device);
	if (lab_number("architecture") == 8)
		return NOT_SUPPORTED;
	*current = *pending = 0;
	return SUCCESS;
}
int nvmlDeviceGetEccMode(Device device, unsigned *current, unsigned *pending)
{
	LIVE(device);
	if (!ecc())
		return NOT_SUPPORTED;
	*current = *pending = lab_number("ecc");
	return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(Device device, int type, int counter, unsigned long long *to) { (void)type; (void)counter; LIVE(device); *to = 0; return ecc() ? SUCCESS : NOT_SUPPORTED; }
int nvmlDeviceGetMemoryErrorCounter(Device device, int type, int counter, int place, unsigned long long *to) { (void)place; return nvmlDeviceGetTotalEccErrors(device, type, counter, to); }
int nvmlDeviceGetSramEccErrorStatus(Device device, Sram *status)
{
	LIVE(device);
	memset(status->counters, 0, sizeof status->counters);
	status->exceeded = 0;
	return ecc() ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetRemappedRows(Device device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failure)
{
	LIVE(device);
	*correctable = *uncorrectable = *pending = 0;
	*failure = lab_number("remap_failure");
	return ecc() ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetPersistenceMode(Device device, unsigned *to) { LIVE(device); return number(to, lab_driver_number("lab_persistence") > 0); }
int nvmlDeviceGetComputeMode(Device device, unsigned *to) { LIVE(device); return number(to, 0); }
int nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *to) { LIVE(device); *to = 1; return SUCCESS; }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *to) { return nvmlDeviceGetCurrentClocksEventReasons(device, to); }
int nvmlDeviceGetCurrPcieLinkWidth(Device device, unsigned *to) { LIVE(device); return number(to, 16); }
int nvmlDeviceGetMaxPcieLinkWidth(Device device, unsigned *to) { LIVE(device); return number(to, 16); }
int nvmlDeviceGetCurrPcieLinkGeneration(Device device, unsigned *to) { LIVE(device); return number(to, 1); }
int nvmlDeviceGetMaxPcieLinkGeneration(Device device, unsigned *to) { LIVE(device); return number(to, lab_number("pcie_generation")); }
int nvmlDeviceGetNumaNodeId(Device device, unsigned *to) { (void)to; LIVE(device); return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *found, void *processes) { (void)processes; LIVE(device); return number(found, 0); }

static int link_of(Device device, unsigned link)
{
	LIVE(device);
	if (!lab_number("nvlinks"))
		return NOT_SUPPORTED;
	return link < (unsigned)lab_number("nvlinks") ? SUCCESS : INVALID_ARGUMENT;
}
int nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *to) { int error = link_of(device, link); *to = !error; return error; }
int nvmlDeviceGetNvLinkVersion(Device device, unsigned link, unsigned *to) { int error = link_of(device, link); *to = lab_number("nvlink_version"); return error; }
int nvmlDeviceGetNvLinkRemoteDeviceType(Device device, unsigned link, unsigned *to) { int error = link_of(device, link); *to = 2; return error; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned link, Pci *pci) { int error = link_of(device, link); memset(pci, 0, sizeof *pci); return error; }
int nvmlDeviceGetTopologyCommonAncestor(Device one, Device other, int *to)
{
	LIVE(one);
	LIVE(other);
	*to = one == other ? 0 : 40;
	return SUCCESS;
}
int nvmlDeviceGetP2PStatus(Device one, Device other, int index, int *to)
{
	LIVE(one);
	LIVE(other);
	*to = index == 2 && !lab_number("nvlinks") ? 3 : 0;
	return SUCCESS;
}

int nvmlDeviceGetGpuFabricInfoV(Device device, Fabric *fabric)
{
	int state = 0;

	LIVE(device);
	if (lab_number("fabric_state_reported"))
		state = lab_driver_number("lab_fabric_sessions") > 0 ? 3 : 1;
	fabric->status = SUCCESS;
	fabric->state = state;
	fabric->health_mask = 0;
	fabric->health = state == 3 ? 1 : 0;
	return SUCCESS;
}
int nvmlDeviceGetFieldValues(Device device, int fields, Field *values)
{
	int i;

	LIVE(device);
	for (i = 0; i < fields; i++) {
		values[i].result = NOT_SUPPORTED;
		if (values[i].field == 230) { // NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
			values[i].result = SUCCESS;
			values[i].type = 1;
			values[i].value.u = lab_number("recovery_action");
		}
		if (values[i].field == 147 && lab_number("switches")) { // NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT
			values[i].result = SUCCESS;
			values[i].type = 1;
			values[i].value.u = lab_number("nvlinks");
		}
	}
	return SUCCESS;
}
