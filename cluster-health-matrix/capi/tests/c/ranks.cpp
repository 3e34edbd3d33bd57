// Pairs of this machine with two threads: swept, stopped from a third thread, recorded, resumed.
// Argument: a folder to write into.
#include <cluster_health.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            std::fprintf(stderr, "ranks.cpp:%d: %s; last error: %s\n", __LINE__, #condition,       \
                         clh_last_error());                                                        \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

namespace {

struct Rank {
    clh_status status = CLH_STATUS_OTHER;
    clh_result *result = nullptr;
    std::string message;
};

struct Both {
    Rank ranks[2];
    Both() = default;
    Both(const Both &) = delete;
    Both &operator=(const Both &) = delete;
    ~Both()
    {
        for (Rank &rank : ranks) clh_result_free(rank.result);
    }
};

// One call per rank, in a thread each; `call` gets the rank's options.
template <class Call> void together(Both &both, Call call, const clh_cancel *cancel = nullptr)
{
    clh_group *groups[2] = {};
    REQUIRE(clh_group_threads(20000, &groups[0], &groups[1]) == CLH_STATUS_OK);
    auto rank = [&](int number) {
        clh_options options = {};
        options.group = groups[number];
        options.cancel = cancel;
        Rank &own = both.ranks[number];
        own.status = call(&options, &own.result);
        own.message = clh_last_error();
    };
    std::thread other(rank, 1), first(rank, 0);
    first.join();
    other.join();
    for (clh_group *group : groups) clh_group_free(group);
}

// A second call with a group that is in use.
struct Again {
    const clh_plan *plan;
    const clh_group *group;
    clh_status status;
};

int again(void *user, const clh_progress *) noexcept
{
    Again *call = static_cast<Again *>(user);
    clh_options options = {};
    options.group = call->group;
    clh_result *result = nullptr;
    call->status = clh_sweep(call->plan, &options, &result);
    clh_result_free(result);
    return 0;
}

} // namespace

int main(int count, char **words)
{
    if (count != 2) return 2;
    const std::string folder = words[1];
    clh_machine *machine = nullptr;
    clh_plan *plan = nullptr, *endless = nullptr;
    REQUIRE(clh_machine_open("host", &machine) == CLH_STATUS_OK);
    REQUIRE(clh_plan_from_json(machine, R"({"sweep": "core_pair", "sizes": "4KiB", "repeats": 2})",
                               &plan) == CLH_STATUS_OK);
    REQUIRE(clh_plan_from_json(machine,
                               R"({"sweep": "core_pair", "sizes": "4KiB", "repeats": 10000})",
                               &endless) == CLH_STATUS_OK);
    clh_machine_free(machine);

    {
        Both both;
        Again second[2] = {{plan, nullptr, CLH_STATUS_OK}, {plan, nullptr, CLH_STATUS_OK}};
        together(both, [&](const clh_options *given, clh_result **result) {
            Again &call = second[result == &both.ranks[1].result];
            call.group = given->group;
            clh_options options = *given;
            options.progress = again;
            options.user = &call;
            return clh_sweep(plan, &options, result);
        });
        for (Again &call : second) REQUIRE(call.status == CLH_STATUS_BUSY);
        clh_matrix one, other;
        for (Rank &rank : both.ranks) REQUIRE(rank.status == CLH_STATUS_OK);
        REQUIRE(clh_result_matrix(both.ranks[0].result, 0, &one) == CLH_STATUS_OK);
        REQUIRE(clh_result_matrix(both.ranks[1].result, 0, &other) == CLH_STATUS_OK);
        REQUIRE(std::strcmp(one.sweep, "core_pair") == 0 && std::strcmp(one.memory, "device") == 0);
        const std::size_t cells = one.size_count * one.row_count * one.column_count;
        REQUIRE(cells > 0 && one.size_count == 1 && one.bytes[0] == 4096);
        for (std::size_t cell = 0; cell < cells; cell++)
            REQUIRE(one.status[cell] == CLH_CELL_MEASURED && one.gbps[cell] > 0);
        REQUIRE(std::memcmp(one.gbps, other.gbps, cells * sizeof *one.gbps) == 0);
    }
    {
        clh_cancel *cancel = clh_cancel_new();
        std::thread impatient([=] {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            clh_cancel_now(cancel);
        });
        Both both;
        together(
            both,
            [&](const clh_options *options, clh_result **result) {
                return clh_sweep(endless, options, result);
            },
            cancel);
        impatient.join();
        for (Rank &rank : both.ranks) {
            REQUIRE(rank.status == CLH_STATUS_CANCELLED);
            REQUIRE(rank.result != nullptr && !clh_result_is_complete(rank.result));
        }
        clh_cancel_free(cancel);
    }
    for (int mode : {CLH_MODE_NEW, CLH_MODE_RESUME}) {
        Both both;
        together(both, [&](const clh_options *options, clh_result **result) {
            return clh_record(plan, folder.c_str(), mode, options, result);
        });
        for (Rank &rank : both.ranks) REQUIRE(rank.status == CLH_STATUS_OK);
        REQUIRE(both.ranks[0].result != nullptr && both.ranks[1].result == nullptr);
        clh_matrix matrix;
        REQUIRE(clh_result_matrix(both.ranks[0].result, 0, &matrix) == CLH_STATUS_OK);
        REQUIRE(std::isfinite(matrix.gbps[0]));
    }
    {
        // Rank 0 finds the folder in use: rank 1 is told and does not wait.
        Both both;
        together(both, [&](const clh_options *options, clh_result **result) {
            return clh_record(plan, folder.c_str(), CLH_MODE_NEW, options, result);
        });
        REQUIRE(both.ranks[0].status == CLH_STATUS_INVALID);
        REQUIRE(both.ranks[1].status == CLH_STATUS_CANCELLED);
    }
    clh_plan_free(endless);
    clh_plan_free(plan);
    return 0;
}
