// x · weightᵀ + bias on a CPU for few rows of x, with weights in bfloat16 (or float32).
//
// With few rows the time is that of reading the weights from memory. So each weight is read once, for all rows, in the
// order in which it is stored, and is converted to float in a register: a processor needs no bfloat16 instructions for
// that. Sums are in float. minisgl/kernel/linear.py describes the arguments.
#include <vector>

#include "threads.h"
#include "values.h"
#include "vector.h"

namespace {

using namespace minisgl;

constexpr int kBlock = kLanes;  // outputs (rows of the weight) of one work item
constexpr int kStreams = 4;     // rows of the weight that are read at the same time
constexpr int64_t kWorkPerThread = 1 << 16;  // weights that are worth waking another thread

// Computes the products of kRows rows of x with the rows first to first + kStreams of the weight: the elements of
// sums[m][r] add up to x[m] · weight[r]. `size` is a multiple of kLanes.
template <typename T, int kRows>
void Multiply(const float* x, const T* weight, int64_t size, int first, Vec (*sums)[kBlock]) {
  Vec total[kRows][kStreams] = {};
  for (int64_t i = 0; i < size; i += kLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < kStreams; ++r) {
      const Vec w = Load(weight + (first + r) * size + i);
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) total[m][r] += Load(x + m * size + i) * w;
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int r = 0; r < kStreams; ++r) sums[m][first + r] = total[m][r];
  }
}

// Computes the outputs [begin, begin + kBlock) of kRows rows.
template <typename T, int kRows>
void Block(const float* x, const T* weight, const T* bias, int64_t size, int64_t outputs, int64_t begin, T* out) {
  Vec sums[kRows][kBlock];
  for (int r = 0; r < kBlock; r += kStreams) {
    Multiply<T, kRows>(x, weight + begin * size, size, r, sums);
  }
  for (int m = 0; m < kRows; ++m) {
    Vec y = Sums(sums[m]);
    if (bias != nullptr) y += Load(bias + begin);
    for (int r = 0; r < kBlock; ++r) FromFloat(y[r], out + m * outputs + begin + r);
  }
}

template <typename T>
void Run(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& out,
              int64_t threads) {
  const int64_t rows = x.size(0), size = weight.size(1), outputs = weight.size(0);
  std::vector<float> wide(rows * size);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t i = 0; i < size; ++i) wide[m * size + i] = ToFloat(Data<T>(x)[m * x.stride(0) + i]);
  }
  const T* const plus = bias.size(0) > 0 ? Data<T>(bias) : nullptr;
  ParallelFor(outputs / kBlock, std::min(threads, 1 + outputs * size / kWorkPerThread), [&](int64_t block) {
    for (int64_t m = 0; m < rows;) {
      const float* const from = &wide[m * size];
      T* const to = Data<T>(out) + m * outputs;
      const int64_t left = rows - m;
      if (left >= 4) {
        Block<T, 4>(from, Data<T>(weight), plus, size, outputs, block * kBlock, to), m += 4;
      } else if (left >= 2) {
        Block<T, 2>(from, Data<T>(weight), plus, size, outputs, block * kBlock, to), m += 2;
      } else {
        Block<T, 1>(from, Data<T>(weight), plus, size, outputs, block * kBlock, to), m += 1;
      }
    }
  });
}

// x [rows, size], weight [outputs, size], bias [outputs] or empty, out [rows, outputs]. `size` and `outputs` must be
// multiples of 16.
void FewRowsLinear(TensorView x, TensorView weight, TensorView bias, TensorView out, int64_t threads) {
  Check(x, "x", 2, 1), Check(weight, "weight", 2), Check(bias, "bias", 1), Check(out, "out", 2);
  SameType(x, weight, "weight"), SameType(x, bias, "bias"), SameType(x, out, "out");
  if (weight.size(0) % kBlock != 0 || weight.size(1) % kLanes != 0) {
    TVM_FFI_THROW(ValueError) << "the sizes of weight must be multiples of " << kLanes;
  }
  WithElementType(x, "x", [&](auto element) { Run<decltype(element)>(x, weight, bias, out, threads); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(few_rows_linear, FewRowsLinear);
