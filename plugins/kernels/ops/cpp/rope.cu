// QK-norm, RoPE and the store of keys and values in one launch, in CUDA C++.
// minisgl/attention/__init__.py has the torch reference and describes arguments and result; ../triton/rope.py is the Triton
// version.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>

namespace {

using tvm::ffi::TensorView;

constexpr int kWarp = 32;
constexpr int kHeads = 8;  // heads per thread block: one head per warp
constexpr int kPairs = 2;  // pairs of elements that a lane holds of each half of a head; heads have at most 256 elements

// Two adjacent elements, loaded and stored with one instruction.
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T a, b;
};

template <typename T>
__device__ float2 Read(const T* at) {
  const auto pair = *reinterpret_cast<const Pair<T>*>(at);
  return {static_cast<float>(pair.a), static_cast<float>(pair.b)};
}

template <typename T>
__device__ void Write(T* at, float2 value) {
  *reinterpret_cast<Pair<T>*>(at) = {static_cast<T>(value.x), static_cast<T>(value.y)};
}

struct Shape {
  int q_heads, kv_heads, half, page_size;                      // half: elements of half a head; page_size: tokens per page
  int64_t stride_qkv, stride_page, stride_token, stride_head;  // in elements
  float eps;
};

// Each warp handles one head of one token. Queries are written to q_out, keys and values to the token's KV location in
// the pool. Lane l holds elements 2l and 2l + 1 of both halves, because dimension i is rotated with dimension i + half.
template <typename T>
__global__ void NormRopeStoreKernel(const T* qkv, T* q_out, T* k_pool, T* v_pool, const T* q_weight, const T* k_weight,
                                    const float* cos_sin, const int64_t* out_cache_loc, Shape s) {
  const int64_t token = blockIdx.x;
  const int head = blockIdx.y * kHeads + threadIdx.y;
  if (head >= s.q_heads + 2 * s.kv_heads) return;
  const bool is_q = head < s.q_heads, is_v = head >= s.q_heads + s.kv_heads;
  const int dim = 2 * s.half;
  const T* from = qkv + token * s.stride_qkv + static_cast<int64_t>(head) * dim;

  T* to = q_out + (token * s.q_heads + head) * dim;
  if (!is_q) {
    const int64_t loc = out_cache_loc[token];
    const int64_t at = loc / s.page_size * s.stride_page + loc % s.page_size * s.stride_token;
    to = is_v ? v_pool + at + (head - s.q_heads - s.kv_heads) * s.stride_head
              : k_pool + at + (head - s.q_heads) * s.stride_head;
  }

  float2 low[kPairs], high[kPairs];
  float squares = 0;
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const int i = 2 * (threadIdx.x + n * kWarp);
    if (i >= s.half) continue;
    low[n] = Read(from + i);
    high[n] = Read(from + s.half + i);
    squares += low[n].x * low[n].x + low[n].y * low[n].y + high[n].x * high[n].x + high[n].y * high[n].y;
  }
  const T* weight = is_q ? q_weight : k_weight;
  const bool norm = weight != nullptr && !is_v;
  if (norm) {  // uniform over the lanes of a warp
    for (int lane = kWarp / 2; lane > 0; lane /= 2) squares += __shfl_xor_sync(0xffffffff, squares, lane);
  }
  const float scale = norm ? rsqrtf(squares / dim + s.eps) : 1.0f;

#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const int i = 2 * (threadIdx.x + n * kWarp);
    if (i >= s.half) continue;
    float2 x = low[n], y = high[n];
    if (norm) {
      const float2 wx = Read(weight + i), wy = Read(weight + s.half + i);
      x = {x.x * scale * wx.x, x.y * scale * wx.y};
      y = {y.x * scale * wy.x, y.y * scale * wy.y};
    }
    if (!is_v) {
      const float2 cos = Read(cos_sin + token * dim + i), sin = Read(cos_sin + token * dim + s.half + i);
      const float2 turned = {x.x * cos.x - y.x * sin.x, x.y * cos.y - y.y * sin.y};
      y = {y.x * cos.x + x.x * sin.x, y.y * cos.y + x.y * sin.y};
      x = turned;
    }
    Write(to + i, x);
    Write(to + s.half + i, y);
  }
}

template <typename T>
void Launch(const TensorView& qkv, const TensorView& q, const TensorView& k_pool, const TensorView& v_pool,
            const T* q_weight, const T* k_weight, const TensorView& cos_sin, const TensorView& out_cache_loc, const Shape& s) {
  const DLDevice device = qkv.device();
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  const unsigned tokens = static_cast<unsigned>(q.size(0)), heads = s.q_heads + 2 * s.kv_heads;
  const dim3 grid(tokens, (heads + kHeads - 1) / kHeads), block(kWarp, kHeads);
  NormRopeStoreKernel<T><<<grid, block, 0, stream>>>(
      static_cast<const T*>(qkv.data_ptr()), static_cast<T*>(q.data_ptr()), static_cast<T*>(k_pool.data_ptr()),
      static_cast<T*>(v_pool.data_ptr()), q_weight, k_weight, static_cast<const float*>(cos_sin.data_ptr()),
      static_cast<const int64_t*>(out_cache_loc.data_ptr()), s);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "norm_rope_store: " << cudaGetErrorString(error);
}

// Writes q [tokens, q_heads, head_dim]. The pools are [pages, page_size, kv_heads, head_dim]; their strides may be
// any, but the elements of a head must be contiguous. Without weights no QK-norm is computed.
void NormRopeStore(TensorView qkv, TensorView q, TensorView k_pool, TensorView v_pool,
                   tvm::ffi::Optional<TensorView> q_weight, tvm::ffi::Optional<TensorView> k_weight,
                   TensorView cos_sin, TensorView out_cache_loc, double eps) {
  const int dim = static_cast<int>(q.size(2));
  if (dim % 4 != 0 || dim > 2 * 2 * kWarp * kPairs) {
    TVM_FFI_THROW(ValueError) << "norm_rope_store: head_dim is " << dim << "; it must be a multiple of 4, at most 256";
  }
  if (q.size(0) == 0) return;
  const Shape s{static_cast<int>(q.size(1)), static_cast<int>(k_pool.size(2)), dim / 2,
                static_cast<int>(k_pool.size(1)), qkv.stride(0), k_pool.stride(0), k_pool.stride(1),
                k_pool.stride(2), static_cast<float>(eps)};
  const void* q_norm = q_weight.has_value() ? q_weight.value().data_ptr() : nullptr;
  const void* k_norm = k_weight.has_value() ? k_weight.value().data_ptr() : nullptr;
  const auto launch = [&](auto zero) {
    using T = decltype(zero);
    Launch(qkv, q, k_pool, v_pool, static_cast<const T*>(q_norm), static_cast<const T*>(k_norm), cos_sin, out_cache_loc, s);
  };
  const DLDataType dtype = qkv.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32) {
    launch(float{});
  } else if (dtype.code == kDLFloat && dtype.bits == 16) {
    launch(__half{});
  } else if (dtype.code == kDLBfloat && dtype.bits == 16) {
    launch(__nv_bfloat16{});
  } else {
    TVM_FFI_THROW(TypeError) << "norm_rope_store takes float32, float16 or bfloat16";
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_rope_store, NormRopeStore);
