// One tile of keys met by rows of queries: what every path of attention (decode, verification, chunk, prefill) is made
// of.
//
// A tile is 64 keys at a multiple of 64. Its keys are transposed (lanes are keys) and its values laid out in steps
// (lanes are dimensions), so that scores and results are both products of one kind: lanes never mix, and each number is
// summed in one order, whatever rows are computed with it. A key that a row does not see has weight 0 there and changes
// no bit.
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

  constexpr std::int64_t count = 16 * N / kStep<T>;
  std::int64_t column = 0;
  for (; column + 64 <= rows.dim; column += 64) add_values<T, M, 4>(rows, row, tile, column, weights[0], count, factor);
  if (rows.dim - column >= 32) {
    add_values<T, M, 2>(rows, row, tile, column, weights[0], count, factor);
    column += 32;
  }
  if (rows.dim > column) add_values<T, M, 1>(rows, row, tile, column, weights[0], count, factor);
}

}  // namespace wk::attention
