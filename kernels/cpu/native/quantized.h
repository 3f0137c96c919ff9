// What the quantised products share. Packed weights lie in panels of 32 output columns (two vectors of 16 lanes) and
// groups of 32 inputs; a lane holds four inputs of its column, one byte each, as vpdpbusd wants them. Of a group:
//   vectors of the first 16 columns, of the other 16 (kNibbleVectors or kByteVectors of 64 bytes each),
//   then, unless scales belong to whole columns, 32 scales and (where there are any) 32 minima, as fp16 or fp32.
// With nibbles a lane's low ones are inputs 4v … 4v + 3 of the group, its high ones 16 + 4v … 16 + 4v + 3.
#pragma once

#include <algorithm>
#include <cstdint>

#include "program.h"
#include "vectors.h"

namespace wk {

constexpr int kGroup = 32;
constexpr int kPanel = 32;
constexpr int kNibbleVectors = 4;
constexpr int kByteVectors = 8;
constexpr int kPanels = 3;  // of a piece, one after another in memory: what is fetched ahead is for the same thread
constexpr std::int64_t kAhead = 6144;  // bytes that weights are fetched ahead
constexpr std::int64_t kChunk = 240;  // rows that go through a panel before the next: their activations stay in cache

struct QuantizedGroup {  // of activations: code * scale
  std::int8_t codes[kGroup];
  float scale;
  union {
    float sum;             // scale * (sum of codes), what a weight's minimum is multiplied by
    std::int32_t initial;  // -offset * (sum of codes), for weights that are stored with an offset
  };
};

inline std::int64_t group_bytes(int vectors, std::int64_t scale_bytes, bool minima) {
  return 2 * vectors * 64 + kPanel * scale_bytes * (minima ? 2 : 1);
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline std::int64_t num_pieces(std::int64_t rows, std::int64_t columns) {
  return ceil_div(rows, kChunk) * ceil_div(columns, kPanels * kPanel);
}

// Call function(panel, first_row, end_row) for the panels of pieces [begin, end).
template <class Function>
inline void for_pieces(std::int64_t rows, std::int64_t columns, std::int64_t begin, std::int64_t end,
                       Function function) {
  const std::int64_t panels = ceil_div(columns, kPanel), across = ceil_div(panels, kPanels);
  for (std::int64_t piece = begin; piece < end; ++piece) {
    const std::int64_t first = piece / across * kChunk;
    for (std::int64_t i = 0, panel = piece % across * kPanels; i < kPanels && panel < panels; ++i, ++panel) {
      function(panel, first, std::min(first + kChunk, rows));
    }
  }
}

// Call function(first_row, number of rows) for tiles of nearly equal size, at most `most` rows.
template <class Function>
inline void for_tiles(std::int64_t first, std::int64_t end, int most, Function function) {
  const std::int64_t tiles = ceil_div(end - first, most);
  for (std::int64_t i = 0; i < tiles; ++i) {
    const std::int64_t row = first + (end - first) * i / tiles;
    function(row, static_cast<int>(first + (end - first) * (i + 1) / tiles - row));
  }
}

// Sixteen scales that are stored as fp16 or fp32.
inline __m512 load_scales(const std::uint8_t* scales, std::int64_t bytes) {
  if (bytes == 2) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
  return _mm512_loadu_ps(scales);
}

// Store a row's sums of a panel, plus the bias, in its place of `row`, which has `columns` columns.
template <class T>
inline void store_panel(T* row, std::int64_t columns, std::int64_t panel, const float* sums, const float* bias) {
  for (std::int64_t column = panel * kPanel, i = 0; i < kPanel && column < columns; i += 16, column += 16) {
    const __mmask16 mask = tail(columns - column);
    __m512 value = load(sums + i);
    if (bias != nullptr) value = _mm512_add_ps(value, load(bias + i, mask));
    store(row + column, value, mask);
  }
}

// Fetch the `bytes` of weights that come kAhead later (past the end of memory this does nothing).
template <std::int64_t bytes>
inline void prefetch(const std::uint8_t* weights) {
#pragma GCC unroll 32
  for (std::int64_t i = 0; i < bytes; i += 64) _mm_prefetch(weights + kAhead + i, _MM_HINT_T0);
}

inline __m512i broadcast(const void* four_bytes) {
  std::int32_t value;
  std::memcpy(&value, four_bytes, 4);
  return _mm512_set1_epi32(value);
}

}  // namespace wk
