// Sums of products of small integers, for 16 outputs at a time: what `grouped.cpp` needs of a processor's instructions.
//
// A register of weights holds four neighbouring columns of several outputs; `Spread` repeats the same four columns of x.
// The sums are exact integers, so they are the same with all instruction sets. There are five variants:
// - AVX-512 VNNI and AVX-VNNI multiply unsigned with signed bytes and add four products to 32 bits in one instruction.
// - AVX2 adds two products to 16 bits (`maddubs`): weights of 4 bits stay far below the limit of 16 bits for 8 such
//   sums. Of weights of 8 bits the absolute value is multiplied with x, whose sign is changed where the weight is negative.
// - ARM's dot product instructions multiply signed with signed bytes.
// - Everywhere else, plain C++.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace minisgl {

constexpr int kOutputs = 16;  // of a panel

inline int32_t FourBytes(const int8_t* from) {
  int32_t x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr const char* kDotTarget = "avx512_vnni";
constexpr int kParts = 1;  // registers for 16 outputs
using Bytes = __m512i;
using Ints = __m512i;
using Floats = __m512;

inline Bytes LoadBytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Bytes LowHalves(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes HighHalves(Bytes x) { return LowHalves(_mm512_srli_epi16(x, 4)); }
inline Bytes Spread(const int8_t* x) { return _mm512_set1_epi32(FourBytes(x)); }
inline Floats LoadHalf(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Floats Spread(float x) { return _mm512_set1_ps(x); }
inline Floats Multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats MultiplyAdd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats ToFloats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints Minus(Ints x, int32_t y) { return _mm512_sub_epi32(x, _mm512_set1_epi32(y)); }
inline void StoreFloats(Floats x, float* to) { _mm512_storeu_ps(to, x); }

#define MINISGL_VNNI
inline Ints Zeros() { return _mm512_setzero_si512(); }
inline Ints AddDot(Ints sum, Bytes w, Bytes x) { return _mm512_dpbusd_epi32(sum, w, x); }
inline Bytes FlipSigns(Bytes w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }

#elif defined(__AVX2__)
constexpr int kParts = 2;
using Bytes = __m256i;
using Ints = __m256i;
using Floats = __m256;

inline Bytes LoadBytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Bytes LowHalves(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes HighHalves(Bytes x) { return LowHalves(_mm256_srli_epi16(x, 4)); }
inline Bytes Spread(const int8_t* x) { return _mm256_set1_epi32(FourBytes(x)); }
inline Floats LoadHalf(const uint8_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Floats Spread(float x) { return _mm256_set1_ps(x); }
inline Floats Multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats MultiplyAdd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats ToFloats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Ints Minus(Ints x, int32_t y) { return _mm256_sub_epi32(x, _mm256_set1_epi32(y)); }
inline void StoreFloats(Floats x, float* to) { _mm256_storeu_ps(to, x); }

#if defined(__AVXVNNI__)
#define MINISGL_VNNI
constexpr const char* kDotTarget = "avx_vnni";
inline Ints Zeros() { return _mm256_setzero_si256(); }
inline Ints AddDot(Ints sum, Bytes w, Bytes x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
inline Bytes FlipSigns(Bytes w) { return _mm256_xor_si256(w, _mm256_set1_epi8(-128)); }
#else
constexpr const char* kDotTarget = "avx2";
struct Unsigned4 {
  __m256i sum = _mm256_setzero_si256();  // 16 sums of 16 bits: at most 8 · 2 · 15 · 127
  void Add(Bytes w, Bytes x) { sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x)); }
  Ints Done() const { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
};
struct Signed8 {
  static constexpr int kOffset = 0;
  struct Weights { Bytes w, absolute; };
  static Weights Prepare(Bytes w) { return {w, _mm256_abs_epi8(w)}; }
  Ints sum = _mm256_setzero_si256();
  void Add(Weights w, Bytes x) {
    const __m256i pairs = _mm256_maddubs_epi16(w.absolute, _mm256_sign_epi8(x, w.w));  // at most 2 · 128 · 127
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  Ints Done() const { return sum; }
};
#endif

#elif defined(__ARM_FEATURE_DOTPROD)
constexpr const char* kDotTarget = "neon_dotprod";
constexpr int kParts = 4;
using Bytes = uint8x16_t;
using Ints = int32x4_t;
using Floats = float32x4_t;

inline Bytes LoadBytes(const uint8_t* from) { return vld1q_u8(from); }
inline Bytes LowHalves(Bytes x) { return vandq_u8(x, vdupq_n_u8(15)); }
inline Bytes HighHalves(Bytes x) { return vshrq_n_u8(x, 4); }
inline Bytes Spread(const int8_t* x) { return vreinterpretq_u8_s32(vdupq_n_s32(FourBytes(x))); }
inline Floats LoadHalf(const uint8_t* from) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
}
inline Floats Spread(float x) { return vdupq_n_f32(x); }
inline Floats Multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats MultiplyAdd(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats ToFloats(Ints x) { return vcvtq_f32_s32(x); }
inline Ints Minus(Ints x, int32_t y) { return vsubq_s32(x, vdupq_n_s32(y)); }
inline void StoreFloats(Floats x, float* to) { vst1q_f32(to, x); }

struct SignedDot {
  static constexpr int kOffset = 0;
  struct Weights { Bytes w; };
  static Weights Prepare(Bytes w) { return {w}; }
  Ints sum = vdupq_n_s32(0);
  void Add(Bytes w, Bytes x) { sum = vdotq_s32(sum, vreinterpretq_s8_u8(w), vreinterpretq_s8_u8(x)); }
  void Add(Weights w, Bytes x) { Add(w.w, x); }
  Ints Done() const { return sum; }
};
using Unsigned4 = SignedDot;  // 0 to 15 are the same as signed bytes
using Signed8 = SignedDot;

#else
constexpr const char* kDotTarget = "plain";
constexpr int kParts = 4;
struct Bytes { int8_t of[16]; };
struct Ints { int32_t of[4]; };
struct Floats { float of[4]; };

template <typename To, typename F>
inline To ForEachElement(const F& f) {
  To y;
  for (int i = 0; i < static_cast<int>(sizeof y.of / sizeof y.of[0]); ++i) y.of[i] = f(i);
  return y;
}
inline float HalfToFloat(uint16_t half) {
  const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
  uint32_t bits = (exponent + 112) << 23 | fraction << 13;
  if (exponent == 31) bits = 0x7f800000 | fraction << 13;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  if (exponent == 0) x = fraction * 5.9604644775390625e-8f;
  return half >> 15 ? -x : x;
}

inline Bytes LoadBytes(const uint8_t* from) {
  Bytes x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Bytes LowHalves(Bytes x) { return ForEachElement<Bytes>([&](int i) { return x.of[i] & 15; }); }
inline Bytes HighHalves(Bytes x) { return ForEachElement<Bytes>([&](int i) { return x.of[i] >> 4 & 15; }); }
inline Bytes Spread(const int8_t* x) { return ForEachElement<Bytes>([&](int i) { return x[i % 4]; }); }
inline Floats LoadHalf(const uint8_t* from) {
  uint16_t half[4];
  std::memcpy(half, from, sizeof half);
  return ForEachElement<Floats>([&](int i) { return HalfToFloat(half[i]); });
}
inline Floats Spread(float x) { return {{x, x, x, x}}; }
inline Floats Multiply(Floats a, Floats b) { return ForEachElement<Floats>([&](int i) { return a.of[i] * b.of[i]; }); }
inline Floats MultiplyAdd(Floats a, Floats b, Floats c) {
  return ForEachElement<Floats>([&](int i) { return a.of[i] * b.of[i] + c.of[i]; });
}
inline Floats ToFloats(Ints x) { return ForEachElement<Floats>([&](int i) { return static_cast<float>(x.of[i]); }); }
inline Ints Minus(Ints x, int32_t y) { return ForEachElement<Ints>([&](int i) { return x.of[i] - y; }); }
inline void StoreFloats(Floats x, float* to) { std::memcpy(to, &x, sizeof x); }

struct PlainDot {
  static constexpr int kOffset = 0;
  struct Weights { Bytes w; };
  static Weights Prepare(Bytes w) { return {w}; }
  Ints sum{};
  void Add(Bytes w, Bytes x) {
    for (int i = 0; i < 16; ++i) sum.of[i / 4] += w.of[i] * x.of[i];
  }
  void Add(Weights w, Bytes x) { Add(w.w, x); }
  Ints Done() const { return sum; }
};
using Unsigned4 = PlainDot;
using Signed8 = PlainDot;
#endif

#ifdef MINISGL_VNNI  // the dot product is of unsigned weights and signed x
struct Unsigned4 {
  Ints sum = Zeros();
  void Add(Bytes w, Bytes x) { sum = AddDot(sum, w, x); }
  Ints Done() const { return sum; }
};
struct Signed8 {
  static constexpr int kOffset = 128;  // is added to the weights, so that they are unsigned
  struct Weights { Bytes w; };
  static Weights Prepare(Bytes w) { return {FlipSigns(w)}; }
  Ints sum = Zeros();
  void Add(Weights w, Bytes x) { sum = AddDot(sum, w.w, x); }
  Ints Done() const { return sum; }
};
#endif

constexpr int kPartOutputs = kOutputs / kParts;   // outputs of a register of floats
constexpr int kPartBytes = 4 * kPartOutputs;  // bytes of a register of weights

}  // namespace minisgl
