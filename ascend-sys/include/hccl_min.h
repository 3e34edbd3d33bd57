/*
 * The part of the collective library (HCCL) that cluster-health uses.
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
#ifndef ASCEND_SYS_HCCL_MIN_H
#define ASCEND_SYS_HCCL_MIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef ASCEND_SYS_HAVE_aclrtStream
typedef void *aclrtStream;
#endif
#ifndef ASCEND_SYS_HAVE_HcclComm
typedef void *HcclComm;
#endif

/* Codes that came later are in the table of status.rs. */
#ifndef ASCEND_SYS_HAVE_HcclResult
typedef enum {
    HCCL_SUCCESS = 0,
    HCCL_E_PARA = 1,
    HCCL_E_PTR = 2,
    HCCL_E_MEMORY = 3,
    HCCL_E_INTERNAL = 4,
    HCCL_E_NOT_SUPPORT = 5,
    HCCL_E_NOT_FOUND = 6,
    HCCL_E_UNAVAIL = 7,
    HCCL_E_SYSCALL = 8,
    HCCL_E_TIMEOUT = 9,
    HCCL_E_OPEN_FILE_FAILURE = 10,
    HCCL_E_TCP_CONNECT = 11,
    HCCL_E_ROCE_CONNECT = 12,
    HCCL_E_TCP_TRANSFER = 13,
    HCCL_E_ROCE_TRANSFER = 14,
    HCCL_E_RUNTIME = 15,
    HCCL_E_DRV = 16,
    HCCL_E_PROFILING = 17,
    HCCL_E_CCE = 18,
    HCCL_E_NETWORK = 19,
    HCCL_E_AGAIN = 20,
    HCCL_E_REMOTE = 21
} HcclResult;
#endif

#ifndef ASCEND_SYS_HAVE_HcclReduceOp
typedef enum {
    HCCL_REDUCE_SUM = 0,
    HCCL_REDUCE_PROD = 1,
    HCCL_REDUCE_MAX = 2,
    HCCL_REDUCE_MIN = 3
} HcclReduceOp;
#endif

#ifndef ASCEND_SYS_HAVE_HcclDataType
typedef enum {
    HCCL_DATA_TYPE_INT8 = 0,
    HCCL_DATA_TYPE_INT16 = 1,
    HCCL_DATA_TYPE_INT32 = 2,
    HCCL_DATA_TYPE_FP16 = 3,
    HCCL_DATA_TYPE_FP32 = 4,
    HCCL_DATA_TYPE_INT64 = 5,
    HCCL_DATA_TYPE_UINT64 = 6,
    HCCL_DATA_TYPE_UINT8 = 7,
    HCCL_DATA_TYPE_UINT16 = 8,
    HCCL_DATA_TYPE_UINT32 = 9,
    HCCL_DATA_TYPE_FP64 = 10,
    HCCL_DATA_TYPE_BFP16 = 11
} HcclDataType;
#endif

#ifndef ASCEND_SYS_HAVE_HcclSendRecvType
typedef enum {
    HCCL_SEND = 0,
    HCCL_RECV = 1
} HcclSendRecvType;
#endif

#ifndef ASCEND_SYS_HAVE_HCCL_ROOT_INFO_BYTES
#define HCCL_ROOT_INFO_BYTES 4108
#endif
#ifndef ASCEND_SYS_HAVE_COMM_NAME_MAX_LENGTH
#define COMM_NAME_MAX_LENGTH 128
#endif
#ifndef ASCEND_SYS_HAVE_UDI_MAX_LENGTH
#define UDI_MAX_LENGTH 128
#endif
#ifndef ASCEND_SYS_HAVE_HCCL_COMM_CONFIG_INFO_BYTES
#define HCCL_COMM_CONFIG_INFO_BYTES 24
#endif
#ifndef ASCEND_SYS_HAVE_HCCL_COMM_CONFIG_MAGIC_WORD
#define HCCL_COMM_CONFIG_MAGIC_WORD 0xf0f0f0f0U
#endif

#ifndef ASCEND_SYS_HAVE_HcclRootInfo
typedef struct HcclRootInfoDef {
    char internal[4108];
} HcclRootInfo;
#endif

#ifndef ASCEND_SYS_HAVE_HcclSendRecvItem
typedef struct HcclSendRecvItemDef {
    HcclSendRecvType sendRecvType;
    void *buf;
    uint64_t count;
    HcclDataType dataType;
    uint32_t remoteRank;
} HcclSendRecvItem;
#endif

/* Grows with every release: opaque here, HcclCommConfigV5 in ../src/config.rs is its prefix. */
#ifndef ASCEND_SYS_HAVE_HcclCommConfig
typedef struct HcclCommConfigDef HcclCommConfig;
#endif

/* Communicators */
HcclResult HcclGetRootInfo(HcclRootInfo *rootInfo);
HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo *rootInfo, uint32_t rank,
    HcclComm *comm);
HcclResult HcclCommInitRootInfoConfig(uint32_t nRanks, const HcclRootInfo *rootInfo, uint32_t rank,
    const HcclCommConfig *config, HcclComm *comm);
HcclResult HcclCommInitAll(uint32_t ndev, int32_t *devices, HcclComm *comms);
HcclResult HcclCommDestroy(HcclComm comm);
HcclResult HcclGetRankSize(HcclComm comm, uint32_t *rankSize);
HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank);
HcclResult HcclGetCommName(HcclComm comm, char *commName);
HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult *asyncError);
const char *HcclGetErrorString(HcclResult code);
uint32_t HcclGetCommConfigCapability(void);

/* Operators: asynchronous on the given stream; counts in elements */
HcclResult HcclAllReduce(void *sendBuf, void *recvBuf, uint64_t count, HcclDataType dataType,
    HcclReduceOp op, HcclComm comm, aclrtStream stream);
HcclResult HcclAllGather(void *sendBuf, void *recvBuf, uint64_t sendCount, HcclDataType dataType,
    HcclComm comm, aclrtStream stream);
HcclResult HcclReduceScatter(void *sendBuf, void *recvBuf, uint64_t recvCount,
    HcclDataType dataType, HcclReduceOp op, HcclComm comm, aclrtStream stream);
HcclResult HcclBroadcast(void *buf, uint64_t count, HcclDataType dataType, uint32_t root,
    HcclComm comm, aclrtStream stream);
HcclResult HcclAlltoAll(const void *sendBuf, uint64_t sendCount, HcclDataType sendType,
    const void *recvBuf, uint64_t recvCount, HcclDataType recvType, HcclComm comm,
    aclrtStream stream);
HcclResult HcclAlltoAllV(const void *sendBuf, const void *sendCounts, const void *sdispls,
    HcclDataType sendType, const void *recvBuf, const void *recvCounts, const void *rdispls,
    HcclDataType recvType, HcclComm comm, aclrtStream stream);
HcclResult HcclSend(void *sendBuf, uint64_t count, HcclDataType dataType, uint32_t destRank,
    HcclComm comm, aclrtStream stream);
HcclResult HcclRecv(void *recvBuf, uint64_t count, HcclDataType dataType, uint32_t srcRank,
    HcclComm comm, aclrtStream stream);
HcclResult HcclBatchSendRecv(HcclSendRecvItem *sendRecvInfo, uint32_t itemNum, HcclComm comm,
    aclrtStream stream);
HcclResult HcclBarrier(HcclComm comm, aclrtStream stream);
#ifdef __cplusplus
}
#endif

#endif
