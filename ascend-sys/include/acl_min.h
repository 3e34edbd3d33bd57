/*
 * The part of the Ascend runtime (ACL) that cluster-health uses.
 *
 * Names, types, values and layouts are facts of the binary interface; this text is our own.
 * The generated bindings in ../src come from here, and tests/abi compares both with the headers
 * of the vendor.
 *
 * Everything but functions stands under ASCEND_SYS_HAVE_<name>: when build.rs (feature `bindgen`)
 * reads the vendor's headers first, it defines that for each name they already declare, and this
 * file adds only what that release lacks. Functions may be declared twice; a declaration that
 * differs is an error of the compiler.
 */
#ifndef ASCEND_SYS_ACL_MIN_H
#define ASCEND_SYS_ACL_MIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef ASCEND_SYS_HAVE_aclError
typedef int aclError;
#endif
#ifndef ASCEND_SYS_HAVE_aclrtStream
typedef void *aclrtStream;
#endif
#ifndef ASCEND_SYS_HAVE_aclrtEvent
typedef void *aclrtEvent;
#endif
#ifndef ASCEND_SYS_HAVE_aclrtContext
typedef void *aclrtContext;
#endif

#ifndef ASCEND_SYS_HAVE_aclrtRunMode
typedef enum aclrtRunMode {
    ACL_DEVICE = 0,
    ACL_HOST = 1
} aclrtRunMode;
#endif

#ifndef ASCEND_SYS_HAVE_aclrtDeviceStatus
typedef enum aclrtDeviceStatus {
    ACL_RT_DEVICE_STATUS_NORMAL = 0,
    ACL_RT_DEVICE_STATUS_ABNORMAL = 1
} aclrtDeviceStatus;
#endif

#ifndef ASCEND_SYS_HAVE_aclrtStreamStatus
typedef enum aclrtStreamStatus {
    ACL_STREAM_STATUS_COMPLETE = 0,
    ACL_STREAM_STATUS_NOT_READY = 1,
    ACL_STREAM_STATUS_RESERVED = 0xFFFF
} aclrtStreamStatus;
#endif

/* Zero means "not ready" here, the opposite of every other status. */
#ifndef ASCEND_SYS_HAVE_aclrtEventRecordedStatus
typedef enum aclrtEventRecordedStatus {
    ACL_EVENT_RECORDED_STATUS_NOT_READY = 0,
    ACL_EVENT_RECORDED_STATUS_COMPLETE = 1
} aclrtEventRecordedStatus;
#endif

#ifndef ASCEND_SYS_HAVE_aclrtMemcpyKind
typedef enum aclrtMemcpyKind {
    ACL_MEMCPY_HOST_TO_HOST = 0,
    ACL_MEMCPY_HOST_TO_DEVICE = 1,
    ACL_MEMCPY_DEVICE_TO_HOST = 2,
    ACL_MEMCPY_DEVICE_TO_DEVICE = 3
} aclrtMemcpyKind;
#endif
/* Younger than the oldest release that is supported. */
#ifndef ASCEND_SYS_HAVE_ACL_MEMCPY_DEFAULT
#define ACL_MEMCPY_DEFAULT 4
#endif

#ifndef ASCEND_SYS_HAVE_aclrtMemMallocPolicy
typedef enum aclrtMemMallocPolicy {
    ACL_MEM_MALLOC_HUGE_FIRST = 0,
    ACL_MEM_MALLOC_HUGE_ONLY = 1,
    ACL_MEM_MALLOC_NORMAL_ONLY = 2,
    ACL_MEM_MALLOC_HUGE_FIRST_P2P = 3,
    ACL_MEM_MALLOC_HUGE_ONLY_P2P = 4,
    ACL_MEM_MALLOC_NORMAL_ONLY_P2P = 5
} aclrtMemMallocPolicy;
#endif

#ifndef ASCEND_SYS_HAVE_aclrtMemAttr
typedef enum aclrtMemAttr {
    ACL_DDR_MEM = 0,
    ACL_HBM_MEM = 1,
    ACL_DDR_MEM_HUGE = 2,
    ACL_DDR_MEM_NORMAL = 3,
    ACL_HBM_MEM_HUGE = 4,
    ACL_HBM_MEM_NORMAL = 5
} aclrtMemAttr;
#endif

#ifndef ASCEND_SYS_HAVE_aclrtHostRegisterType
typedef enum aclrtHostRegisterType {
    ACL_HOST_REGISTER_MAPPED = 0
} aclrtHostRegisterType;
#endif

#ifndef ASCEND_SYS_HAVE_aclrtMemLocationType
typedef enum aclrtMemLocationType {
    ACL_MEM_LOCATION_TYPE_HOST = 0,
    ACL_MEM_LOCATION_TYPE_DEVICE = 1
} aclrtMemLocationType;
#endif
#ifndef ASCEND_SYS_HAVE_ACL_MEM_LOCATION_TYPE_UNREGISTERED
#define ACL_MEM_LOCATION_TYPE_UNREGISTERED 2
#endif

#ifndef ASCEND_SYS_HAVE_aclDeviceInfo
typedef enum aclDeviceInfo {
    ACL_DEVICE_INFO_UNDEFINED = -1,
    ACL_DEVICE_INFO_AI_CORE_NUM = 0,
    ACL_DEVICE_INFO_VECTOR_CORE_NUM = 1,
    ACL_DEVICE_INFO_L2_SIZE = 2
} aclDeviceInfo;
#endif

#ifndef ASCEND_SYS_HAVE_aclrtDevAttr
typedef enum aclrtDevAttr {
    ACL_DEV_ATTR_AICPU_CORE_NUM = 1,
    ACL_DEV_ATTR_AICORE_CORE_NUM = 101,
    ACL_DEV_ATTR_CUBE_CORE_NUM = 102,
    ACL_DEV_ATTR_VECTOR_CORE_NUM = 201,
    ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE = 301,
    ACL_DEV_ATTR_L2_CACHE_SIZE = 302,
    ACL_DEV_ATTR_SMP_ID = 401,
    ACL_DEV_ATTR_PHY_CHIP_ID = 402,
    ACL_DEV_ATTR_SUPER_POD_DEVICE_ID = 403,
    ACL_DEV_ATTR_SUPER_POD_SERVER_ID = 404,
    ACL_DEV_ATTR_SUPER_POD_ID = 405,
    ACL_DEV_ATTR_MAINBOARD_ID = 407,
    ACL_DEV_ATTR_HD_CONNECT_TYPE = 408,
    ACL_DEV_ATTR_IS_VIRTUAL = 501,
    ACL_DEV_ATTR_NPU_ARCH = 601
} aclrtDevAttr;
#endif

#ifndef ASCEND_SYS_HAVE_aclCANNPackageName
typedef enum aclCANNPackageName {
    ACL_PKG_NAME_CANN = 0,
    ACL_PKG_NAME_RUNTIME = 1,
    ACL_PKG_NAME_COMPILER = 2,
    ACL_PKG_NAME_HCCL = 3,
    ACL_PKG_NAME_TOOLKIT = 4,
    ACL_PKG_NAME_OPP = 5,
    ACL_PKG_NAME_OPP_KERNEL = 6,
    ACL_PKG_NAME_DRIVER = 7
} aclCANNPackageName;
#endif

/* Flags of streams, events and registered memory. */
#ifndef ASCEND_SYS_HAVE_ACL_STREAM_FAST_LAUNCH
#define ACL_STREAM_FAST_LAUNCH 0x1U
#endif
#ifndef ASCEND_SYS_HAVE_ACL_STREAM_FAST_SYNC
#define ACL_STREAM_FAST_SYNC 0x2U
#endif
#ifndef ASCEND_SYS_HAVE_ACL_EVENT_SYNC
#define ACL_EVENT_SYNC 0x1U
#endif
#ifndef ASCEND_SYS_HAVE_ACL_EVENT_CAPTURE_STREAM_PROGRESS
#define ACL_EVENT_CAPTURE_STREAM_PROGRESS 0x2U
#endif
#ifndef ASCEND_SYS_HAVE_ACL_EVENT_TIME_LINE
#define ACL_EVENT_TIME_LINE 0x8U
#endif
#ifndef ASCEND_SYS_HAVE_ACL_HOST_REG_MAPPED
#define ACL_HOST_REG_MAPPED 0x2UL
#endif
#ifndef ASCEND_SYS_HAVE_ACL_HOST_REG_PINNED
#define ACL_HOST_REG_PINNED 0x10000000UL
#endif

/* Bits of aclrtGetDevicesTopo. */
#ifndef ASCEND_SYS_HAVE_ACL_RT_DEVS_TOPOLOGY_HCCS
#define ACL_RT_DEVS_TOPOLOGY_HCCS 0x01U
#endif
#ifndef ASCEND_SYS_HAVE_ACL_RT_DEVS_TOPOLOGY_PIX
#define ACL_RT_DEVS_TOPOLOGY_PIX 0x02U
#endif
#ifndef ASCEND_SYS_HAVE_ACL_RT_DEVS_TOPOLOGY_PIB
#define ACL_RT_DEVS_TOPOLOGY_PIB 0x04U
#endif
#ifndef ASCEND_SYS_HAVE_ACL_RT_DEVS_TOPOLOGY_PHB
#define ACL_RT_DEVS_TOPOLOGY_PHB 0x08U
#endif
#ifndef ASCEND_SYS_HAVE_ACL_RT_DEVS_TOPOLOGY_SYS
#define ACL_RT_DEVS_TOPOLOGY_SYS 0x10U
#endif
#ifndef ASCEND_SYS_HAVE_ACL_RT_DEVS_TOPOLOGY_SIO
#define ACL_RT_DEVS_TOPOLOGY_SIO 0x20U
#endif
#ifndef ASCEND_SYS_HAVE_ACL_RT_DEVS_TOPOLOGY_HCCS_SW
#define ACL_RT_DEVS_TOPOLOGY_HCCS_SW 0x40U
#endif

#ifndef ASCEND_SYS_HAVE_aclCANNPackageVersion
typedef struct aclCANNPackageVersion {
    char version[128];
    char majorVersion[64];
    char minorVersion[64];
    char releaseVersion[64];
    char patchVersion[64];
    char reserved[128];
} aclCANNPackageVersion;
#endif

/* The extension pointer must be null on entry. */
#ifndef ASCEND_SYS_HAVE_aclrtUtilizationExtendInfo
typedef struct aclrtUtilizationExtendInfo aclrtUtilizationExtendInfo;
#endif
#ifndef ASCEND_SYS_HAVE_aclrtUtilizationInfo
typedef struct aclrtUtilizationInfo {
    int32_t cubeUtilization;
    int32_t vectorUtilization;
    int32_t aicpuUtilization;
    int32_t memoryUtilization;
    aclrtUtilizationExtendInfo *utilizationExtend;
} aclrtUtilizationInfo;
#endif

#ifndef ASCEND_SYS_HAVE_aclrtMemLocation
typedef struct aclrtMemLocation {
    uint32_t id;
    aclrtMemLocationType type;
} aclrtMemLocation;
#endif

#ifndef ASCEND_SYS_HAVE_aclrtPtrAttributes
typedef struct aclrtPtrAttributes {
    aclrtMemLocation location;
    uint32_t pageSize;
    uint32_t rsv[4];
} aclrtPtrAttributes;
#endif

#ifndef ASCEND_SYS_HAVE_aclrtUuid
typedef struct aclrtUuid {
    char bytes[16];
} aclrtUuid;
#endif

/* Start, end and messages */
aclError aclInit(const char *configPath);
aclError aclFinalize(void);
const char *aclGetRecentErrMsg(void);

/* Versions */
const char *aclrtGetSocName(void);
aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion);
aclError aclsysGetVersionStr(char *pkgName, char *versionStr);
aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version);

/* Devices */
aclError aclrtGetRunMode(aclrtRunMode *runMode);
aclError aclrtGetDeviceCount(uint32_t *count);
aclError aclrtSetDevice(int32_t deviceId);
aclError aclrtGetDevice(int32_t *deviceId);
aclError aclrtResetDevice(int32_t deviceId);
aclError aclrtSynchronizeDevice(void);
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout);
aclError aclrtQueryDeviceStatus(int32_t deviceId, aclrtDeviceStatus *deviceStatus);
aclError aclrtGetDeviceUtilizationRate(int32_t deviceId, aclrtUtilizationInfo *utilizationInfo);
aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t *value);
aclError aclGetDeviceCapability(uint32_t deviceId, aclDeviceInfo deviceInfo, int64_t *value);
aclError aclrtGetDevicesTopo(uint32_t deviceId, uint32_t otherDeviceId, uint64_t *value);
aclError aclrtDeviceGetUuid(int32_t deviceId, aclrtUuid *uuid);
aclError aclrtDeviceGetPCIBusId(int32_t deviceId, char *pciBusId, int32_t len);

/* Identifiers */
aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t *const logicDevId);
aclError aclrtGetPhyDevIdByUserDevId(const int32_t userDevId, int32_t *const phyDevId);
aclError aclrtGetUserDevIdByPhyDevId(const int32_t phyDevId, int32_t *const userDevId);

/* Contexts */
aclError aclrtCreateContext(aclrtContext *context, int32_t deviceId);
aclError aclrtDestroyContext(aclrtContext context);
aclError aclrtSetCurrentContext(aclrtContext context);
aclError aclrtGetCurrentContext(aclrtContext *context);

/* Streams */
aclError aclrtCreateStream(aclrtStream *stream);
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtDestroyStreamForce(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout);
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
aclError aclrtStreamAbort(aclrtStream stream);
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode);

/* Events */
aclError aclrtCreateEvent(aclrtEvent *event);
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status);
aclError aclrtSynchronizeEvent(aclrtEvent event);
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout);
aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent);
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *timestamp);

/* Device memory */
aclError aclrtMalloc(void* *devPtr, size_t size, aclrtMemMallocPolicy policy);
aclError aclrtFree(void *devPtr);
aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count);
aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count,
    aclrtStream stream);
aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total);

/* Host memory */
aclError aclrtMallocHost(void* *hostPtr, size_t size);
aclError aclrtFreeHost(void *hostPtr);
aclError aclrtHostRegister(void *ptr, uint64_t size, aclrtHostRegisterType type, void* *devPtr);
aclError aclrtHostRegisterV2(void *ptr, uint64_t size, uint32_t flag);
aclError aclrtHostUnregister(void *ptr);
aclError aclrtHostGetDevicePointer(void *pHost, void* *pDevice, uint32_t flag);
aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes);

/* Copies */
aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count,
    aclrtMemcpyKind kind);
aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count,
    aclrtMemcpyKind kind, aclrtStream stream);
aclError aclrtMemcpy2d(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
    size_t height, aclrtMemcpyKind kind);
aclError aclrtMemcpy2dAsync(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
    size_t height, aclrtMemcpyKind kind, aclrtStream stream);

/* Access between devices */
aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId);
aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags);
aclError aclrtDeviceDisablePeerAccess(int32_t peerDeviceId);
aclError aclrtDevicePeerAccessStatus(int32_t deviceId, int32_t peerDeviceId, int32_t *status);

#ifdef __cplusplus
}
#endif

#endif
