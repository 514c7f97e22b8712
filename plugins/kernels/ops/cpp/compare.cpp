// Counts the whole pages that two sequences of token ids have in common at their start.
// plugins/kernels/ops/compare.py has the numpy version and describes arguments and result.
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstdint>

namespace {

// Ids are compared in blocks of kBlock by XOR and OR, without a branch, so that the compiler can use vector
// instructions. Only the first block that contains a difference is compared id by id.
constexpr int64_t kBlock = 64;

const int32_t* Ids(const tvm::ffi::TensorView& ids) {
  const DLDataType dtype = ids.dtype();
  if (ids.ndim() != 1 || dtype.code != kDLInt || dtype.bits != 32 || ids.device().device_type != kDLCPU ||
      (ids.size(0) > 1 && ids.stride(0) != 1)) {
    TVM_FFI_THROW(ValueError) << "token ids must be one contiguous row of int32 on the CPU";
  }
  return static_cast<const int32_t*>(ids.data_ptr());
}

int64_t CommonPages(tvm::ffi::TensorView a, tvm::ffi::TensorView b, int64_t page_size) {
  const int32_t *x = Ids(a), *y = Ids(b);
  const int64_t length = std::min(a.size(0), b.size(0));
  int64_t at = 0;
  for (; at + kBlock <= length; at += kBlock) {
    int32_t differs = 0;
    for (int64_t i = at; i < at + kBlock; ++i) differs |= x[i] ^ y[i];
    if (differs != 0) break;
  }
  return (std::mismatch(x + at, x + length, y + at).first - x) / page_size;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(common_pages, CommonPages);
