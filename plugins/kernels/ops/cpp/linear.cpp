// x · weightᵀ + bias on a CPU, with weights in bfloat16 or float32. Sums are in float.
//
// There are two kernels, and neither needs bfloat16 instructions: weights are converted to float in registers.
// - For few rows the time is that of reading the weights from memory. So each weight is read once, for all rows, in the
//   order in which it is stored, and is requested from memory some time before it is needed.
// - For many rows the time is that of the multiply-adds. So the weights are first put into panels: kPanel outputs side by
//   side, one input after another. Then one load of a panel serves kMaxRows rows, whose sums stay in registers (Goto and
//   van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008). Panels of a large matrix are made when they
//   are needed and stay in the cache of the core; those of a small matrix may be made once and kept.
// The order of a sum does not depend on the other rows or on the number of threads.
#include <memory>
#include <utility>
#include <vector>

#include "operations.h"
#include "threads.h"
#include "values.h"
#include "vector.h"

namespace {

using namespace minisgl;

constexpr int kBlock = kLanes;  // outputs (rows of the weight) that the kernel for few rows computes at a time
constexpr int64_t kWorkPerThread = 1 << 16;  // multiply-adds that are worth waking another thread
constexpr int kItemsPerThread = 4;  // more than one, so that a thread that is interrupted leaves its work to others
constexpr int kItemsInTeam = 16;  // where it costs less to take an item

// The sums of kMaxRows rows and kVectors * kLanes outputs, one load of a panel, and an element of x fit in the registers.
constexpr int kVectors = 2, kMaxRows = (kRegisters - 4) / kVectors;
constexpr int kPanel = kVectors * kLanes;
constexpr int kRowsAtATime = 20 * kMaxRows;  // of x, packed for one pass over the weights

int64_t Ceil(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Calls body(i) for each i in [0, parts), on several threads. A thread takes several neighbouring parts at a time, because
// during each part it requests the weights of the next one from memory.
template <typename Body>
void ForEach(int64_t parts, int64_t threads, const Body& body) {
  const int64_t item = threads <= 1 ? parts : Ceil(parts, threads * (InTeam() ? kItemsInTeam : kItemsPerThread));
  ParallelFor(item == 0 ? 0 : Ceil(parts, item), threads, [&](int64_t i) {
    for (int64_t part = i * item; part < std::min(parts, (i + 1) * item); ++part) body(part);
  });
}

// ---- few rows ----

// Rows of the weight that are read at the same time: with kRows rows of x, their sums take half of the registers at most.
template <int kRows>
constexpr int kStreams = std::min(4, kRegisters / 2 / kRows);

// Computes the products of kRows rows of x with kStreams rows of the weight, which begin at `weight`: the elements of
// sums[m][r] add up to x[m] · weight[r]. `size` is a multiple of kLanes.
template <typename T, int kRows>
void Multiply(const float* x, const T* weight, int64_t size, Vec (*sums)[kBlock]) {
  constexpr int streams = kStreams<kRows>;
  Vec total[kRows][streams] = {};
  for (int64_t i = 0; i < size; i += kMultiple) {
    // Request the next rows; behind the last row this has no effect.
    for (int r = 0; r < streams; ++r) __builtin_prefetch(weight + (streams + r) * size + i);
#pragma GCC unroll 4
    for (int64_t j = i; j < i + kMultiple; j += kLanes) {
      Vec value[kRows];
#pragma GCC unroll 4
      for (int m = 0; m < kRows; ++m) value[m] = InRegister(Load(x + m * size + j));
#pragma GCC unroll 4
      for (int r = 0; r < streams; ++r) {
        const Vec w = InRegister(Load(weight + r * size + j));
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) total[m][r] += value[m] * w;
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int r = 0; r < streams; ++r) sums[m][r] = total[m][r];
  }
}

// Computes the outputs [begin, begin + kBlock) of kRows rows.
template <typename T, int kRows>
void Block(const float* x, const T* weight, const T* bias, int64_t size, int64_t outputs, int64_t begin, T* out) {
  Vec sums[kRows][kBlock];
  for (int r = 0; r < kBlock; r += kStreams<kRows>) {
    Multiply<T, kRows>(x, weight + (begin + r) * size, size, reinterpret_cast<Vec(*)[kBlock]>(&sums[0][r]));
  }
  for (int m = 0; m < kRows; ++m) {
    Vec y = Sums(sums[m]);
    if (bias != nullptr) y += Load(bias + begin);
    Store(y, out + m * outputs + begin);
  }
}

template <typename T>
void FewRows(const TensorView& x, const TensorView& weight, const T* bias, const TensorView& out, int64_t threads) {
  const int64_t rows = x.size(0), size = weight.size(1), outputs = weight.size(0);
  std::vector<float> wide(rows * size);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t i = 0; i < size; i += kLanes) Store(Load(Data<T>(x) + m * x.stride(0) + i), &wide[m * size + i]);
  }
  ForEach(outputs / kBlock, std::min(threads, 1 + outputs * size / kWorkPerThread), [&](int64_t block) {
    for (int64_t m = 0; m < rows;) {
      const float* const from = &wide[m * size];
      T* const to = Data<T>(out) + m * outputs;
      const int64_t left = rows - m;
      if (left >= 4) {
        Block<T, 4>(from, Data<T>(weight), bias, size, outputs, block * kBlock, to), m += 4;
      } else if (left >= 2) {
        Block<T, 2>(from, Data<T>(weight), bias, size, outputs, block * kBlock, to), m += 2;
      } else {
        Block<T, 1>(from, Data<T>(weight), bias, size, outputs, block * kBlock, to), m += 1;
      }
    }
  });
}

// ---- many rows ----

// Writes the outputs [begin, begin + kPanel) of the weight to `panel` [size][kPanel]; those past the last one are 0.
template <typename T>
void MakePanel(const T* weight, int64_t size, int64_t outputs, int64_t begin, float* panel) {
  for (int v = 0; v < kVectors; ++v) {
    const int64_t first = begin + v * kLanes;
    for (int64_t i = 0; i < size; i += kLanes) {
      Vec square[kLanes] = {};
      if (first < outputs) {
        for (int r = 0; r < kLanes; ++r) {
          const T* const from = weight + (first + r) * size + i;
          __builtin_prefetch(from + 128 / sizeof(T));
          square[r] = Load(from);
        }
        Transpose(square);
      }
      for (int k = 0; k < kLanes; ++k) Store(square[k], panel + (i + k) * kPanel + v * kLanes);
    }
  }
}

// Computes kRows rows: x is [size][kRows], sums is [kRows][kPanel].
template <int kRows>
void MultiplyPanel(const float* x, const float* panel, int64_t size, float* sums) {
  Vec total[kRows][kVectors] = {};
  for (int64_t i = 0; i < size; ++i, x += kRows, panel += kPanel) {
    Vec w[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      w[v] = InRegister(Load(panel + v * kLanes));
      // Request the next panel, if panels are kept: each 64 bytes once.
      if (v * kLanes % 16 == 0) __builtin_prefetch(panel + size * kPanel + v * kLanes, 0, 2);
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Vec value = Broadcast(x[m]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) total[m][v] += value * w[v];
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < kVectors; ++v) Store(total[m][v], sums + m * kPanel + v * kLanes);
  }
}

template <int... kRows>
void MultiplyRows(int rows, const float* x, const float* panel, int64_t size, float* sums,
                  std::integer_sequence<int, kRows...>) {
  using Function = void (*)(const float*, const float*, int64_t, float*);
  static constexpr Function functions[] = {MultiplyPanel<kRows + 1>...};
  functions[rows - 1](x, panel, size, sums);
}

// Rows of x, divided into blocks of kMaxRows rows; the last one may be smaller.
struct RowBlocks {
  int64_t rows, count = Ceil(rows, kMaxRows);
  int64_t Begin(int64_t i) const { return i * kMaxRows; }
  int Size(int64_t i) const { return static_cast<int>(std::min<int64_t>(kMaxRows, rows - Begin(i))); }
};

// `panel(i, buffer)` returns panel i; it may write the panel to `buffer`, which has `size` * kPanel floats.
template <typename T, typename Panel>
void ManyRows(const TensorView& x, int64_t outputs, const T* bias, const TensorView& out, int64_t threads,
              const Panel& panel) {
  const int64_t size = x.size(1), all_rows = x.size(0);
  const std::unique_ptr<float[]> packed(new float[std::min<int64_t>(all_rows, kRowsAtATime) * size]);
  for (int64_t done = 0; done < all_rows; done += kRowsAtATime) {
    const RowBlocks blocks{std::min<int64_t>(all_rows - done, kRowsAtATime)};
    const int64_t useful = std::min(threads, 1 + blocks.rows * outputs * size / kWorkPerThread);
    ParallelFor(blocks.count, blocks.rows * size < kWorkPerThread ? 1 : useful, [&](int64_t b) {
      const int64_t begin = blocks.Begin(b);
      const int rows = blocks.Size(b);
      float* const to = &packed[begin * size];
      for (int m = 0; m < rows; ++m) {
        const T* const from = Data<T>(x) + (done + begin + m) * x.stride(0);
        for (int64_t i = 0; i < size; ++i) to[i * rows + m] = ToFloat(from[i]);
      }
    });
    ForEach(Ceil(outputs, kPanel), useful, [&](int64_t i) {
      static thread_local std::vector<float> buffer;
      buffer.resize(std::max<size_t>(buffer.size(), size * kPanel));
      const float* const weights = panel(i, buffer.data());
      const int64_t begin = i * kPanel;
      const int valid = static_cast<int>(std::min<int64_t>(kVectors, (outputs - begin) / kLanes));
      for (int64_t b = 0; b < blocks.count; ++b) {
        float sums[kMaxRows * kPanel];
        const int64_t row = blocks.Begin(b);
        const int rows = blocks.Size(b);
        MultiplyRows(rows, &packed[row * size], weights, size, sums, std::make_integer_sequence<int, kMaxRows>());
        for (int m = 0; m < rows; ++m) {
          T* const to = Data<T>(out) + (done + row + m) * outputs + begin;
          for (int v = 0; v < valid; ++v) {
            const Vec plus = bias != nullptr ? Load(bias + begin + v * kLanes) : Vec{};
            Store(Load(sums + m * kPanel + v * kLanes) + plus, to + v * kLanes);
          }
        }
      }
    });
  }
}

// ---- exported functions ----

void CheckArguments(const TensorView& x, const TensorView& bias, const TensorView& out, int64_t size, int64_t outputs) {
  Check(x, "x", 2, 1), Check(bias, "bias", 1), Check(out, "out", 2);
  SameType(x, bias, "bias"), SameType(x, out, "out");
  if (outputs % kMultiple != 0 || size % kMultiple != 0) {
    TVM_FFI_THROW(ValueError) << "the sizes of weight must be multiples of " << kMultiple;
  }
  if (x.size(1) != size || out.size(1) != outputs || out.size(0) != x.size(0)) {
    TVM_FFI_THROW(ValueError) << "the sizes of x, weight and out do not fit together";
  }
}

template <typename T>
const T* BiasOrNull(const TensorView& bias) {
  return bias.size(0) > 0 ? Data<T>(bias) : nullptr;
}

}  // namespace

namespace minisgl {

// x [rows, size], weight [outputs, size], bias [outputs] or empty, out [rows, outputs]. `size` and `outputs` must be
// multiples of 16. At most `few` rows are computed by the kernel for few rows.
void Linear(TensorView x, TensorView weight, TensorView bias, TensorView out, int64_t few, int64_t threads) {
  Check(weight, "weight", 2), SameType(x, weight, "weight");
  const int64_t outputs = weight.size(0), size = weight.size(1);
  CheckArguments(x, bias, out, size, outputs);
  WithElementType(x, "x", [&](auto element) {
    using T = decltype(element);
    if (x.size(0) <= few) return FewRows<T>(x, weight, BiasOrNull<T>(bias), out, threads);
    ManyRows<T>(x, outputs, BiasOrNull<T>(bias), out, threads, [&](int64_t i, float* buffer) {
      MakePanel(Data<T>(weight), size, outputs, i * kPanel, buffer);
      return buffer;
    });
  });
}

}  // namespace minisgl

namespace {

// The instructions that the compiler may use, as plugins/kernels/ops/cpp/linear.py names them.
tvm::ffi::String Target() {
#if defined(__AVX512BF16__)
  return "avx512_bf16";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX__)
  return "avx";
#else
  return "other";
#endif
}

int64_t PanelOutputs() { return kPanel; }

// weight [outputs, size] float32, panels [panels, size, kPanel].
void Pack(TensorView weight, TensorView panels) {
  Check(weight, "weight", 2), Check(panels, "panels", 3), SameType(weight, panels, "panels");
  if (!IsFloat32(weight)) TVM_FFI_THROW(ValueError) << "weight must be float32";
  const int64_t outputs = weight.size(0), size = weight.size(1);
  for (int64_t i = 0; i < panels.size(0); ++i) {
    MakePanel(Data<float>(weight), size, outputs, i * kPanel, Data<float>(panels) + i * size * kPanel);
  }
}

}  // namespace

namespace minisgl {

// Like Linear, with the panels that Pack wrote.
void PackedLinear(TensorView x, TensorView panels, TensorView bias, TensorView out, int64_t threads) {
  Check(panels, "panels", 3), SameType(x, panels, "panels");
  const int64_t size = panels.size(1);
  CheckArguments(x, bias, out, size, out.size(1));
  if (!IsFloat32(x)) TVM_FFI_THROW(ValueError) << "x must be float32";
  if (panels.size(2) != kPanel || panels.size(0) != Ceil(out.size(1), kPanel)) {
    TVM_FFI_THROW(ValueError) << "panels must be made by pack() for " << out.size(1) << " outputs";
  }
  ManyRows<float>(x, out.size(1), BiasOrNull<float>(bias), out, threads,
                  [&](int64_t i, float*) { return Data<float>(panels) + i * size * kPanel; });
}

}  // namespace minisgl

TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, Linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(target, Target);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(panel_outputs, PanelOutputs);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack, Pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_linear, PackedLinear);
