/*
 * cluster-health: measured matrices of CPU core x accelerator bandwidth, for C and C++.
 *
 *     machine -> plan (from JSON) -> sweep -> result -> matrices
 *
 * Errors. A call that can fail returns clh_status: CLH_STATUS_OK (0) or why not, and then
 * clh_last_error() has a message for the thread that called. No call prints, exits, throws or
 * installs a signal handler. A mistake in the library is CLH_STATUS_PANIC (with a line on stderr);
 * where the library was built with panic=abort it ends the process.
 *
 * Ownership. What a call writes to a T ** is the caller's, to be freed by the function of its type;
 * when the call fails NULL is written, so that freeing is always right. Freeing takes NULL. Handles
 * keep what they need: they may be freed in any order, but not while a call uses them, and each
 * once. What a call returns as const char * or as a pointer inside a struct belongs to the handle
 * that it came from and ends with it. What a call gets as an argument it does not keep.
 *
 * Texts. A text is bytes that end with NUL, in UTF-8; paths may be any bytes.
 *
 * Threads. Handles may move between threads; machines, plans, results and tokens may be used by
 * several at once. A sweep runs on the thread that calls and binds only that: call it from one that
 * has nothing else to do meanwhile. One sweep at a time per machine, or they measure each other.
 * Messages of errors are per thread.
 *
 * Not after fork() in the child, and not from a signal handler, except clh_cancel_now().
 */

#ifndef CLUSTER_HEALTH_H
#define CLUSTER_HEALTH_H

/* Made by cbindgen from cluster-health-matrix/capi; a test fails when it is not up to date. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Counts up when a program has to be compiled anew; the number in the library's SONAME.
 */
#define CLH_ABI_VERSION 0

/**
 * How a call ended. Everything but `CLH_STATUS_OK` has a message, see `clh_last_error`.
 */
enum clh_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Done.
     */
    CLH_STATUS_OK = 0,
    /**
     * Stopped before its end, by a token, a callback or the other rank. Results hold what was
     * measured until then.
     */
    CLH_STATUS_CANCELLED = 1,
    /**
     * The call itself is wrong: NULL where something must be, text that is no UTF-8, an index
     * beyond the end.
     */
    CLH_STATUS_BAD_CALL = 2,
    /**
     * A value cannot be used; the message begins with the field or option at fault.
     */
    CLH_STATUS_INVALID = 3,
    /**
     * A backend, device or file is not on this machine.
     */
    CLH_STATUS_UNAVAILABLE = 4,
    /**
     * A call into an accelerator's libraries failed; the message has call, code and device.
     */
    CLH_STATUS_BACKEND = 5,
    /**
     * A call into the operating system failed.
     */
    CLH_STATUS_SYSTEM = 6,
    /**
     * A file or folder could not be used.
     */
    CLH_STATUS_IO = 7,
    /**
     * A file holds something that cannot be read.
     */
    CLH_STATUS_FORMAT = 8,
    /**
     * A folder, group or device is in use by somebody else.
     */
    CLH_STATUS_BUSY = 9,
    /**
     * A rank or device did not answer in time.
     */
    CLH_STATUS_TIMEOUT = 10,
    /**
     * Another rank is gone or was asked for something else.
     */
    CLH_STATUS_RANK = 11,
    /**
     * An output could not be made, or there was nothing to make it from.
     */
    CLH_STATUS_OUTPUT = 12,
    /**
     * A mistake in this library. Nothing that the call was given must be used again, but to free
     * it.
     */
    CLH_STATUS_PANIC = 13,
    /**
     * None of these; the message says what.
     */
    CLH_STATUS_OTHER = 14,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum clh_status clh_status;
#else
typedef int32_t clh_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * How the visits of a cell came out.
 */
enum clh_cell
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint8_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * No visit (yet).
     */
    CLH_CELL_NOT_VISITED = 0,
    /**
     * At least one block measured it: its rate is a number, in all other cases NaN.
     */
    CLH_CELL_MEASURED = 1,
    /**
     * Every visit was skipped.
     */
    CLH_CELL_SKIPPED = 2,
    /**
     * Visits failed and none was measured.
     */
    CLH_CELL_FAILED = 3,
    /**
     * Only implausible rates were seen.
     */
    CLH_CELL_IMPLAUSIBLE = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum clh_cell clh_cell;
#else
typedef uint8_t clh_cell;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What to do with what is in a result folder.
 */
enum clh_mode
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * The folder must be absent or empty.
     */
    CLH_MODE_NEW = 0,
    /**
     * Results of an earlier run in it are replaced.
     */
    CLH_MODE_FORCE = 1,
    /**
     * An interrupted run of the same plan goes on; a complete one is left as it is; absent or empty
     * = start.
     */
    CLH_MODE_RESUME = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum clh_mode clh_mode;
#else
typedef int32_t clh_mode;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Stops sweeps.
 */
typedef struct clh_cancel clh_cancel;

/**
 * One rank's membership in a group of two, for `core_pair` on a real machine. One call at a time
 * uses it; a second one is `CLH_STATUS_BUSY`.
 */
typedef struct clh_group clh_group;

/**
 * CPUs, devices and a clock: this machine's, or those of a scenario. May be used by several
 * threads.
 */
typedef struct clh_machine clh_machine;

/**
 * A sweep, checked against the machine that it is for. May be used by several threads.
 */
typedef struct clh_plan clh_plan;

/**
 * The matrices of a sweep or a result folder. Nothing changes it; may be used by several threads.
 */
typedef struct clh_result clh_result;

/**
 * A view of one matrix, sizes x rows x columns. Arrays of cells have no gaps and are row-major:
 * cell (size, row, column) is at (size * `row_count` + row) * `column_count` + column. All pointers
 * live as long as the result and must not be freed.
 */
typedef struct {
    /**
     * "h2d", "d2h", "bidirectional" or "core_pair".
     */
    const char *sweep;
    /**
     * Name of the load profile, such as "idle".
     */
    const char *load;
    /**
     * Memory of the copies: "page_locked", "pageable", "device" (pairs) or "unknown".
     */
    const char *memory;
    /**
     * Number of sizes.
     */
    size_t size_count;
    /**
     * Number of CPUs; of rank 0 for pairs.
     */
    size_t row_count;
    /**
     * Number of devices; of CPUs of rank 1 for pairs.
     */
    size_t column_count;
    /**
     * `size_count` sizes in bytes, ascending: per copy, per rank for pairs.
     */
    const uint64_t *bytes;
    /**
     * `row_count` CPU ids, in the order of the plan.
     */
    const uint32_t *row_ids;
    /**
     * `column_count` ids of devices or CPUs, in the order of the plan.
     */
    const uint32_t *column_ids;
    /**
     * Decimal GB/s (10^9 bytes per second), per rank for pairs; NaN = not measured.
     */
    const double *gbps;
    /**
     * Spread between blocks as a share of the rate; NaN with fewer than two blocks.
     */
    const double *spread;
    /**
     * How each cell came out.
     */
    const clh_cell *status;
    /**
     * Decimal GB/s of the cells that a sampled sweep left out, from its model, NaN where a cell was
     * measured or nothing can be said. NULL when the sweep was not sampled.
     */
    const float *predicted_gbps;
    /**
     * Half-width of the 95 % interval of those, as a share of the rate. NULL as `predicted_gbps`.
     */
    const float *predicted_error;
} clh_matrix;

/**
 * How far a sweep is.
 */
typedef struct {
    /**
     * Points done.
     */
    uint64_t done;
    /**
     * Points known to be needed; some may be added.
     */
    uint64_t total;
    /**
     * Bytes moved by this call.
     */
    uint64_t bytes;
    /**
     * Nanoseconds of the machine's clock since the first bind of this call.
     */
    uint64_t elapsed_ns;
} clh_progress;

/**
 * What goes with a sweep. Set everything that is not used to 0: `clh_options options = {0};`
 */
typedef struct {
    /**
     * May be NULL. Called between visits to CPUs, on the thread that measures and outside of what is
     * timed, with `user` below and how far the sweep is. Anything but 0 stops the sweep as a token
     * does. It must return: neither an exception nor longjmp may leave it.
     */
    int (*progress)(void *user, const clh_progress *progress);
    /**
     * Given to `progress`.
     */
    void *user;
    /**
     * Stops the sweep; may be NULL.
     */
    const clh_cancel *cancel;
    /**
     * This rank of a pair. NULL for "h2d" and on a synthetic machine, which has both ranks of a pair
     * in one process.
     */
    const clh_group *group;
} clh_options;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Version of the library, such as "0.1.0"; lives as long as the process.
 */
const char *clh_version(void);

/**
 * Message of the last call of this thread that did not return `CLH_STATUS_OK`, one line; empty before
 * the first. Valid until the next such call of this thread; do not free it.
 */
const char *clh_last_error(void);

/**
 * Opens a machine by the name that the command line has for it: "host" (this machine's CPUs and
 * memory, one device per NUMA node with memory), "ascend" (its NPUs), "auto" (NPUs, else host), or
 * "synthetic:FILE" (a scenario in TOML, in virtual time).
 *
 * `name` is NULL or points to a text.
 */
clh_status clh_machine_open(const char *name, clh_machine **machine);

/**
 * Makes a machine of a scenario's text, see docs/synthetic-machines.md.
 *
 * `scenario` is NULL or points to a text.
 */
clh_status clh_machine_synthetic(const char *scenario, clh_machine **machine);

/**
 * Frees a machine; NULL is fine. Plans that were made for it stay usable.
 */
void clh_machine_free(clh_machine *machine);

/**
 * "host", "ascend" or "synthetic"; lives as long as the machine. NULL for NULL.
 */
const char *clh_machine_backend(const clh_machine *machine);

/**
 * Number of online CPUs; the census tells which of them can be bound. 0 for NULL.
 */
size_t clh_machine_cpu_count(const clh_machine *machine);

/**
 * Number of devices, unavailable ones included. 0 for NULL.
 */
size_t clh_machine_device_count(const clh_machine *machine);

/**
 * Which CPUs can really be bound, and why not where they cannot: the JSON object that
 * `cluster-health affinity --json` prints, to be freed with `clh_string_free`. The first call for
 * a machine tries every CPU from a thread of its own.
 */
clh_status clh_machine_census(const clh_machine *machine, char **json);

/**
 * Makes a plan of a JSON object such as
 * {"sweep": "h2d", "cpus": "0-7", "devices": "0,1", "sizes": ["16MiB"], "repeats": 3, "seed": 1}
 * and checks it against the machine. Only "sweep" is required, "h2d" or "core_pair"; all fields,
 * their values and defaults are in the documentation of Rust's `plan::PlanRequest`. A field that
 * does not exist or does not fit the sweep is an error that names it.
 *
 * `json` is NULL or points to a text.
 */
clh_status clh_plan_from_json(const clh_machine *machine, const char *json, clh_plan **plan);

/**
 * Frees a plan; NULL is fine.
 */
void clh_plan_free(clh_plan *plan);

/**
 * The whole plan, defaults and all, as the object that a result folder's run.json has of it; to be
 * freed with `clh_string_free`.
 */
clh_status clh_plan_json(const clh_plan *plan, char **json);

/**
 * The two ranks of a pair as threads of this process: each of two threads that do nothing else
 * calls `clh_sweep` or `clh_record` with its own group and the same plan. `timeout_ms` bounds
 * every wait for the other rank; 0 is 30 s.
 */
clh_status clh_group_threads(uint64_t timeout_ms, clh_group **rank0, clh_group **rank1);

/**
 * This process as one of the ranks that a launcher (torchrun, mpirun, srun) started; waits for the
 * others, at most `timeout_ms` (0: 30 s), which then bounds every wait. `*group` is NULL when no
 * launcher started this process as one of several ranks.
 */
clh_status clh_group_from_environment(uint64_t timeout_ms, clh_group **group);

/**
 * This rank's number, from 0; also 0 for NULL, and while a call uses the group.
 */
uint32_t clh_group_rank(const clh_group *group);

/**
 * Leaves the group; NULL is fine. The other rank's calls then fail instead of waiting.
 */
void clh_group_free(clh_group *group);

/**
 * Number of matrices: one per load profile of the plan, in its order; of a recorded run one per
 * sweep, load and kind of memory. 0 for NULL.
 */
size_t clh_result_matrix_count(const clh_result *result);

/**
 * Writes a view of the matrix with this number, from 0.
 */
clh_status clh_result_matrix(const clh_result *result, size_t index, clh_matrix *matrix);

/**
 * True when everything that the plan asked for was visited. False for NULL.
 */
bool clh_result_is_complete(const clh_result *result);

/**
 * What to know before trusting the numbers, one line each; may be empty. Lives as long as the
 * result. NULL for NULL.
 */
const char *clh_result_notes(const clh_result *result);

/**
 * Frees a result; NULL is fine. Views of its matrices end with it.
 */
void clh_result_free(clh_result *result);

/**
 * Makes a token; never NULL. One token may stop several sweeps and stays cancelled.
 */
clh_cancel *clh_cancel_new(void);

/**
 * Stops the sweeps that were given this token, each before its next point; they return
 * `CLH_STATUS_CANCELLED`. From any thread or signal handler; NULL is fine.
 */
void clh_cancel_now(const clh_cancel *cancel);

/**
 * Frees a token that no sweep uses any more; NULL is fine.
 */
void clh_cancel_free(clh_cancel *cancel);

/**
 * Measures a plan on the calling thread, which is bound to one CPU after another meanwhile and
 * gets its old mask back. `options` may be NULL. `*result` is NULL when the call fails; after
 * `CLH_STATUS_CANCELLED` it holds what was measured. Cells that could not be measured are no failure.
 *
 * For `core_pair` on a real machine two ranks call it, and both get the whole result.
 */
clh_status clh_sweep(const clh_plan *plan,
                     const clh_options *options,
                     clh_result **result);

/**
 * Measures a plan as `clh_sweep` does and keeps it in a result folder, with every output, as
 * the command line does. Every measured point is in the folder at once, whatever happens to the
 * process. `options` and `result` may be NULL; `result` gets the matrices of the folder, those of
 * an interrupted run before included.
 *
 * For `core_pair` on a real machine rank 1 calls it, too; it writes nothing and its `*result` is
 * NULL.
 *
 * `dir` is NULL or points to a text.
 */
clh_status clh_record(const clh_plan *plan,
                      const char *dir,
                      int32_t mode,
                      const clh_options *options,
                      clh_result **result);

/**
 * Frees a text that a call gave away; NULL is fine.
 *
 * `text` is NULL or was given away by this library and not yet freed.
 */
void clh_string_free(char *text);

/**
 * Judges a result folder: the JSON object that `cluster-health diagnose --json` prints, with
 * "verdict" and "findings", to be freed with `clh_string_free`. `expect` is the rate that the link
 * should have, such as "58.5GB/s"; NULL is what the plan said.
 *
 * `dir` and `expect` are each NULL or point to a text.
 */
clh_status clh_diagnose(const char *dir, const char *expect, char **json);

/**
 * Compares two runs of the same plan, A before B: the JSON object that
 * `cluster-health compare A B --json` prints, to be freed with `clh_string_free`. Differences below
 * the share `min_effect` of the rate do not count; 0 is 0.03. Runs of different plans or machines
 * have the verdict "refused" with the differences, unless `force`.
 *
 * `dir_a` and `dir_b` are each NULL or point to a text.
 */
clh_status clh_compare(const char *dir_a,
                       const char *dir_b,
                       double min_effect,
                       bool force,
                       char **json);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CLUSTER_HEALTH_H */
