// RMSNorm, then SwiGLU of its halves, in one pass: x [n, 2f], weight [2f], y [n, f], all bf16; f a multiple of 8.
//
// A block takes rows b, b + blocks, ...: whole rows are in its registers, so each byte is read once and written once, 16 at a time.
// The load of the next row begins before the present one is added up, so that memory is never idle; the weight stays in registers.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int WIDTH = 8;  // bf16 in 16 bytes

struct Values {
    float of[WIDTH];
};

__device__ __forceinline__ Values widened(const uint4& bits) {
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&bits);
    Values out;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
        float2 two = __bfloat1622float2(pairs[i]);
        out.of[2 * i] = two.x, out.of[2 * i + 1] = two.y;
    }
    return out;
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// The sum over all threads; `parts` is not that of the call before, so one barrier is enough.
__device__ __forceinline__ float sum_of_block(float mine, float* parts) {
#pragma unroll
    for (int reach = 16; reach > 0; reach /= 2) mine += __shfl_xor_sync(~0u, mine, reach);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
    __syncthreads();
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) all += parts[i];
    return all;
}

// A thread has vectors t, t + THREADS, ... of each half: VECTORS of them are enough for f.
template <int VECTORS>
__global__ void __launch_bounds__(THREADS, VECTORS == 1 ? 2 : 1)
    normed_swiglu_kernel(const uint4* x, const uint4* weight, uint4* y, long long n, int vectors, float eps) {
    __shared__ float parts[2][WARPS];
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const float per_element = 1.0f / (2.0f * vectors * WIDTH);
    uint4 w_gate[VECTORS], w_up[VECTORS], gate[VECTORS], up[VECTORS], next_gate[VECTORS], next_up[VECTORS];

    auto load = [&](const uint4* row, uint4* gates, uint4* ups) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            int at = threadIdx.x + v * THREADS;
            gates[v] = at < vectors ? __ldcs(row + at) : zero;
            ups[v] = at < vectors ? __ldcs(row + vectors + at) : zero;
        }
    };

    load(weight, w_gate, w_up);
    long long row = blockIdx.x;
    if (row < n) load(x + row * 2 * vectors, gate, up);
    for (int turn = 0; row < n; row += gridDim.x, turn ^= 1) {
        long long next = row + gridDim.x;
        if (next < n) load(x + next * 2 * vectors, next_gate, next_up);
        float squares = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            Values a = widened(gate[v]), b = widened(up[v]);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) squares += a.of[i] * a.of[i] + b.of[i] * b.of[i];
        }
        float scale = rsqrtf(sum_of_block(squares, parts[turn]) * per_element + eps);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            int at = threadIdx.x + v * THREADS;
            Values a = widened(gate[v]), b = widened(up[v]), wa = widened(w_gate[v]), wb = widened(w_up[v]);
            uint4 bits;
            auto* pairs = reinterpret_cast<__nv_bfloat162*>(&bits);
#pragma unroll
            for (int i = 0; i < WIDTH; i += 2) {
                float first = silu(a.of[i] * scale * wa.of[i]) * (b.of[i] * scale * wb.of[i]);
                float second = silu(a.of[i + 1] * scale * wa.of[i + 1]) * (b.of[i + 1] * scale * wb.of[i + 1]);
                pairs[i / 2] = __floats2bfloat162_rn(first, second);
            }
            if (at < vectors) __stcs(y + row * vectors + at, bits);
            gate[v] = next_gate[v], up[v] = next_up[v];
        }
    }
}

template <int VECTORS>
static cudaError_t launch(const void* x, const void* weight, void* y, long long n, int vectors, float eps, cudaStream_t stream) {
    int device = 0, multiprocessors = 0, resident = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, normed_swiglu_kernel<VECTORS>, THREADS, 0);
    if (error != cudaSuccess) return error;
    long long most = static_cast<long long>(multiprocessors) * resident;
    normed_swiglu_kernel<VECTORS><<<static_cast<unsigned>(n < most ? n : most), THREADS, 0, stream>>>(
        static_cast<const uint4*>(x), static_cast<const uint4*>(weight), static_cast<uint4*>(y), n, vectors, eps);
    return cudaGetLastError();
}

// Returns a cudaError_t; rows of 16-byte aligned memory, n >= 1, f <= 2 x 8 x THREADS = 8192.
extern "C" int normed_swiglu(const void* x, const void* weight, void* y, long long n, int f, float eps, void* stream) {
    int vectors = f / WIDTH, each = (vectors + THREADS - 1) / THREADS;
    if (f % WIDTH || f < WIDTH || n < 1 || each > 2) return cudaErrorInvalidValue;
    return (each == 1 ? launch<1> : launch<2>)(x, weight, y, n, vectors, eps, static_cast<cudaStream_t>(stream));
}
