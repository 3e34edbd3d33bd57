#include <cluster_health.h>
#include <stdio.h>

int main(void)
{
    const char *wanted = "{\"sweep\": \"h2d\", \"sizes\": [\"1MiB\"], \"repeats\": 1}";
    clh_machine *machine = NULL;
    clh_plan *plan = NULL;
    clh_result *result = NULL;
    clh_matrix m;
    int failed = clh_machine_open("auto", &machine) || clh_plan_from_json(machine, wanted, &plan) ||
                 clh_sweep(plan, NULL, &result) || clh_result_matrix(result, 0, &m);
    if (failed)
        fprintf(stderr, "%s\n", clh_last_error());
    else
        for (size_t row = 0; row < m.row_count; row++)
            for (size_t column = 0; column < m.column_count; column++)
                printf("CPU %u, device %u: %.1f GB/s\n", (unsigned)m.row_ids[row],
                       (unsigned)m.column_ids[column], m.gbps[row * m.column_count + column]);
    clh_result_free(result);
    clh_plan_free(plan);
    clh_machine_free(machine);
    return failed;
}
