// One tile of keys met by rows of queries: what every path of attention (decode, verification, chunk, prefill) is made of.
//
// A tile is 64 keys at a multiple of 64. Its keys are transposed (lanes are keys) and its values laid out in steps (lanes
// are dimensions), so that scores and results are both products of one kind: lanes never mix, and each number is summed
// in one order, whatever rows are computed with it. A key that a row does not see has weight 0 there and changes no bit.
#pragma once

#include "vectors.h"

namespace wk::attention {

constexpr std::int64_t kTile = 64;
constexpr int kMaxRows = 6;     // with 4 vectors each they fill the registers
constexpr int kMaxVectors = 4;  // of 16 lanes
constexpr float kNone = -3.402823466e38f;  // the maximum of no scores: finite, so that it may be subtracted from itself

// Products go in steps of 32 bits: one float32, or a pair of bfloat16, which is half as many steps.
template <class T>
constexpr std::int64_t kStep = 4 / sizeof(T);

template <class T>
inline __m512 multiply_add(__m512i a, __m512i b, __m512 sum);

template <>
inline __m512 multiply_add<float>(__m512i a, __m512i b, __m512 sum) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

template <>
inline __m512 multiply_add<bfloat16>(__m512i a, __m512i b, __m512 sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// 2^x for x <= 0; 1 for 0, 0 for -inf, NaN for NaN. Minimax polynomials of 2^r on 0 <= r < 1 that are 1 at 0; relative
// error below 2e-7, and below 9e-5 where the result is rounded to bfloat16 anyway.
template <class T>
inline __m512 exp2(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  __m512 p;
  if constexpr (sizeof(T) == 4) {
    p = _mm512_set1_ps(0.0018671302f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.00901703f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.055799913f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24016444f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6931513f));
  } else {
    p = _mm512_set1_ps(0.077067055f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.22764498f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6951168f));
  }
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

// In all lanes the largest one.
inline __m512 largest(__m512 x) {
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4E));
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xB1));
  x = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4E));
  return _mm512_max_ps(x, _mm512_permute_ps(x, 0xB1));
}

// sum[m][n] += a[m][s] * b[s][n] for s ascending.
template <class T, int M, int N>
inline void accumulate(const std::uint32_t* a, std::int64_t a_stride, const std::uint32_t* b, std::int64_t b_stride,
                       std::int64_t steps, __m512 (&sum)[M][N]) {
  for (std::int64_t s = 0; s < steps; ++s) {
    __m512i right[N];
    for (int n = 0; n < N; ++n) right[n] = _mm512_load_si512(b + s * b_stride + 16 * n);
    for (int m = 0; m < M; ++m) {
      const __m512i left = _mm512_set1_epi32(static_cast<int>(a[m * a_stride + s]));
      for (int n = 0; n < N; ++n) sum[m][n] = multiply_add<T>(left, right[n], sum[m][n]);
    }
  }
}

// The keys of a tile, and the values, in 64-byte aligned memory.
struct Tile {
  std::int64_t start;     // position of the first key
  std::uint32_t* keys;    // [dim / kStep][kTile]
  std::uint32_t* values;  // [kTile / kStep][dim]
};

// Rows of queries and what they have found among the keys so far: result = out / sum(sums).
struct Rows {
  std::int64_t dim;
  float scale;                     // times log2(e): weights are powers of 2
  const std::uint32_t* query;      // [rows][dim / kStep]
  const std::int64_t *first, *end;  // [rows] positions seen: first <= position < end
  float* out;                      // [rows][dim]
  float* maximum;                  // [rows]
  float* sums;                     // [rows][16], to be summed
};

// The lanes of 64 keys from `start` on that a row sees.
inline std::uint64_t seen_keys(std::int64_t first, std::int64_t end, std::int64_t start) {
  const auto below = [](std::int64_t n) { return n <= 0 ? 0 : n >= 64 ? ~0ull : (1ull << n) - 1; };
  return below(end - start) & ~below(first - start);
}

template <class T, int M, int N>
inline void add_values(const Rows& rows, std::int64_t row, const Tile& tile, std::int64_t column,
                       const std::uint32_t* weights, std::int64_t steps, const float* factor) {
  __m512 sum[M][N];
  float* out = rows.out + row * rows.dim + column;
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      sum[m][n] = _mm512_mul_ps(_mm512_load_ps(out + m * rows.dim + 16 * n), _mm512_set1_ps(factor[m]));
    }
  }
  accumulate<T>(weights, kTile / kStep<T>, tile.values + column, rows.dim, steps, sum);
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) _mm512_store_ps(out + m * rows.dim + 16 * n, sum[m][n]);
  }
}

// M rows from `row` on look at the first 16 N keys of a tile.
template <class T, int M, int N>
void attend(const Rows& rows, std::int64_t row, const Tile& tile) {
  const std::int64_t steps = rows.dim / kStep<T>;
  __m512 score[M][N];
  for (auto& vectors : score) {
    for (auto& vector : vectors) vector = _mm512_setzero_ps();
  }
  accumulate<T>(rows.query + row * steps, steps, tile.keys, kTile, steps, score);

  for (auto& vectors : score) {
    for (auto& vector : vectors) vector = _mm512_mul_ps(vector, _mm512_set1_ps(rows.scale));
  }
  if (rows.first[row + M - 1] > tile.start || rows.end[row] < tile.start + 16 * N) {
    for (int m = 0; m < M; ++m) {
      const std::uint64_t seen = seen_keys(rows.first[row + m], rows.end[row + m], tile.start);
      for (int n = 0; n < N; ++n) {
        score[m][n] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), __mmask16(seen >> (16 * n)), score[m][n]);
      }
    }
  }

  const __mmask16 lanes = tail(M);
  const __m512 before = _mm512_maskz_loadu_ps(lanes, rows.maximum + row);
  __m512 after = before;
  __m512 maximum[M];
  for (int m = 0; m < M; ++m) {
    __m512 most = score[m][0];
    for (int n = 1; n < N; ++n) most = _mm512_max_ps(most, score[m][n]);
    maximum[m] = _mm512_max_ps(largest(most), _mm512_set1_ps(rows.maximum[row + m]));
    after = _mm512_mask_mov_ps(after, __mmask16(1u << m), maximum[m]);
  }
  alignas(64) float factor[16];
  _mm512_store_ps(factor, exp2<float>(_mm512_sub_ps(before, after)));
  _mm512_mask_storeu_ps(rows.maximum + row, lanes, after);

  alignas(64) std::uint32_t weights[M][kTile / kStep<T>];
  for (int m = 0; m < M; ++m) {
    float* sums = rows.sums + (row + m) * 16;
    __m512 sum = _mm512_mul_ps(_mm512_load_ps(sums), _mm512_set1_ps(factor[m]));
    for (int n = 0; n < N; ++n) score[m][n] = exp2<T>(_mm512_sub_ps(score[m][n], maximum[m]));
    if constexpr (kStep<T> == 2) {  // weights are rounded, and their sum is that of the rounded ones
      for (int n = 0; n < N; n += 2) {
        const __m512 high = n + 1 < N ? score[m][n + 1] : _mm512_setzero_ps();
        const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(high, score[m][n]);
        sum = multiply_add<T>(pairs, _mm512_set1_epi32(0x3F803F80), sum);
        _mm512_store_si512(weights[m] + 8 * n, pairs);
      }
    } else {
      for (int n = 0; n < N; ++n) {
        sum = _mm512_add_ps(sum, score[m][n]);
        _mm512_store_ps(weights[m] + 16 * n, score[m][n]);
      }
    }
    _mm512_store_ps(sums, sum);
  }

  constexpr std::int64_t value_steps = 16 * N / kStep<T>;
  std::int64_t column = 0;
  for (; column + 64 <= rows.dim; column += 64) add_values<T, M, 4>(rows, row, tile, column, weights[0], value_steps, factor);
  if (rows.dim - column >= 32) {
    add_values<T, M, 2>(rows, row, tile, column, weights[0], value_steps, factor);
    column += 32;
  }
  if (rows.dim > column) add_values<T, M, 1>(rows, row, tile, column, weights[0], value_steps, factor);
}

// Where the keys, or values, of a tile lie: [dim] each.
template <class T>
using Places = const T* [kTile];

// The memory of the next tile is asked for while this one is packed.
template <class T>
inline void prefetch(const T* place, std::int64_t dim) {
  for (std::int64_t d = 0; d < dim; d += 64 / sizeof(T)) _mm_prefetch(reinterpret_cast<const char*>(place + d), _MM_HINT_T0);
}

// The first 16 columns, or as many as COLUMNS says, of 16 rows of 32-bit steps, each at `at` in its memory -> rows of `out`.
template <int COLUMNS, class T>
inline void transpose(const T* const* rows, std::int64_t at, std::uint32_t* out) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    const __m512i even = _mm512_maskz_loadu_epi32(tail(COLUMNS), rows[i] + at);
    const __m512i odd = _mm512_maskz_loadu_epi32(tail(COLUMNS), rows[i + 1] + at);
    a[i] = _mm512_unpacklo_epi32(even, odd);
    a[i + 1] = _mm512_unpackhi_epi32(even, odd);
  }
  for (int i = 0; i < 16; i += 4) {  // b[4 q + i]: columns i, 4 + i, 8 + i, 12 + i of rows 4 q to 4 q + 3
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i even = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), even2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xDD), odd2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xDD);
    _mm512_store_si512(out + i * kTile, _mm512_shuffle_i32x4(even, even2, 0x88));
    _mm512_store_si512(out + (4 + i) * kTile, _mm512_shuffle_i32x4(odd, odd2, 0x88));
    if constexpr (COLUMNS == 16) {
      _mm512_store_si512(out + (8 + i) * kTile, _mm512_shuffle_i32x4(even, even2, 0xDD));
      _mm512_store_si512(out + (12 + i) * kTile, _mm512_shuffle_i32x4(odd, odd2, 0xDD));
    }
  }
}

// The first 16 `vectors` keys of a tile.
template <class T>
void pack_keys(const Places<T>& keys, const Places<T>& next, int vectors, std::int64_t dim, std::uint32_t* out) {
  const std::int64_t steps = dim / kStep<T>;
  for (int n = 0; n < vectors; ++n) {
    for (int i = 0; i < 16; ++i) prefetch(next[16 * n + i], dim);
    std::int64_t s = 0;
    for (; s + 16 <= steps; s += 16) transpose<16>(keys + 16 * n, s * kStep<T>, out + s * kTile + 16 * n);
    if (s < steps) transpose<8>(keys + 16 * n, s * kStep<T>, out + s * kTile + 16 * n);
  }
}

// The first 16 `vectors` values of a tile.
template <class T>
void pack_values(const Places<T>& values, const Places<T>& next, int vectors, std::int64_t dim, std::uint32_t* out) {
  if constexpr (kStep<T> == 1) {
    for (int k = 0; k < 16 * vectors; ++k) {
      prefetch(next[k], dim);
      for (std::int64_t d = 0; d < dim; d += 16) _mm512_store_ps(out + k * dim + d, load(values[k] + d));
    }
  } else {  // two values one after the other -> dimension by dimension
    const __m512i words = _mm512_add_epi32(_mm512_set1_epi32(0x00200000), _mm512_mullo_epi32(
        _mm512_set1_epi32(0x00010001), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
    const __m512i words2 = _mm512_add_epi32(words, _mm512_set1_epi32(0x00100010));
    for (int k = 0; k < 16 * vectors; k += 2) {
      prefetch(next[k], dim);
      prefetch(next[k + 1], dim);
      const T *even = values[k], *odd = values[k + 1];
      std::uint32_t* row = out + k / 2 * dim;
      std::int64_t d = 0;
      for (; d + 32 <= dim; d += 32) {
        const __m512i a = _mm512_loadu_si512(even + d), b = _mm512_loadu_si512(odd + d);
        _mm512_store_si512(row + d, _mm512_permutex2var_epi16(a, words, b));
        _mm512_store_si512(row + d + 16, _mm512_permutex2var_epi16(a, words2, b));
      }
      if (d < dim) {
        const __m512i a = _mm512_maskz_loadu_epi32(tail(8), even + d), b = _mm512_maskz_loadu_epi32(tail(8), odd + d);
        _mm512_store_si512(row + d, _mm512_permutex2var_epi16(a, words, b));
      }
    }
  }
}

}  // namespace wk::attention
