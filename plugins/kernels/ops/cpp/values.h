// The two element types of CPU kernels, float and bfloat16, and checks of tensor arguments.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <cstring>

namespace minisgl {

using tvm::ffi::TensorView;

// bfloat16 is the upper half of a float.
struct BFloat16 {
  uint16_t bits;
};

inline float ToFloat(float x) { return x; }

inline float ToFloat(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

inline void FromFloat(float x, float* to) { *to = x; }

// Rounds to the nearest bfloat16, ties to even; keeps NaN a NaN.
inline void FromFloat(float x, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = static_cast<uint16_t>(x == x ? rounded : 0x7fc0);
}

inline bool IsFloat32(const TensorView& x) { return x.dtype().code == kDLFloat && x.dtype().bits == 32; }
inline bool IsBFloat16(const TensorView& x) { return x.dtype().code == kDLBfloat && x.dtype().bits == 16; }

// Throws ValueError unless x is on the CPU, has `ndim` dimensions, and is contiguous from dimension `from` on.
inline void Check(const TensorView& x, const char* name, int ndim, int from = 0) {
  bool ok = x.ndim() == ndim && x.device().device_type == kDLCPU;
  int64_t stride = 1;
  for (int i = ndim - 1; ok && i >= from; --i) {
    ok = x.size(i) == 1 || x.stride(i) == stride;
    stride *= x.size(i);
  }
  if (!ok) TVM_FFI_THROW(ValueError) << name << " must be a contiguous CPU tensor of " << ndim << " dimensions";
}

inline const int32_t* Int32(const TensorView& x, const char* name) {
  if (x.dtype().code != kDLInt || x.dtype().bits != 32) TVM_FFI_THROW(ValueError) << name << " must be int32";
  return static_cast<const int32_t*>(x.data_ptr());
}

// Throws ValueError unless x has the element type of `like`.
inline void SameType(const TensorView& like, const TensorView& x, const char* name) {
  if (x.dtype().code != like.dtype().code || x.dtype().bits != like.dtype().bits) {
    TVM_FFI_THROW(ValueError) << name << " has another element type than the other tensors";
  }
}

template <typename T>
T* Data(const TensorView& x) {
  return static_cast<T*>(x.data_ptr());
}

// Calls f with a value of x's element type, float or BFloat16. Throws ValueError for other types.
template <typename F>
void WithElementType(const TensorView& x, const char* name, const F& f) {
  if (IsFloat32(x)) return f(float{});
  if (IsBFloat16(x)) return f(BFloat16{});
  TVM_FFI_THROW(ValueError) << name << " must be float32 or bfloat16";
}

}  // namespace minisgl
