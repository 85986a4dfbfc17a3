/* Enough of NVML to be probed: COUNT GPUs, LANES active NVLinks each that lead to a switch or to the next GPU. */
#include <stdio.h>
#include <string.h>

#ifndef COUNT
#define COUNT 2
#endif
#ifndef LANES
#define LANES 18
#endif
#ifndef REMOTE
#define REMOTE 2 /* a switch; 0: GPU 1 - this one, 255: unknown */
#endif
#ifndef PEER_ACCESS
#define PEER_ACCESS 0 /* status: 0 is OK */
#endif
#ifndef INIT
#define INIT 0
#endif
#ifndef LEVEL
#define LEVEL 30
#endif

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned char cluster[16]; unsigned status, clique; unsigned char state; } Fabric;

static int started;
static const char handles[COUNT + 1];
static unsigned index_of(const void* handle) { return (unsigned)((const char*)handle - handles); }
static void fill(Pci* pci, unsigned i) {
    memset(pci, 0, sizeof *pci);
    sprintf(pci->bus_id, "00000000:%02X:00.0", 0x1A + i);
}

const char* nvmlErrorString(int status) { return status == 3 ? "Not Supported" : "Unknown Error"; }
int nvmlInit_v2(void) { started++; return INIT; }
int nvmlShutdown(void) { return started-- > 0 ? 0 : 1; }
int nvmlSystemGetDriverVersion(char* text, unsigned length) { return snprintf(text, length, "580.1.2") < 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = COUNT; return !started; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, const void** handle) { *handle = handles + index; return index >= COUNT; }
int nvmlDeviceGetName(const void* handle, char* text, unsigned length) {
    return snprintf(text, length, "NVIDIA Fake %u", index_of(handle) / COUNT) < 0;
}
int nvmlDeviceGetUUID(const void* handle, char* text, unsigned length) {
    return snprintf(text, length, "GPU-0000-%u", index_of(handle)) < 0;
}
int nvmlDeviceGetCudaComputeCapability(const void* handle, int* major, int* minor) {
    *major = 10, *minor = 0;
    return index_of(handle) >= COUNT;
}
int nvmlDeviceGetPciInfo_v3(const void* handle, Pci* pci) { fill(pci, index_of(handle)); return 0; }
int nvmlDeviceGetP2PStatus(const void* a, const void* b, int kind, int* status) {
    if (index_of(a) >= COUNT || index_of(b) >= COUNT) return 2;
    *status = kind == 2 ? (LANES ? 0 : 5) : PEER_ACCESS;
    return 0;
}
int nvmlDeviceGetNvLinkState(const void* handle, unsigned link, unsigned* active) {
    if (link >= LANES + 1) return 2;
    *active = link < LANES; /* the last one is there, and down */
    return index_of(handle) >= COUNT;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(const void* handle, unsigned link, int* type) {
    (void)handle, (void)link;
    *type = REMOTE;
    return REMOTE == 255 ? 3 : 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(const void* handle, unsigned link, Pci* pci) {
    fill(pci, link % 2 ? 1 - index_of(handle) % 2 : 7); /* every other lane leads to something else */
    return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(const void* a, const void* b, int* level) {
    (void)a, (void)b;
    *level = LEVEL;
    return 0;
}
#ifdef FABRIC
int nvmlDeviceGetGpuFabricInfo(const void* handle, Fabric* info) {
    (void)handle;
    memset(info->cluster, 0xAB, 16), info->status = 0, info->clique = 5, info->state = FABRIC;
    return 0;
}
#endif
