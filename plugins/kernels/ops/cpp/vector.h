// As many floats as one vector register holds, by the vector extension of GCC and Clang: the operators +, *, < and ?: work
// on each element. The width is that of the compiler's target. A wider type would work too, but GCC keeps it in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "values.h"

namespace minisgl {

// Floats in a register, and registers: so many sums can be kept in registers at the same time.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

constexpr int kMultiple = 16;  // the sizes of tensors are multiples of this number with every target
static_assert(kMultiple % kLanes == 0, "loops over kLanes elements have no remainder");

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UIntVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t ShortVec __attribute__((vector_size(2 * kLanes)));

using Lanes = std::make_integer_sequence<int, kLanes>;

template <int... i>
constexpr IntVec LaneNumbers(std::integer_sequence<int, i...>) { return IntVec{i...}; }

constexpr IntVec kLane = LaneNumbers(Lanes());

template <int... i>
inline Vec Broadcast(float x, std::integer_sequence<int, i...>) { return Vec{(static_cast<void>(i), x)...}; }

inline Vec Broadcast(float x) { return Broadcast(x, Lanes()); }

// Returns x, and keeps it in a register. Otherwise GCC may load a value from memory again for each use.
inline Vec InRegister(Vec x) {
#if defined(__x86_64__)
  __asm__("" : "+v"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#endif
  return x;
}

inline Vec Load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Vec Load(const BFloat16* from) {
  ShortVec x;
  std::memcpy(&x, from, sizeof x);
  return (Vec)(__builtin_convertvector(x, IntVec) << 16);
}

inline void Store(Vec x, float* to) { std::memcpy(to, &x, sizeof x); }

// Rounds like FromFloat.
inline void Store(Vec x, BFloat16* to) {
  const UIntVec bits = (UIntVec)x;
  const UIntVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const ShortVec y = __builtin_convertvector(x == x ? rounded : UIntVec{} + 0x7fc0, ShortVec);
  std::memcpy(to, &y, sizeof y);
}

// Returns the elements From::Of(0), From::Of(1), … of a and b: the elements of b are numbered from kLanes on.
template <typename From, int... i>
inline Vec Shuffle(Vec a, Vec b, std::integer_sequence<int, i...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, From::Of(i)...);
#else
  return __builtin_shuffle(a, b, IntVec{From::Of(i)...});
#endif
}

template <typename From>
inline Vec Shuffle(Vec a, Vec b) { return Shuffle<From>(a, b, Lanes()); }

// The first or the second half of every group of 2n elements: those of a, then those of b.
template <int n, bool second>
struct HalfOfGroups {
  static constexpr int Of(int i) { return i / n * 2 * n + i % n + second * n; }
};

// Returns the sums of kLanes vectors: element i is the sum of the elements of x[i]. Each step adds the two halves of every
// group of elements and joins two vectors into one: 16 vectors with one group of 16 elements each become 8 vectors with
// two groups of 8 elements, 4 vectors with four groups of 4 elements, and so on. x is overwritten.
template <int n = kLanes / 2>
inline Vec Sums(Vec* x) {
  for (int i = 0; i < n; ++i) {
    const Vec a = x[2 * i], b = x[2 * i + 1];
    x[i] = Shuffle<HalfOfGroups<n, false>>(a, b) + Shuffle<HalfOfGroups<n, true>>(a, b);
  }
  if constexpr (n > 1) return Sums<n / 2>(x);
  return x[0];
}

// The upper or the lower two quarters of every square of 2n by 2n elements, the second of them from b.
template <int n, bool lower>
struct QuartersOfSquares {
  static constexpr int Of(int i) { return (i & n ? kLanes + i - n : i) + lower * n; }
};

// Transposes kLanes vectors: element j of x[i] becomes element i of x[j]. Each step swaps two of the four quarters of
// every square of 2n by 2n elements.
template <int n = kLanes / 2>
inline void Transpose(Vec* x) {
  for (int i = 0; i < kLanes; ++i) {
    if (i & n) continue;
    const Vec a = x[i], b = x[i + n];
    x[i] = Shuffle<QuartersOfSquares<n, false>>(a, b);
    x[i + n] = Shuffle<QuartersOfSquares<n, true>>(a, b);
  }
  if constexpr (n > 1) Transpose<n / 2>(x);
}

template <int n>
struct OtherHalf {
  static constexpr int Of(int i) { return i ^ n; }
};

// Combines all elements: each step combines every element with the one at distance n.
template <int n = kLanes / 2, typename Op>
float Reduce(Vec x, const Op& op) {
  const Vec y = op(x, Shuffle<OtherHalf<n>>(x, x));
  if constexpr (n > 1) return Reduce<n / 2>(y, op);
  return y[0];
}

inline float Sum(Vec x) {
  return Reduce(x, [](auto a, auto b) { return a + b; });
}

inline float Max(Vec x) {
  return Reduce(x, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x for x <= 0, with a relative error below 2e-7; 0 for x < -87. e^x = 2^n · e^r with |r| <= ln(2) / 2, and a
// polynomial gives e^r (Cephes, expf).
inline Vec Exp(Vec x) {
  const IntVec n = __builtin_convertvector(x * 1.44269504f - 0.5f, IntVec);
  const Vec whole = __builtin_convertvector(n, Vec);
  const Vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;  // ln(2) in two parts
  Vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  return x < -87.0f ? Vec{} : y * (Vec)((n + 127) << 23);
}

inline float Exp(float x) { return Exp(Broadcast(x))[0]; }

}  // namespace minisgl
