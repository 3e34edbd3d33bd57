/* Two-rank MPI_Allgather, out of place: for each size in bytes per rank the median over iterations
 * of the maximum over ranks, in nanoseconds. Prints "bytes nanoseconds" per line on rank 0.
 * Usage: mpirun -n 2 allgather SIZE:ITERATIONS … */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int arg = 1; arg < argc; arg++) {
        char *colon;
        long bytes = strtol(argv[arg], &colon, 10);
        int iterations = atoi(colon + 1);
        char *send = malloc(bytes), *receive = malloc(bytes * size);
        double *times = malloc(iterations * sizeof *times);
        double *most = malloc(iterations * sizeof *most);
        memset(send, rank + 1, bytes);
        memset(receive, 0, bytes * size);
        for (int i = -iterations / 10 - 2; i < iterations; i++) {
            /* Both ranks start at an agreed instant of the clock that they share: leaving a barrier
             * they would start apart, and the later one would find the other's data there. */
            double mine = now_ns(), start;
            MPI_Allreduce(&mine, &start, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
            start += 2000;
            while (now_ns() < start)
                ;
            start = now_ns();
            MPI_Allgather(send, bytes, MPI_CHAR, receive, bytes, MPI_CHAR, MPI_COMM_WORLD);
            if (i >= 0)
                times[i] = now_ns() - start;
        }
        for (int r = 0; r < size; r++)
            if (receive[r * bytes] != r + 1 || receive[r * bytes + bytes - 1] != r + 1) {
                fprintf(stderr, "wrong data from rank %d\n", r);
                MPI_Abort(MPI_COMM_WORLD, 1);
            }
        MPI_Reduce(times, most, iterations, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0) {
            qsort(most, iterations, sizeof *most, ascending);
            printf("%ld %.0f\n", bytes, most[iterations / 2]);
        }
        free(send);
        free(receive);
        free(times);
        free(most);
    }
    MPI_Finalize();
    return 0;
}
