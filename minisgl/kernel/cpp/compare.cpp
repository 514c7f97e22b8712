// How many whole pages two sequences of token ids have in common at their start.
// The numpy twin, with what it takes and returns, is in minisgl/kernel/compare.py.
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstdint>

namespace {

// Where two ids differ, so do their bits. A block is compared without a branch, which the compiler turns into vector
// instructions; only the block with the difference in it is looked at id by id.
constexpr int64_t kBlock = 64;

const int64_t* Ids(const tvm::ffi::TensorView& ids) {
  const DLDataType dtype = ids.dtype();
  if (ids.ndim() != 1 || dtype.code != kDLInt || dtype.bits != 64 || ids.device().device_type != kDLCPU ||
      (ids.size(0) > 1 && ids.stride(0) != 1)) {
    TVM_FFI_THROW(ValueError) << "token ids must be one contiguous row of int64 on the CPU";
  }
  return static_cast<const int64_t*>(ids.data_ptr());
}

int64_t CommonPages(tvm::ffi::TensorView a, tvm::ffi::TensorView b, int64_t page_size) {
  const int64_t *x = Ids(a), *y = Ids(b);
  const int64_t length = std::min(a.size(0), b.size(0));
  int64_t at = 0;
  for (; at + kBlock <= length; at += kBlock) {
    int64_t differs = 0;
    for (int64_t i = at; i < at + kBlock; ++i) differs |= x[i] ^ y[i];
    if (differs != 0) break;
  }
  return (std::mismatch(x + at, x + length, y + at).first - x) / page_size;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(common_pages, CommonPages);
