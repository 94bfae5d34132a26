// Rates of registers, constant memory and local memory: every multiprocessor reads the same set again and again, and keeps the sums.

#include <cuda_runtime.h>

constexpr int THREADS = 512, CHAINS = 8, CONSTANT_WORDS = 512, LOCAL_VECTORS = 8;

__constant__ unsigned constants[CONSTANT_WORDS];

// CHAINS independent chains of x = x * factor + addend: each instruction reads three registers.
__global__ void __launch_bounds__(THREADS) register_stream(float* sums, float factor, float addend, int turns) {
    float x[CHAINS];
#pragma unroll
    for (int i = 0; i < CHAINS; i++) x[i] = i;
#pragma unroll 4
    for (int turn = 0; turn < turns; turn++) {
#pragma unroll
        for (int i = 0; i < CHAINS; i++) x[i] = __fmaf_rn(x[i], factor, addend);
    }
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < CHAINS; i++) mine += x[i];
    sums[blockIdx.x * THREADS + threadIdx.x] = mine;
}

// All threads of a warp read the same words, which one read of constant memory serves. `first` is 0, unknown to the compiler.
__global__ void __launch_bounds__(THREADS) constant_stream(unsigned* sums, int turns, int first) {
    unsigned mine[4] = {};
    const char* from = reinterpret_cast<const char*>(constants) + first * threadIdx.x;
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
#pragma unroll 4
        for (int i = 0; i < CONSTANT_WORDS; i += 4) {
            uint4 words = *reinterpret_cast<const uint4*>(from + 4 * i);
            mine[0] += words.x ^ turn, mine[1] += words.y ^ turn, mine[2] += words.z ^ turn, mine[3] += words.w ^ turn;
        }
    }
    sums[blockIdx.x * THREADS + threadIdx.x] = mine[0] + mine[1] + mine[2] + mine[3];
}

// Each thread reads its own array of 128 bytes, 16 at a time: a block's are 64 KiB.
__global__ void __launch_bounds__(THREADS) local_stream(float* sums, float first, int turns) {
    float4 set[LOCAL_VECTORS];
    unsigned base = static_cast<unsigned>(__cvta_generic_to_local(set));
    for (int i = 0; i < LOCAL_VECTORS; i++)
        asm volatile("st.local.v4.f32 [%0], {%1, %1, %1, %1};" ::"r"(base + 16 * i), "f"(first + i) : "memory");
    float4 sum[2] = {};
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
#pragma unroll
        for (int i = 0; i < LOCAL_VECTORS; i++) {
            // Another address in each turn: ptxas would take equal reads out of the loop.
            unsigned at = base + ((16 * (i + turn)) & (16 * LOCAL_VECTORS - 1));
            float4 x, &into = sum[i % 2];
            asm volatile("ld.local.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                         : "r"(at)
                         : "memory");
            into.x += x.x, into.y += x.y, into.z += x.z, into.w += x.w;
        }
    }
    sums[blockIdx.x * THREADS + threadIdx.x] = sum[0].x + sum[0].y + sum[0].z + sum[0].w + sum[1].x + sum[1].y + sum[1].z + sum[1].w;
}

// `sums`: 4 bytes for each thread. Each returns a cudaError_t.
extern "C" int stream_register(void* sums, float factor, float addend, int blocks, int turns, void* stream) {
    register_stream<<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<float*>(sums), factor, addend, turns);
    return cudaGetLastError();
}

extern "C" int stream_constant(const void* words, void* sums, int blocks, int turns, void* stream) {
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    cudaError_t error = cudaMemcpyToSymbolAsync(constants, words, sizeof(constants), 0, cudaMemcpyDeviceToDevice, in);
    if (error != cudaSuccess) return error;
    constant_stream<<<blocks, THREADS, 0, in>>>(static_cast<unsigned*>(sums), turns, 0);
    return cudaGetLastError();
}

extern "C" int stream_local(void* sums, float first, int blocks, int turns, void* stream) {
    local_stream<<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<float*>(sums), first, turns);
    return cudaGetLastError();
}
