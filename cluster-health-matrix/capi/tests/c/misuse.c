/* What a caller can do wrong is a status with a message. Argument: a folder to write into. */
#include <cluster_health.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SCENARIO "[machine]\ncpus = 8\nnuma_nodes = 2\ndevices = 2\n"
#define H2D "{\"sweep\": \"h2d\", \"sizes\": [\"1MiB\"], \"repeats\": 1}"
#define PAIR "{\"sweep\": \"core_pair\", \"sizes\": [\"4KiB\"], \"repeats\": 1}"

static void require(int line, int right, const char *what)
{
    if (!right) {
        fprintf(stderr, "misuse.c:%d: %s; last error: %s\n", line, what, clh_last_error());
        exit(1);
    }
}
#define REQUIRE(condition) require(__LINE__, (condition), #condition)

/* The status is this one, and the message has this part. */
static void refused(int line, clh_status status, clh_status wanted, const char *part)
{
    if (status != wanted || strstr(clh_last_error(), part) == NULL) {
        fprintf(stderr, "misuse.c:%d: status %d, not %d; '%s' lacks '%s'\n", line, (int)status,
                (int)wanted, clh_last_error(), part);
        exit(1);
    }
}
#define REFUSED(call, status, part) refused(__LINE__, (call), CLH_STATUS_##status, part)

static int at_once(void *user, const clh_progress *progress)
{
    *(unsigned long *)user += 1;
    return progress->done < progress->total ? -7 : 0;
}

/* Some address that is not NULL, to see that calls overwrite it. */
static char elsewhere;

static void null_and_text(void)
{
    clh_machine *machine = (clh_machine *)(void *)&elsewhere;
    clh_plan *plan = (clh_plan *)(void *)&elsewhere;
    clh_result *result = (clh_result *)(void *)&elsewhere;
    clh_group *group = (clh_group *)(void *)&elsewhere;
    clh_matrix matrix;
    char *json = &elsewhere;

    REFUSED(clh_machine_open(NULL, &machine), BAD_CALL, "name is NULL");
    REQUIRE(machine == NULL);
    REFUSED(clh_machine_open("host", NULL), BAD_CALL, "machine is NULL");
    REFUSED(clh_machine_open("h\xc3st", &machine), BAD_CALL, "UTF-8");
    REFUSED(clh_machine_open("gpu", &machine), INVALID, "'gpu'");
    REFUSED(clh_machine_open("synthetic:/nowhere.toml", &machine), SYSTEM, "nowhere");
    REFUSED(clh_machine_synthetic(NULL, &machine), BAD_CALL, "scenario is NULL");
    REFUSED(clh_machine_synthetic("[machine]\ncpu = 1\n", &machine), FORMAT, "cpu");
    REQUIRE(machine == NULL);
    REQUIRE(clh_machine_backend(NULL) == NULL);
    REQUIRE(clh_machine_cpu_count(NULL) == 0 && clh_machine_device_count(NULL) == 0);
    REFUSED(clh_machine_census(NULL, &json), BAD_CALL, "machine is NULL");
    REQUIRE(json == NULL);
    REFUSED(clh_machine_census(NULL, NULL), BAD_CALL, "json is NULL");

    REFUSED(clh_plan_from_json(NULL, H2D, &plan), BAD_CALL, "machine is NULL");
    REQUIRE(plan == NULL);
    REFUSED(clh_plan_json(NULL, &json), BAD_CALL, "plan is NULL");
    REFUSED(clh_sweep(NULL, NULL, &result), BAD_CALL, "plan is NULL");
    REQUIRE(result == NULL);
    REFUSED(clh_record(NULL, "x", CLH_MODE_NEW, NULL, NULL), BAD_CALL, "plan is NULL");
    REFUSED(clh_result_matrix(NULL, 0, &matrix), BAD_CALL, "result is NULL");
    REQUIRE(clh_result_matrix_count(NULL) == 0 && !clh_result_is_complete(NULL));
    REQUIRE(clh_result_notes(NULL) == NULL);
    REFUSED(clh_group_threads(0, &group, NULL), BAD_CALL, "rank1 is NULL");
    REQUIRE(group == NULL);
    REFUSED(clh_group_from_environment(0, NULL), BAD_CALL, "group is NULL");
    REQUIRE(clh_group_from_environment(0, &group) == CLH_STATUS_OK && group == NULL);
    REQUIRE(clh_group_rank(NULL) == 0);
    REFUSED(clh_diagnose(NULL, NULL, &json), BAD_CALL, "dir is NULL");
    REFUSED(clh_diagnose("/nowhere", NULL, NULL), BAD_CALL, "json is NULL");
    REFUSED(clh_diagnose("/nowhere", "\xff", &json), BAD_CALL, "UTF-8");
    REFUSED(clh_diagnose("/nowhere", "fast", &json), INVALID, "expect: 'fast'");
    REFUSED(clh_diagnose("/nowhere", NULL, &json), IO, "/nowhere");
    REFUSED(clh_compare("/nowhere", NULL, 0, false, &json), BAD_CALL, "dir_b is NULL");
    REFUSED(clh_compare("/nowhere", "/nowhere", -1, false, &json), INVALID, "min_effect");
    REFUSED(clh_compare("/nowhere", "/nowhere", 0, true, &json), IO, "/nowhere");

    clh_machine_free(NULL);
    clh_plan_free(NULL);
    clh_result_free(NULL);
    clh_group_free(NULL);
    clh_cancel_free(NULL);
    clh_cancel_now(NULL);
    clh_string_free(NULL);
}

static void plans(const clh_machine *machine)
{
    clh_plan *plan = NULL;
    REFUSED(clh_plan_from_json(machine, NULL, &plan), BAD_CALL, "json is NULL");
    REFUSED(clh_plan_from_json(machine, H2D, NULL), BAD_CALL, "plan is NULL");
    REFUSED(clh_plan_from_json(machine, "{\"\x80\": 1}", &plan), BAD_CALL, "UTF-8");
    REFUSED(clh_plan_from_json(machine, "{\"sweep\": \"h2d\"", &plan), INVALID, "plan: ");
    REFUSED(clh_plan_from_json(machine, "{}", &plan), INVALID, "sweep");
    REFUSED(clh_plan_from_json(machine, "{\"sweep\": \"h2d\", \"cpu\": 0}", &plan), INVALID, "`cpu`");
    REFUSED(clh_plan_from_json(machine, "{\"sweep\": \"h2d\", \"cpus\": \"99\"}", &plan), INVALID,
            "cpus: CPU 99");
    REFUSED(clh_plan_from_json(machine, "{\"sweep\": \"h2d\", \"sizes\": \"much\"}", &plan), INVALID,
            "sizes: ");
    REQUIRE(plan == NULL);
}

static void sweeps(clh_machine *machine, const char *folder)
{
    clh_machine *host = NULL;
    clh_plan *h2d = NULL, *pair = NULL, *host_pair = NULL;
    clh_group *rank0 = NULL, *rank1 = NULL;
    clh_result *result = NULL;
    clh_cancel *cancel = clh_cancel_new();
    clh_options options = {0};
    clh_matrix matrix;
    unsigned long calls = 0;
    char *json = NULL;

    REQUIRE(clh_machine_open("host", &host) == CLH_STATUS_OK);
    REQUIRE(clh_plan_from_json(machine, H2D, &h2d) == CLH_STATUS_OK);
    REQUIRE(clh_plan_from_json(machine, PAIR, &pair) == CLH_STATUS_OK);
    REQUIRE(clh_plan_from_json(host, PAIR, &host_pair) == CLH_STATUS_OK);
    clh_machine_free(host);
    REFUSED(clh_sweep(h2d, NULL, NULL), BAD_CALL, "result is NULL");

    /* Ranks where there are none, and none where there must be. */
    REQUIRE(clh_group_threads(100, &rank0, &rank1) == CLH_STATUS_OK);
    REQUIRE(clh_group_rank(rank0) == 0 && clh_group_rank(rank1) == 1);
    REFUSED(clh_sweep(host_pair, NULL, &result), BAD_CALL, "group is NULL");
    REFUSED(clh_record(host_pair, folder, CLH_MODE_NEW, &options, &result), BAD_CALL, "group is NULL");
    options.group = rank0;
    REFUSED(clh_sweep(h2d, &options, &result), BAD_CALL, "group");
    REFUSED(clh_sweep(pair, &options, &result), BAD_CALL, "synthetic");
    /* The other rank does not come, and then is gone. */
    REFUSED(clh_sweep(host_pair, &options, &result), TIMEOUT, "rank 1");
    REQUIRE(result == NULL);
    clh_group_free(rank1);
    REFUSED(clh_sweep(host_pair, &options, &result), RANK, "rank 1");
    clh_group_free(rank0);
    options.group = NULL;

    /* Stopped before its first point, and by its first progress. */
    clh_cancel_now(cancel);
    options.cancel = cancel;
    REFUSED(clh_sweep(h2d, &options, &result), CANCELLED, "cancelled");
    REQUIRE(result != NULL && !clh_result_is_complete(result));
    REQUIRE(clh_result_matrix(result, 0, &matrix) == CLH_STATUS_OK);
    REQUIRE(matrix.status[0] == CLH_CELL_NOT_VISITED && matrix.gbps[0] != matrix.gbps[0]);
    REFUSED(clh_result_matrix(result, 1, &matrix), BAD_CALL, "index is 1");
    REFUSED(clh_result_matrix(result, 0, NULL), BAD_CALL, "matrix is NULL");
    REQUIRE(clh_result_notes(result) != NULL);
    clh_result_free(result);
    options.cancel = NULL;
    clh_cancel_free(cancel);
    options.progress = at_once;
    options.user = &calls;
    REFUSED(clh_sweep(pair, &options, &result), CANCELLED, "cancelled");
    REQUIRE(calls == 1 && !clh_result_is_complete(result));
    clh_result_free(result);
    options.progress = NULL;

    /* Folders. */
    REFUSED(clh_record(h2d, NULL, CLH_MODE_NEW, NULL, NULL), BAD_CALL, "dir is NULL");
    REFUSED(clh_record(h2d, folder, 3, NULL, NULL), BAD_CALL, "mode is 3");
    REFUSED(clh_record(h2d, "/dev/null/x", CLH_MODE_NEW, NULL, NULL), IO, "/dev/null");
    REQUIRE(clh_record(h2d, folder, CLH_MODE_NEW, NULL, NULL) == CLH_STATUS_OK);
    REFUSED(clh_record(h2d, folder, CLH_MODE_NEW, NULL, &result), INVALID, "not empty");
    /* Options of the command line are none of C's. */
    REQUIRE(result == NULL && strstr(clh_last_error(), "--") == NULL);
    REFUSED(clh_record(pair, folder, CLH_MODE_RESUME, NULL, NULL), INVALID, "plan");
    REQUIRE(clh_record(h2d, folder, CLH_MODE_RESUME, &options, &result) == CLH_STATUS_OK);
    REQUIRE(clh_result_is_complete(result) && clh_result_matrix_count(result) == 1);
    clh_result_free(result);
    REQUIRE(clh_diagnose(folder, "1000GB/s", &json) == CLH_STATUS_OK);
    REQUIRE(strstr(json, "\"verdict\"") != NULL);
    clh_string_free(json);

    clh_plan_free(h2d);
    clh_plan_free(host_pair);
    clh_plan_free(pair);
}

int main(int count, char **words)
{
    clh_machine *machine = NULL;
    if (count != 2)
        return 2;
    REQUIRE(clh_last_error()[0] == '\0');
    REQUIRE(strcmp(clh_version(), "") != 0);
    null_and_text();
    REQUIRE(clh_machine_synthetic(SCENARIO, &machine) == CLH_STATUS_OK);
    plans(machine);
    sweeps(machine, words[1]);
    clh_machine_free(machine);
    return 0;
}
