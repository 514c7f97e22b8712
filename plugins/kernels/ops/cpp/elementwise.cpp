// RMSNorm with the residual's addition, and the gated SiLU, on a CPU: each is one pass over its tensors.
//
// plugins/kernels/ops/norm.py and plugins/kernels/ops/activation.py describe the functions. All are computed in float; a sum with
// the residual is rounded to the element type before it is normalised, because the next layers see it rounded too.
#include <cmath>

#include "operations.h"
#include "threads.h"
#include "values.h"
#include "vector.h"

namespace {

using namespace minisgl;

constexpr int64_t kWorkPerThread = 1 << 15;  // elements that are worth waking another thread
constexpr int64_t kRowsPerItem = 8;

// Calls body(row) for each row, on several threads if there are many elements.
template <typename Body>
void ForRows(int64_t rows, int64_t size, int64_t threads, const Body& body) {
  ParallelFor((rows + kRowsPerItem - 1) / kRowsPerItem, std::min(threads, 1 + rows * size / kWorkPerThread),
              [&](int64_t item) {
                const int64_t end = std::min(rows, (item + 1) * kRowsPerItem);
                for (int64_t row = item * kRowsPerItem; row < end; ++row) body(row);
              });
}

template <typename T>
T* Row(const TensorView& x, int64_t row) {
  return Data<T>(x) + row * x.stride(0);
}

void CheckSize(const TensorView& x, const TensorView& y, int64_t size, const char* name) {
  if (y.size(0) != x.size(0) || y.size(1) != size) TVM_FFI_THROW(ValueError) << name << " has another shape than x";
  if (size % kMultiple != 0) TVM_FFI_THROW(ValueError) << "the last dimension must be a multiple of " << kMultiple;
}

}  // namespace

namespace minisgl {

// x [rows, size] becomes x + residual, unless the residual has no rows; out becomes its norm.
void AddRmsNorm(TensorView x, TensorView residual, TensorView weight, TensorView out, double eps, int64_t threads) {
  Check(x, "x", 2, 1), Check(residual, "residual", 2, 1), Check(weight, "weight", 1), Check(out, "out", 2, 1);
  SameType(x, residual, "residual"), SameType(x, weight, "weight"), SameType(x, out, "out");
  const int64_t rows = x.size(0), size = x.size(1);
  const bool add = residual.size(0) > 0;
  CheckSize(x, out, size, "out");
  if (add) CheckSize(x, residual, size, "residual");
  if (weight.size(0) != size) TVM_FFI_THROW(ValueError) << "weight has another size than the rows of x";
  WithElementType(x, "x", [&](auto element) {
    using T = decltype(element);
    const T* const weights = Data<T>(weight);
    ForRows(rows, size, threads, [&](int64_t row) {
      T *const from = Row<T>(x, row), *const to = Row<T>(out, row);
      const T* const other = add ? Row<T>(residual, row) : nullptr;
      Vec squares = {};
      for (int64_t i = 0; i < size; i += kLanes) {
        if (add) Store(Load(from + i) + Load(other + i), from + i);
        const Vec value = Load(from + i);
        squares += value * value;
      }
      const float scale = 1 / std::sqrt(Sum(squares) / size + static_cast<float>(eps));
      for (int64_t i = 0; i < size; i += kLanes) Store(Load(from + i) * scale * Load(weights + i), to + i);
    });
  });
}

// x [rows, size] becomes x + y.
void Add(TensorView x, TensorView y, int64_t threads) {
  Check(x, "x", 2, 1), Check(y, "y", 2, 1), SameType(x, y, "y");
  const int64_t rows = x.size(0), size = x.size(1);
  CheckSize(x, y, size, "y");
  WithElementType(x, "x", [&](auto element) {
    using T = decltype(element);
    ForRows(rows, size, threads, [&](int64_t row) {
      T* const to = Row<T>(x, row);
      const T* const other = Row<T>(y, row);
      for (int64_t i = 0; i < size; i += kLanes) Store(Load(to + i) + Load(other + i), to + i);
    });
  });
}

}  // namespace minisgl

namespace {

// e^-|x| never overflows: 1 / (1 + e^-x) is e^x / (1 + e^x) for negative x.
Vec Sigmoid(Vec x) {
  const Vec e = Exp(x < 0 ? x : -x);
  return (x < 0 ? e : Broadcast(1)) / (e + 1);
}

}  // namespace

namespace minisgl {

// x [rows, 2 * size], gate before up; out [rows, size].
void SiluAndMul(TensorView x, TensorView out, int64_t threads) {
  Check(x, "x", 2, 1), Check(out, "out", 2, 1), SameType(x, out, "out");
  const int64_t rows = x.size(0), size = out.size(1);
  CheckSize(x, out, size, "out");
  if (x.size(1) != 2 * size) TVM_FFI_THROW(ValueError) << "x must have twice as many columns as out";
  WithElementType(x, "x", [&](auto element) {
    using T = decltype(element);
    ForRows(rows, size, threads, [&](int64_t row) {
      const T* const from = Row<T>(x, row);
      T* const to = Row<T>(out, row);
      for (int64_t i = 0; i < size; i += kLanes) {
        const Vec gate = Load(from + i);
        Store(gate * Sigmoid(gate) * Load(from + size + i), to + i);
      }
    });
  });
}

}  // namespace minisgl

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_rms_norm, AddRmsNorm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, SiluAndMul);
