/*
 * Matrix product through aclnn (libopapi, libnnopbase).
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
#ifndef ASCEND_SYS_ACLNN_MIN_H
#define ASCEND_SYS_ACLNN_MIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef ASCEND_SYS_HAVE_aclrtStream
typedef void *aclrtStream;
#endif
#ifndef ASCEND_SYS_HAVE_aclnnStatus
typedef int32_t aclnnStatus;
#endif
#ifndef ASCEND_SYS_HAVE_aclTensor
typedef struct aclTensor aclTensor;
#endif
#ifndef ASCEND_SYS_HAVE_aclOpExecutor
typedef struct aclOpExecutor aclOpExecutor;
#endif

#ifndef ASCEND_SYS_HAVE_aclDataType
typedef enum {
    ACL_DT_UNDEFINED = -1,
    ACL_FLOAT = 0,
    ACL_FLOAT16 = 1,
    ACL_INT8 = 2,
    ACL_INT32 = 3,
    ACL_UINT8 = 4,
    ACL_INT16 = 6,
    ACL_UINT16 = 7,
    ACL_UINT32 = 8,
    ACL_INT64 = 9,
    ACL_UINT64 = 10,
    ACL_DOUBLE = 11,
    ACL_BOOL = 12,
    ACL_BF16 = 27
} aclDataType;
#endif

#ifndef ASCEND_SYS_HAVE_aclFormat
typedef enum {
    ACL_FORMAT_UNDEFINED = -1,
    ACL_FORMAT_NCHW = 0,
    ACL_FORMAT_NHWC = 1,
    ACL_FORMAT_ND = 2,
    ACL_FORMAT_FRACTAL_NZ = 29
} aclFormat;
#endif

aclTensor *aclCreateTensor(const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType,
    const int64_t *stride, int64_t offset, aclFormat format, const int64_t *storageDims,
    uint64_t storageDimsNum, void *tensorData);
aclnnStatus aclDestroyTensor(const aclTensor *tensor);
aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor);
aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor);

/* First phase: the size of the scratch memory and the executor that the second phase consumes. */
aclnnStatus aclnnMatmulGetWorkspaceSize(const aclTensor *self, const aclTensor *mat2,
    aclTensor *out, int8_t cubeMathType, uint64_t *workspaceSize, aclOpExecutor **executor);
aclnnStatus aclnnMatmul(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
