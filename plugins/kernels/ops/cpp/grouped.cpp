// x · weightᵀ + bias on a CPU, with weights of 4 or 8 bits that have a scale for each group of columns.
//
// The rows of x are quantised first: a block of 32 numbers becomes 32 signed bytes and a scale, as ggml does it in its
// type Q8_0. Then the products of a block are sums of integers, which are exact; only the sums over blocks are in float,
// in the order of the columns. So a result depends neither on the other rows nor on the number of threads.
//
// The weight consists of panels of 16 outputs (`minisgl.plugins.kernels.ops.grouped` describes them), because a register
// then holds the sums of many outputs, and none has to be added up across its elements. Each panel is read once from
// memory, for all rows: it is small enough for the cache of a core.
#include <algorithm>
#include <cmath>
#include <vector>

#include "dot.h"
#include "operations.h"
#include "threads.h"
#include "values.h"

namespace {

using namespace minisgl;

constexpr int64_t kBlock = 32;  // columns
constexpr int64_t kWorkPerThread = 1 << 18;  // multiply-adds that are worth waking another thread
constexpr int kItemsPerThread = 4;  // more than one, so that a thread that is interrupted leaves its work to others
constexpr int kItemsInTeam = 16;  // where it costs less to take an item
constexpr int kRowsAtATime = 4;
constexpr int64_t kAhead = 2048;  // bytes: so far ahead weights are requested from memory

int64_t Ceil(int64_t x, int64_t y) { return (x + y - 1) / y; }

// ---- activations ----

// Rows of x: bytes [rows][size]; for each row and block the scale, the sums of its two halves, and scale · sum.
struct Quantised {
  int64_t size, blocks = size / kBlock;
  std::vector<int8_t> bytes;
  std::vector<float> scales, scaled_sums;
  std::vector<int32_t> sums;

  Quantised(int64_t rows, int64_t size)
      : size(size), bytes(rows * size), scales(rows * blocks), scaled_sums(rows * blocks), sums(rows * blocks * 2) {}

  template <typename T>
  void Row(const T* x, int64_t row) {
    for (int64_t b = 0; b < blocks; ++b, x += kBlock) {
      float values[kBlock], most = 0;
      for (int i = 0; i < kBlock; ++i) values[i] = ToFloat(x[i]);
      for (int i = 0; i < kBlock; ++i) most = std::max(most, std::fabs(values[i]));
      const float inverse = most > 0 ? 127.0f / most : 0.0f, scale = most / 127.0f;
      int8_t* const to = &bytes[row * size + b * kBlock];
      int32_t halves[2] = {0, 0};
      for (int i = 0; i < kBlock; ++i) to[i] = static_cast<int8_t>(std::nearbyint(values[i] * inverse));
      for (int i = 0; i < kBlock; ++i) halves[i / 16] += to[i];
      const int64_t at = row * blocks + b;
      scales[at] = scale, sums[2 * at] = halves[0], sums[2 * at + 1] = halves[1];
      scaled_sums[at] = scale * static_cast<float>(halves[0] + halves[1]);
    }
  }
};

// ---- panels ----

// How a panel stores a block of 32 columns: the numbers, a scale of 16 bits for each group and output, and, if kMins,
// a minimum for each output, which is added to its numbers.
template <int bits, int group, bool mins>
struct Form {
  static constexpr int kBits = bits, kGroup = group;
  static constexpr bool kMins = mins;
  static constexpr int64_t kScales = kOutputs * kBlock * bits / 8;
  static constexpr int64_t kMinimums = kScales + kBlock / group * kOutputs * 2;
  static constexpr int64_t kBytes = kMinimums + (mins ? kOutputs * 2 : 0);
};

// Adds the products of one group of columns, whose integer sums are `sums`, to the totals of kRows rows.
template <int kRows, typename Sums>
inline void AddGroup(const Sums (&sums)[kRows][kParts], const uint8_t* scales, const float* x_scale, int64_t blocks,
                     const int32_t (&minus)[kRows], Floats (&totals)[kRows][kParts]) {
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) {
    const Floats scale = LoadHalf(scales + p * kPartOutputs * 2);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats factor = Multiply(scale, Spread(x_scale[r * blocks]));
      totals[r][p] = MultiplyAdd(factor, ToFloats(Minus(sums[r][p].Done(), minus[r])), totals[r][p]);
    }
  }
}

// Computes 16 outputs of kRows rows of x, which begin at row `row`.
template <typename F, int kRows>
void MultiplyPanel(const Quantised& x, int64_t row, const uint8_t* panel, float* out) {
  Floats totals[kRows][kParts];
  for (auto& total : totals) {
    for (auto& part : total) part = Spread(0.0f);
  }
  const int8_t* bytes = &x.bytes[row * x.size];
  const float* const x_scale = &x.scales[row * x.blocks];
  const float* const scaled_sums = &x.scaled_sums[row * x.blocks];
  const int32_t* const x_sums = &x.sums[row * x.blocks * 2];
  for (int64_t b = 0; b < x.blocks; ++b, panel += F::kBytes, bytes += kBlock) {
    for (int64_t i = 0; i < F::kBytes; i += 64) __builtin_prefetch(panel + kAhead + i);
    if constexpr (F::kBits == 4) {
      Unsigned4 sums[kRows][kParts];
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) {  // a byte has column 4g + k in its lower half, and column 16 + 4g + k in the other
        Bytes low[kParts], high[kParts];
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) {
          const Bytes both = LoadBytes(panel + (g * kParts + p) * kPartBytes);
          low[p] = LowHalves(both), high[p] = HighHalves(both);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const Bytes first = Spread(bytes + r * x.size + 4 * g), second = Spread(bytes + r * x.size + 16 + 4 * g);
#pragma GCC unroll 4
          for (int p = 0; p < kParts; ++p) sums[r][p].Add(low[p], first);
#pragma GCC unroll 4
          for (int p = 0; p < kParts; ++p) sums[r][p].Add(high[p], second);
        }
      }
      int32_t minus[kRows];
      for (int r = 0; r < kRows; ++r) {
        const int32_t* const halves = &x_sums[(r * x.blocks + b) * 2];
        minus[r] = F::kMins ? 0 : 8 * (halves[0] + halves[1]);
      }
      AddGroup<kRows>(sums, panel + F::kScales, x_scale + b, x.blocks, minus, totals);
    } else {
      for (int group = 0; group < kBlock / F::kGroup; ++group) {
        Signed8 sums[kRows][kParts];
        constexpr int steps = F::kGroup / 4;
#pragma GCC unroll 8
        for (int g = 0; g < steps; ++g) {
          const int at = group * steps + g;
          typename Signed8::Weights w[kParts];
#pragma GCC unroll 4
          for (int p = 0; p < kParts; ++p) w[p] = Signed8::Prepare(LoadBytes(panel + (at * kParts + p) * kPartBytes));
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const Bytes four = Spread(bytes + r * x.size + 4 * at);
#pragma GCC unroll 4
            for (int p = 0; p < kParts; ++p) sums[r][p].Add(w[p], four);
          }
        }
        int32_t minus[kRows];
        for (int r = 0; r < kRows; ++r) {
          const int32_t* const halves = &x_sums[(r * x.blocks + b) * 2];
          minus[r] = Signed8::kOffset * (F::kGroup == kBlock ? halves[0] + halves[1] : halves[group]);
        }
        AddGroup<kRows>(sums, panel + F::kScales + group * kOutputs * 2, x_scale + b, x.blocks, minus, totals);
      }
    }
    if constexpr (F::kMins) {
      for (int p = 0; p < kParts; ++p) {
        const Floats least = LoadHalf(panel + F::kMinimums + p * kPartOutputs * 2);
        for (int r = 0; r < kRows; ++r) {
          totals[r][p] = MultiplyAdd(least, Spread(scaled_sums[r * x.blocks + b]), totals[r][p]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kParts; ++p) StoreFloats(totals[r][p], out + r * kOutputs + p * kPartOutputs);
  }
}

template <typename T, typename F>
void Product(const TensorView& x, const TensorView& panels, const TensorView& bias, const TensorView& out,
             int64_t threads) {
  const int64_t rows = x.size(0), size = x.size(1), outputs = out.size(1), count = panels.size(0);
  threads = std::min(threads, 1 + rows * outputs * size / kWorkPerThread);
  Quantised quantised(rows, size);
  ParallelFor(rows, rows * size < kWorkPerThread ? 1 : threads, [&](int64_t r) {
    quantised.Row(Data<T>(x) + r * x.stride(0), r);
  });
  const T* const plus = bias.size(0) > 0 ? Data<T>(bias) : nullptr;
  const int64_t item = threads <= 1 ? count : Ceil(count, threads * (InTeam() ? kItemsInTeam : kItemsPerThread));
  ParallelFor(Ceil(count, item), threads, [&](int64_t i) {
    for (int64_t panel = i * item; panel < std::min(count, (i + 1) * item); ++panel) {
      const uint8_t* const from = Data<uint8_t>(panels) + panel * quantised.blocks * F::kBytes;
      const int64_t begin = panel * kOutputs, valid = std::min<int64_t>(kOutputs, outputs - begin);
      for (int64_t row = 0; row < rows;) {
        float sums[kRowsAtATime * kOutputs];
        const int64_t left = rows - row;
        const int64_t now = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (now == 4) {
          MultiplyPanel<F, 4>(quantised, row, from, sums);
        } else if (now == 2) {
          MultiplyPanel<F, 2>(quantised, row, from, sums);
        } else {
          MultiplyPanel<F, 1>(quantised, row, from, sums);
        }
        for (int64_t r = 0; r < now; ++r, ++row) {
          T* const to = Data<T>(out) + row * out.stride(0) + begin;
          for (int64_t j = 0; j < valid; ++j) {
            FromFloat(sums[r * kOutputs + j] + (plus != nullptr ? ToFloat(plus[begin + j]) : 0.0f), to + j);
          }
        }
      }
    }
  });
}

}  // namespace

namespace minisgl {

// x [rows, size], panels [panels, size / 32, bytes] uint8, bias [outputs] or empty, out [rows, outputs]. `bits`, `group`
// and `mins` are the panels' form.
void GroupedLinear(TensorView x, TensorView panels, TensorView bias, TensorView out, int64_t bits, int64_t group,
                   bool mins, int64_t threads) {
  Check(x, "x", 2, 1), Check(panels, "panels", 3), Check(bias, "bias", 1), Check(out, "out", 2, 1);
  SameType(x, bias, "bias"), SameType(x, out, "out");
  if (x.size(1) != panels.size(1) * kBlock || out.size(0) != x.size(0) ||
      panels.size(0) != Ceil(out.size(1), kOutputs)) {
    TVM_FFI_THROW(ValueError) << "the sizes of x, panels and out do not fit together";
  }
  WithElementType(x, "x", [&](auto element) {
    using T = decltype(element);
    const auto product = [&](auto form) {
      using F = decltype(form);
      if (panels.size(2) != F::kBytes) TVM_FFI_THROW(ValueError) << "the panels have another form";
      Product<T, F>(x, panels, bias, out, threads);
    };
    if (bits == 4 && group == 32 && mins) return product(Form<4, 32, true>{});
    if (bits == 4 && group == 32) return product(Form<4, 32, false>{});
    if (bits == 8 && group == 32 && !mins) return product(Form<8, 32, false>{});
    if (bits == 8 && group == 16 && !mins) return product(Form<8, 16, false>{});
    TVM_FFI_THROW(ValueError) << "there is no product for this form";
  });
}

}  // namespace minisgl

namespace {

tvm::ffi::String DotTarget() { return kDotTarget; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_linear, GroupedLinear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dot_target, DotTarget);
