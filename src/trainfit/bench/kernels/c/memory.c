// Latency and rate of a CPU's caches and memory, by one thread.
// Comments that begin with a number in brackets mark the lines that `trainfit bench gpu` shows as assembly.

#include <time.h>

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + 1e-9 * at.tv_nsec;
}

// Chases `steps` pointers, a multiple of 8, from *place on and stores where it ended; returns the seconds of these steps.
double chase(void **place, long warm, long steps) {
    void **p = *place;
    for (long i = 0; i < warm; i++) p = *p;
    double begun = now();
    for (long i = 0; i < steps; i += 8) {  // (2) Count, compare and branch: once in eight loads.
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) p = *p;  // (1) Load the next address from this one.
    }
    double seconds = now() - begun;
    *place = p;
    return seconds;
}

// Returns the sum of `turns` reads of a set, which begin with another number each, so that no compiler reads it once.
long long stream(const long long *set, long count, long turns) {
    long long sum = 0;
    for (long turn = 0; turn < turns; turn++) {
        __asm__ volatile("" : : "r"(set) : "memory");
        for (long i = 0; i < count; i++) sum += set[i] ^ turn;
    }
    return sum;
}
