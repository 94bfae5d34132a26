// Latency of a memory, by one thread that chases pointers: each address is the value loaded last, so no two loads overlap.
// Comments that begin with a number in brackets mark the lines that `trainfit bench gpu` shows as PTX and SASS.

#include <cuda_runtime.h>

constexpr int UNROLLED = 8, THREADS = 1024;
constexpr int CONSTANT_WORDS = 16384, LOCAL_WORDS = 4096;
using Address = unsigned long long;

__constant__ unsigned constants[CONSTANT_WORDS];

__device__ __forceinline__ long long nanoseconds() {
    long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Chases `steps` pointers, a multiple of UNROLLED, from *place on and stores where it ended, the cycles and the nanoseconds.
template <class P, class Next>
__device__ __forceinline__ void chase(P p, int warm, int steps, P* place, long long* out, Next next) {
#pragma unroll 1
    for (int i = 0; i < warm; i++) p = next(p);
    long long began_ns = nanoseconds();
    long long began = clock64();  // (1) Read the multiprocessor's counter of cycles.
#pragma unroll 1
    for (int i = 0; i < steps; i += UNROLLED) {  // (3) Count, compare and branch, once in eight loads.
#pragma unroll
        for (int j = 0; j < UNROLLED; j++) p = next(p);
    }
    long long ended = clock64();
    long long ended_ns = nanoseconds();
    *place = p;
    out[0] = ended - began;  // (4) Subtract and store.
    out[1] = ended_ns - began_ns;
}

__global__ void global_chase(Address* place, int warm, int steps, long long* out) {
    chase(*place, warm, steps, place, out, [](Address p) {
        asm volatile("ld.global.ca.u64 %0, [%0];" : "+l"(p));  // (2) Load the next address from this one.
        return p;
    });
}

// `cycle`: for each word, the byte at which the next one begins.
__global__ void shared_chase(const unsigned* cycle, int words, unsigned* place, int warm, int steps, long long* out) {
    extern __shared__ unsigned set[];
    unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(set));
    for (int i = threadIdx.x; i < words; i += THREADS) set[i] = base + cycle[i];
    __syncthreads();
    if (threadIdx.x) return;
    unsigned p = base + *place;
    chase(p, warm, steps, &p, out, [](unsigned p) {
        asm volatile("ld.shared.u32 %0, [%0];" : "+r"(p));
        return p;
    });
    *place = p - base;
}

__global__ void constant_chase(unsigned* place, int warm, int steps, long long* out) {
    chase(*place, warm, steps, place, out, [](unsigned p) {
        return *reinterpret_cast<const unsigned*>(reinterpret_cast<const char*>(constants) + p);
    });
}

// A thread's words are 128 bytes apart, between those of the other threads of its warp.
__global__ void local_chase(const unsigned* cycle, int words, unsigned* place, int warm, int steps, long long* out) {
    unsigned set[LOCAL_WORDS];
    unsigned base = static_cast<unsigned>(__cvta_generic_to_local(set));
    for (int i = 0; i < words; i++)
        asm volatile("st.local.u32 [%0], %1;" ::"r"(base + 4 * i), "r"(base + cycle[i]) : "memory");
    unsigned p = base + *place;
    chase(p, warm, steps, &p, out, [](unsigned p) {
        asm volatile("ld.local.u32 %0, [%0];" : "+r"(p)::"memory");
        return p;
    });
    *place = p - base;
}

// Registers have no addresses: the time is that of multiplying and adding a value that the last instruction wrote.
__global__ void register_chase(float* place, float factor, float addend, int steps, long long* out) {
    chase(*place, 0, steps, place, out, [=](float p) { return __fmaf_rn(p, factor, addend); });
}

// Each returns a cudaError_t. `place`: where the chase begins, and then where it ended; `out`: cycles, nanoseconds.
extern "C" int chase_global(void* place, int warm, int steps, void* out, void* stream) {
    global_chase<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<Address*>(place), warm, steps, static_cast<long long*>(out));
    return cudaGetLastError();
}

extern "C" int chase_shared(const void* cycle, int words, void* place, int warm, int steps, void* out, void* stream) {
    int bytes = 4 * words;
    cudaError_t error = cudaFuncSetAttribute(shared_chase, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    shared_chase<<<1, THREADS, bytes, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const unsigned*>(cycle), words, static_cast<unsigned*>(place), warm, steps, static_cast<long long*>(out));
    return cudaGetLastError();
}

extern "C" int chase_constant(const void* cycle, int words, void* place, int warm, int steps, void* out, void* stream) {
    if (words > CONSTANT_WORDS) return cudaErrorInvalidValue;
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    cudaError_t error = cudaMemcpyToSymbolAsync(constants, cycle, 4 * words, 0, cudaMemcpyDeviceToDevice, in);
    if (error != cudaSuccess) return error;
    constant_chase<<<1, 1, 0, in>>>(static_cast<unsigned*>(place), warm, steps, static_cast<long long*>(out));
    return cudaGetLastError();
}

extern "C" int chase_local(const void* cycle, int words, void* place, int warm, int steps, void* out, void* stream) {
    if (words > LOCAL_WORDS) return cudaErrorInvalidValue;
    local_chase<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const unsigned*>(cycle), words, static_cast<unsigned*>(place), warm, steps, static_cast<long long*>(out));
    return cudaGetLastError();
}

extern "C" int chase_register(void* place, float factor, float addend, int steps, void* out, void* stream) {
    register_chase<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<float*>(place), factor, addend, steps, static_cast<long long*>(out));
    return cudaGetLastError();
}
