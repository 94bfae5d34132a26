// Reads of shared memory, 16 bytes a thread at a time, `turns` times over the same set; what was read is added up and kept.

#include <cuda_runtime.h>

constexpr int THREADS = 1024, AHEAD = 4;  // AHEAD: independent loads that a thread has under way

__device__ __forceinline__ float4 shared_read(unsigned address) {
    float4 x;
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address));
    return x;
}

// Each thread reads AHEAD vectors a turn: a block reads THREADS x AHEAD x 16 = 64 KiB.
__global__ void __launch_bounds__(THREADS) shared_reads_kernel(const float4* from, float* sums, int turns) {
    extern __shared__ float4 set[];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) set[threadIdx.x + i * THREADS] = from[threadIdx.x + i * THREADS];
    __syncthreads();
    unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(set)) + 16 * threadIdx.x;
    float4 sum[AHEAD] = {};
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float4 x = shared_read(base + 16 * THREADS * i);
            sum[i].x += x.x, sum[i].y += x.y, sum[i].z += x.z, sum[i].w += x.w;
        }
    }
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) mine += sum[i].x + sum[i].y + sum[i].z + sum[i].w;
    sums[blockIdx.x * THREADS + threadIdx.x] = mine;
}

// `from`: 64 KiB; `sums`: fp32 [blocks, THREADS]. Returns a cudaError_t.
extern "C" int shared_reads(const void* from, void* sums, int blocks, int turns, void* stream) {
    constexpr int BYTES = THREADS * AHEAD * 16;
    cudaError_t error = cudaFuncSetAttribute(shared_reads_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
    if (error != cudaSuccess) return error;
    shared_reads_kernel<<<blocks, THREADS, BYTES, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const float4*>(from), static_cast<float*>(sums), turns);
    return cudaGetLastError();
}
