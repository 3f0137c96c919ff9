// Keys and values of a tile from the paged cache, wherever its blocks lie, into the layout that products take.
#pragma once

#include "attention_tile.h"

namespace wk::attention {

// Where the keys and values of a tile lie.
template <class T>
struct Places {
  const T *keys[kTile], *values[kTile];
};

// Gets the memory of a tile into the cache: eight places in turn, each of which the processor then takes for a stream
// and follows. `ask` does not wait, and is to be called now and then, while the tile before is worked on: what is asked
// for at once is dropped.
template <class T>
class Ahead {
 public:
  // `bytes` of each key and value.
  Ahead(const Places<T>& places, std::int64_t bytes) : places_(places), bytes_(bytes) {}

  void ask(int count) {
    for (; count > 0 && key_ < kStride; --count) {
      next([](const char& byte) {  // compilers take loops of _mm_prefetch for idle ones
        asm volatile("prefetcht0 %0" : : "m"(byte));
      });
    }
  }

  void wait() {
    while (key_ < kStride) {
      next([](const char& byte) {
        char value;
        asm volatile("movb %1, %0" : "=q"(value) : "m"(byte));
      });
    }
  }

 private:
  static constexpr std::int64_t kStride = 16;

  template <class Get>
  void next(Get get) {
    for (std::int64_t k = key_; k < kTile; k += kStride) {
      get(reinterpret_cast<const char*>(places_.keys[k])[at_]);
      get(reinterpret_cast<const char*>(places_.values[k])[at_]);
    }
    at_ += 64;
    if (at_ >= bytes_) {
      at_ = 0;
      ++key_;
    }
  }

  const Places<T>& places_;
  const std::int64_t bytes_;
  std::int64_t key_ = 0, at_ = 0;
};

// COLUMNS (8 or 16) steps of 32 bits of 16 rows, each at `at` in its memory -> rows of `out`.
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
    const __m512i even = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xDD);
    const __m512i even2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    const __m512i odd2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xDD);
    _mm512_store_si512(out + i * kTile, _mm512_shuffle_i32x4(even, even2, 0x88));
    _mm512_store_si512(out + (4 + i) * kTile, _mm512_shuffle_i32x4(odd, odd2, 0x88));
    if constexpr (COLUMNS == 16) {
      _mm512_store_si512(out + (8 + i) * kTile, _mm512_shuffle_i32x4(even, even2, 0xDD));
      _mm512_store_si512(out + (12 + i) * kTile, _mm512_shuffle_i32x4(odd, odd2, 0xDD));
    }
  }
}

// The first 16 `vectors` keys of a tile, [dim] each from `offset` on.
template <class T>
void pack_keys(const Places<T>& places, Ahead<T>& ahead, int vectors, std::int64_t offset, std::int64_t dim,
               std::uint32_t* out) {
  const std::int64_t steps = dim / kStep<T>;
  for (int n = 0; n < vectors; ++n) {
    for (std::int64_t s = 0; s < steps; s += 16) {
      ahead.ask(2);  // half of what a tile has, by the end
      const T* const* keys = places.keys + 16 * n;
      std::uint32_t* to = out + s * kTile + 16 * n;
      if (s + 16 <= steps) {
        transpose<16>(keys, offset + s * kStep<T>, to);
      } else {
        transpose<8>(keys, offset + s * kStep<T>, to);
      }
    }
  }
}

// The first 16 `vectors` values of a tile, [dim] each from `offset` on.
template <class T>
void pack_values(const Places<T>& places, Ahead<T>& ahead, int vectors, std::int64_t offset, std::int64_t dim,
                 std::uint32_t* out) {
  if constexpr (kStep<T> == 1) {
    for (int k = 0; k < 16 * vectors; ++k) {
      if (k % 8 == 0) ahead.ask(static_cast<int>(dim / 16));
      const T* value = places.values[k] + offset;
      for (std::int64_t d = 0; d < dim; d += 16) _mm512_store_ps(out + k * dim + d, load(value + d));
    }
  } else {  // of two values dimension by dimension
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i words =  // 0, 32, 1, 33, ...
        _mm512_add_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x10001)), _mm512_set1_epi32(0x200000));
    const __m512i words2 = _mm512_add_epi32(words, _mm512_set1_epi32(0x00100010));
    for (int k = 0; k < 16 * vectors; k += 2) {
      if (k % 4 == 0) ahead.ask(static_cast<int>((dim + 63) / 64));
      const T *even = places.values[k] + offset, *odd = places.values[k + 1] + offset;
      std::uint32_t* row = out + k / 2 * dim;
      std::int64_t d = 0;
      for (; d + 32 <= dim; d += 32) {
        const __m512i a = _mm512_loadu_si512(even + d), b = _mm512_loadu_si512(odd + d);
        _mm512_store_si512(row + d, _mm512_permutex2var_epi16(a, words, b));
        _mm512_store_si512(row + d + 16, _mm512_permutex2var_epi16(a, words2, b));
      }
      if (d < dim) {
        const __m512i a = _mm512_maskz_loadu_epi32(tail(8), even + d);
        const __m512i b = _mm512_maskz_loadu_epi32(tail(8), odd + d);
        _mm512_store_si512(row + d, _mm512_permutex2var_epi16(a, words, b));
      }
    }
  }
}

}  // namespace wk::attention
