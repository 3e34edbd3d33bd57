/*
 * dump MACHINE PLAN                what a sweep measures, bit by bit
 * dump MACHINE PLAN stop N        the same, stopped by the N-th progress
 * dump MACHINE PLAN record DIR    the same, recorded, with what the folder says
 * dump compare A B                 two folders
 * dump census MACHINE              its CPUs
 */
#include <cluster_health.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int done(clh_status status)
{
    if (status != CLH_STATUS_OK)
        fprintf(stderr, "status %d: %s\n", (int)status, clh_last_error());
    return status == CLH_STATUS_OK;
}

static int print_json(clh_status status, char *json)
{
    if (!done(status))
        return 1;
    puts(json);
    clh_string_free(json);
    return 0;
}

static uint64_t bits_of_double(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void print_matrix(const clh_matrix *m)
{
    size_t i, cells = m->size_count * m->row_count * m->column_count;
    printf("%s %s %s\n", m->sweep, m->load, m->memory);
    for (i = 0; i < m->size_count; i++)
        printf("%" PRIu64 " ", m->bytes[i]);
    printf("\n");
    for (i = 0; i < m->row_count; i++)
        printf("%" PRIu32 " ", m->row_ids[i]);
    printf("\n");
    for (i = 0; i < m->column_count; i++)
        printf("%" PRIu32 " ", m->column_ids[i]);
    printf("\n");
    for (i = 0; i < cells; i++) {
        printf("%016" PRIx64 " %016" PRIx64 " %u", bits_of_double(m->gbps[i]),
               bits_of_double(m->spread[i]), (unsigned)m->status[i]);
        if (m->predicted_gbps != NULL)
            printf(" %08" PRIx32 " %08" PRIx32, bits_of_float(m->predicted_gbps[i]),
                   bits_of_float(m->predicted_error[i]));
        printf("\n");
    }
}

struct Stop {
    unsigned long calls, last;
    uint64_t done, total, elapsed_ns;
};

static int stop(void *user, const clh_progress *progress)
{
    struct Stop *seen = user;
    if (progress->done < seen->done || progress->done > progress->total ||
        progress->elapsed_ns < seen->elapsed_ns) {
        fprintf(stderr, "progress goes back\n");
        exit(3);
    }
    seen->done = progress->done;
    seen->total = progress->total;
    seen->elapsed_ns = progress->elapsed_ns;
    return ++seen->calls == seen->last;
}

static int measure(int count, char **words)
{
    clh_machine *machine = NULL;
    clh_plan *plan = NULL;
    clh_result *result = NULL;
    clh_options options = {0};
    clh_matrix matrix;
    struct Stop seen = {0};
    clh_status status;
    const char *dir = NULL;
    char *json = NULL;
    size_t i;

    options.progress = stop;
    options.user = &seen;
    if (count == 5 && strcmp(words[3], "stop") == 0)
        seen.last = strtoul(words[4], NULL, 10);
    if (count == 5 && strcmp(words[3], "record") == 0)
        dir = words[4];
    if (!done(clh_machine_open(words[1], &machine)) ||
        !done(clh_plan_from_json(machine, words[2], &plan)))
        return 1;
    /* A plan needs its machine no more. */
    clh_machine_free(machine);
    if (dir != NULL)
        status = clh_record(plan, dir, CLH_MODE_NEW, &options, &result);
    else
        status = clh_sweep(plan, &options, &result);
    clh_plan_free(plan);
    if (status == CLH_STATUS_CANCELLED && seen.calls == seen.last && clh_last_error()[0] != '\0')
        status = CLH_STATUS_OK;
    if (!done(status))
        return 1;
    printf("complete %d\n", (int)clh_result_is_complete(result));
    for (i = 0; i < clh_result_matrix_count(result); i++) {
        if (!done(clh_result_matrix(result, i, &matrix)))
            return 1;
        print_matrix(&matrix);
    }
    clh_result_free(result);
    if (seen.calls == 0)
        return 4;
    if (dir == NULL)
        return 0;
    status = clh_diagnose(dir, NULL, &json);
    return print_json(status, json);
}

int main(int count, char **words)
{
    clh_status status;
    char *json = NULL;
    if (count == 4 && strcmp(words[1], "compare") == 0) {
        status = clh_compare(words[2], words[3], 0, false, &json);
        return print_json(status, json);
    }
    if (count == 3 && strcmp(words[1], "census") == 0) {
        clh_machine *machine = NULL;
        if (!done(clh_machine_open(words[2], &machine)))
            return 1;
        printf("%s %zu %zu\n", clh_machine_backend(machine), clh_machine_cpu_count(machine),
               clh_machine_device_count(machine));
        status = clh_machine_census(machine, &json);
        clh_machine_free(machine);
        return print_json(status, json);
    }
    return count >= 3 ? measure(count, words) : 2;
}
