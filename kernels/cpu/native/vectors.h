// Sixteen numbers at a time, in float32 whatever they are stored in. Rounding to bfloat16 is to nearest even, as torch's.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

namespace wk {

struct bfloat16 {
  std::uint16_t bits;
};

// The first min(n, 16) lanes.
inline __mmask16 tail(std::int64_t n) { return n >= 16 ? __mmask16(0xFFFF) : __mmask16((1u << n) - 1); }

inline __m512 load(const float* x, __mmask16 mask = 0xFFFF) { return _mm512_maskz_loadu_ps(mask, x); }

inline __m512 load(const bfloat16* x, __mmask16 mask = 0xFFFF) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
}

inline void store(float* x, __m512 value, __mmask16 mask = 0xFFFF) { _mm512_mask_storeu_ps(x, mask, value); }

inline void store(bfloat16* x, __m512 value, __mmask16 mask = 0xFFFF) {
  _mm256_mask_storeu_epi16(x, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

// e^x for x <= 0 (and -inf -> 0): 2^n * p(r), p the degree-6 Taylor polynomial of e^r on |r| <= ln(2) / 2; relative
// error below 2e-7.
inline __m512 exp(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  const __m512 result = _mm512_scalef_ps(p, n);
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-103.0f), _CMP_GT_OQ), result);
}

}  // namespace wk
