/* The calls of one timed copy as a C program makes them, for ascend_overhead.rs. */

#include <dlfcn.h>
#include <stdint.h>
#include <time.h>

#include "acl_min.h"

static __typeof__(&aclrtMallocHost) malloc_host;
static __typeof__(&aclrtMalloc) malloc_device;
static __typeof__(&aclrtCreateStreamWithConfig) create_stream;
static __typeof__(&aclrtCreateEventExWithFlag) create_event;
static __typeof__(&aclrtRecordEvent) record;
static __typeof__(&aclrtMemcpyAsync) copy;
static __typeof__(&aclrtSynchronizeStreamWithTimeout) synchronize;

static size_t length;
static void *host, *device;
static aclrtStream stream;
static aclrtEvent before, after;

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Makes memory, stream and events on the device of this thread: 0, a code, or -1 for no function. */
int overhead_open(const char *library, size_t bytes)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return -1;
#define FIND(pointer, name)                                                                       \
    do {                                                                                           \
        *(void **)&pointer = dlsym(handle, name);                                                  \
        if (!pointer)                                                                              \
            return -1;                                                                             \
    } while (0)
    FIND(malloc_host, "aclrtMallocHost");
    FIND(malloc_device, "aclrtMalloc");
    FIND(create_stream, "aclrtCreateStreamWithConfig");
    FIND(create_event, "aclrtCreateEventExWithFlag");
    FIND(record, "aclrtRecordEvent");
    FIND(copy, "aclrtMemcpyAsync");
    FIND(synchronize, "aclrtSynchronizeStreamWithTimeout");
#undef FIND
    length = bytes;
    int code = malloc_host(&host, bytes);
    if (!code)
        code = malloc_device(&device, bytes, ACL_MEM_MALLOC_HUGE_FIRST);
    if (!code)
        code = create_stream(&stream, 0, ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC);
    if (!code)
        code = create_event(&before, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE);
    if (!code)
        code = create_event(&after, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE);
    return code;
}

/* One round: nanoseconds until all is submitted, and of the wait, which begins pause_ns later.
 * 0 or a code. */
int overhead_round(int64_t pause_ns, int64_t *submit_ns, int64_t *wait_ns)
{
    int code;
    int64_t start = now();
    if ((code = record(before, stream)))
        return code;
    if ((code = copy(device, length, host, length, ACL_MEMCPY_HOST_TO_DEVICE, stream)))
        return code;
    if ((code = record(after, stream)))
        return code;
    int64_t submitted = now();
    int64_t resume;
    while ((resume = now()) < submitted + pause_ns)
        ;
    if ((code = synchronize(stream, 10000)))
        return code;
    *wait_ns = now() - resume;
    *submit_ns = submitted - start;
    return 0;
}
