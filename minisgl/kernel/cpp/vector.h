// Sixteen floats at a time, by the vector extension of GCC and Clang: the operators +, *, < and ?: work on each element.
// The compiler translates them to the vector instructions of the processor: one of 512 bits, two of 256, or four of 128.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "values.h"

namespace minisgl {

constexpr int kLanes = 16;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UIntVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t ShortVec __attribute__((vector_size(2 * kLanes)));

constexpr IntVec kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline Vec Broadcast(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

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

#ifdef __clang__
#define MINISGL_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MINISGL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

// Returns the sums of sixteen vectors: element i is the sum of the elements of x[i]. Each step adds the two halves of
// every group of elements and joins two vectors into one: 16 vectors with one group of 16 elements each become 8 vectors
// with two groups of 8 elements, 4 vectors with four groups of 4 elements, and so on. x is overwritten.
inline Vec Sums(Vec* x) {
#define MINISGL_STEP(n, low, high) \
  for (int i = 0; i < n; ++i) x[i] = MINISGL_SHUFFLE(x[2 * i], x[2 * i + 1], MINISGL_UNPACK low) + \
                                     MINISGL_SHUFFLE(x[2 * i], x[2 * i + 1], MINISGL_UNPACK high)
#define MINISGL_UNPACK(...) __VA_ARGS__
  MINISGL_STEP(8, (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
               (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  MINISGL_STEP(4, (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
               (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  MINISGL_STEP(2, (0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
               (2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31));
  MINISGL_STEP(1, (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
               (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
#undef MINISGL_STEP
#undef MINISGL_UNPACK
  return x[0];
}

// Transposes sixteen vectors: element j of x[i] becomes element i of x[j]. Each step swaps two of the four quarters of
// every square of 2n by 2n elements.
inline void Transpose(Vec* x) {
#define MINISGL_STEP(n, low, high)                                                \
  for (int i = 0; i < kLanes; ++i) {                                              \
    if (i & n) continue;                                                          \
    const Vec a = x[i], b = x[i + n];                                             \
    x[i] = MINISGL_SHUFFLE(a, b, MINISGL_UNPACK low);                             \
    x[i + n] = MINISGL_SHUFFLE(a, b, MINISGL_UNPACK high);                        \
  }
#define MINISGL_UNPACK(...) __VA_ARGS__
  MINISGL_STEP(8, (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
               (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  MINISGL_STEP(4, (0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
               (4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
  MINISGL_STEP(2, (0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
               (2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  MINISGL_STEP(1, (0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
               (1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
#undef MINISGL_STEP
#undef MINISGL_UNPACK
}

// Combines all elements by halving: 16 to 8 to 4 values, then the last four one by one.
template <typename Op>
float Reduce(Vec x, const Op& op) {
  typedef float Half __attribute__((vector_size(2 * kLanes)));
  typedef float Quarter __attribute__((vector_size(kLanes)));
  Half halves[2];
  std::memcpy(halves, &x, sizeof x);
  const Half half = op(halves[0], halves[1]);
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof half);
  const Quarter last = op(quarters[0], quarters[1]);
  return op(op(last[0], last[1]), op(last[2], last[3]));
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
