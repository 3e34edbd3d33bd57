/* A client that knows the real headers only: from the wheel of torch_npu, not ours.
 * Two processes: initialise, allocate, copy from pinned memory between two events, gather. */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

#include "acl/acl.h"
#include "hccl/hccl.h"

#define WORDS (1 << 18)

static_assert(sizeof(HcclRootInfo) == HCCL_ROOT_INFO_BYTES, "root info");

static void expect(long found, long wanted, const char *what)
{
    if (found != wanted) {
        const char *text = aclGetRecentErrMsg();
        fprintf(stderr, "%s: %ld, not %ld (%s)\n", what, found, wanted, text ? text : "");
        exit(1);
    }
}
#define OK(call) expect((call), 0, #call)

static void rank(unsigned me, int in, int out)
{
    OK(aclInit(nullptr));
    expect(aclInit(nullptr), ACL_ERROR_REPEAT_INITIALIZE, "a second aclInit");
    OK(aclrtSetDevice((int32_t)me));
    uint32_t count = 0;
    OK(aclrtGetDeviceCount(&count));
    expect(count, 2, "devices");

    aclrtStream stream;
    OK(aclrtCreateStreamWithConfig(&stream, 0, ACL_STREAM_FAST_SYNC));
    aclrtEvent start, end;
    OK(aclrtCreateEvent(&start));
    OK(aclrtCreateEventWithFlag(&end, ACL_EVENT_TIME_LINE | ACL_EVENT_SYNC));
    void *host, *back, *mine, *all;
    const size_t bytes = WORDS * sizeof(int);
    OK(aclrtMallocHost(&host, bytes));
    OK(aclrtMallocHost(&back, 2 * bytes));
    OK(aclrtMalloc(&mine, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMalloc(&all, 2 * bytes, ACL_MEM_MALLOC_HUGE_FIRST_P2P));
    size_t free_bytes, total_bytes;
    OK(aclrtGetMemInfo(ACL_HBM_MEM, &free_bytes, &total_bytes));
    expect(free_bytes < total_bytes, 1, "memory is in use");
    for (int i = 0; i < WORDS; i++) {
        ((int *)host)[i] = i * 3 + (int)me * 1000003;
    }

    OK(aclrtRecordEvent(start, stream));
    OK(aclrtMemcpyAsync(mine, bytes, host, bytes, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    OK(aclrtRecordEvent(end, stream));
    OK(aclrtSynchronizeStreamWithTimeout(stream, 10000));
    aclrtEventRecordedStatus recorded;
    OK(aclrtQueryEventStatus(end, &recorded));
    expect(recorded, ACL_EVENT_RECORDED_STATUS_COMPLETE, "recorded");
    float ms = 0;
    OK(aclrtEventElapsedTime(&ms, start, end));
    /* 1 MiB at 0.1 GB/s, by the environment. */
    expect(ms > 10.4 && ms < 1000, 1, "time of the copy");
    expect(aclrtEventElapsedTime(&ms, end, start), ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL, "reversal");
    expect(aclrtMemcpy(mine, bytes, host, bytes + 1, ACL_MEMCPY_HOST_TO_DEVICE),
           ACL_ERROR_RT_PARAM_INVALID, "destMax");

    HcclRootInfo root;
    if (me == 0) {
        OK(HcclGetRootInfo(&root));
        expect(write(out, &root, sizeof root), sizeof root, "write");
    } else {
        for (size_t got = 0; got < sizeof root;) {
            ssize_t n = read(in, (char *)&root + got, sizeof root - got);
            expect(n > 0, 1, "read");
            got += (size_t)n;
        }
    }
    HcclComm comm;
    OK(HcclCommInitRootInfo(2, &root, me, &comm));
    OK(HcclAllGather(mine, all, WORDS, HCCL_DATA_TYPE_INT32, comm, stream));
    OK(aclrtMemcpyAsync(back, 2 * bytes, all, 2 * bytes, ACL_MEMCPY_DEVICE_TO_HOST, stream));
    OK(aclrtSynchronizeStream(stream));
    for (int i = 0; i < 2 * WORDS; i++) {
        expect(((int *)back)[i], (i % WORDS) * 3 + i / WORDS * 1000003, "gathered data");
    }
    OK(HcclAllReduce(mine, all, WORDS, HCCL_DATA_TYPE_INT32, HCCL_REDUCE_MAX, comm, stream));
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtMemcpy(back, bytes, all, bytes, ACL_MEMCPY_DEVICE_TO_HOST));
    expect(((int *)back)[WORDS - 1], (WORDS - 1) * 3 + 1000003, "largest");
    HcclResult async;
    OK(HcclGetCommAsyncError(comm, &async));
    expect(async, HCCL_SUCCESS, "asynchronous error");

    OK(HcclCommDestroy(comm));
    OK(aclrtFree(all));
    expect(aclrtFree(all), ACL_ERROR_RT_PARAM_INVALID, "double free");
    OK(aclrtFree(mine));
    OK(aclrtFreeHost(back));
    OK(aclrtFreeHost(host));
    OK(aclrtDestroyEvent(end));
    OK(aclrtDestroyEvent(start));
    OK(aclrtDestroyStream(stream));
    OK(aclrtResetDevice((int32_t)me));
    expect(aclrtMalloc(&mine, 64, ACL_MEM_MALLOC_NORMAL_ONLY), ACL_ERROR_RT_CONTEXT_NULL, "no context");
    OK(aclFinalize());
    expect(aclFinalize(), ACL_ERROR_REPEAT_FINALIZE, "a second aclFinalize");
    printf("rank %u: copy %.3f ms, gathered\n", me, ms);
    fflush(stdout);
}

int main()
{
    int pipes[2];
    expect(pipe(pipes), 0, "pipe");
    pid_t child = fork();
    rank(child == 0 ? 1 : 0, pipes[0], pipes[1]);
    if (child == 0) {
        return 0;
    }
    int status = 1;
    expect(waitpid(child, &status, 0), child, "waitpid");
    return status == 0 ? 0 : 1;
}
