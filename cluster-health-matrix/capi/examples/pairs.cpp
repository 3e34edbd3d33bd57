#include <cluster_health.h>

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <thread>

template <auto release> struct Free {
    template <class T> void operator()(T *handle) const { release(handle); }
};
using Machine = std::unique_ptr<clh_machine, Free<clh_machine_free>>;
using Plan = std::unique_ptr<clh_plan, Free<clh_plan_free>>;
using Group = std::unique_ptr<clh_group, Free<clh_group_free>>;
using Result = std::unique_ptr<clh_result, Free<clh_result_free>>;

static void check(clh_status status)
{
    if (status != CLH_STATUS_OK) throw std::runtime_error(clh_last_error());
}

// Lets a call write into an owner.
template <class Owner> struct Into {
    Owner &owner;
    typename Owner::pointer handle = nullptr;
    explicit Into(Owner &into) : owner(into) {}
    ~Into() { owner.reset(handle); }
    operator typename Owner::pointer *() { return &handle; }
};

// Exceptions must not leave it.
static int show(void *, const clh_progress *progress) noexcept
{
    std::fprintf(stderr, "%llu of %llu points\n", static_cast<unsigned long long>(progress->done),
                 static_cast<unsigned long long>(progress->total));
    return 0; // anything else stops the sweep
}

int main()
try {
    Machine machine;
    Plan plan;
    check(clh_machine_open("host", Into(machine)));
    check(clh_plan_from_json(machine.get(), R"({"sweep": "core_pair", "sizes": "64KiB", "repeats": 1})",
                             Into(plan)));
    // Two ranks, each a thread that does nothing else; the first one is this thread.
    Group groups[2];
    check(clh_group_threads(10000, Into(groups[0]), Into(groups[1])));
    std::thread other([&] {
        clh_options options = {};
        options.group = groups[1].get();
        Result same;
        clh_sweep(plan.get(), &options, Into(same)); // rank 0 tells what is wrong
    });
    clh_options options = {};
    options.group = groups[0].get();
    options.progress = show;
    Result result;
    clh_status status = clh_sweep(plan.get(), &options, Into(result));
    std::runtime_error error(clh_last_error()); // of this thread
    other.join();
    if (status != CLH_STATUS_OK) throw error;

    clh_matrix m;
    check(clh_result_matrix(result.get(), 0, &m));
    for (size_t row = 0; row < m.row_count; row++)
        for (size_t column = 0; column < m.column_count; column++)
            std::printf("rank 0 on CPU %u, rank 1 on CPU %u: %.1f GB/s per rank\n", m.row_ids[row],
                        m.column_ids[column], m.gbps[row * m.column_count + column]);
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
