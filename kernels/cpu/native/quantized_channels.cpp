// Products with 8-bit weights that have one scale for each output column: of activations that are quantised row by row
// (w8a8: one exact integer sum), and of activations as they are (w8: codes become bfloat16, exactly, or float32).
#include "quantized.h"

namespace wk {
namespace {

constexpr int kRows = 8;  // of a tile: 16 sums are enough to hide the latency of an instruction
constexpr std::int64_t kGroupBytes = 2 * kByteVectors * 64;

// Rows of quantize_rows, `stride` bytes apart, times a panel.
template <int R>
void tile_w8a8(const std::int8_t* x, std::int64_t stride, std::int64_t groups, const std::uint8_t* panel,
               const float* scales, float* out) {
  const std::int8_t* const end = x + groups * kGroup;
  __m512i sum[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = broadcast(end + r * stride + 4);
  for (std::int64_t g = 0; g < groups; ++g, panel += kGroupBytes) {
    prefetch<kGroupBytes>(panel);
#pragma GCC unroll 8
    for (int v = 0; v < kByteVectors; ++v) {
      const __m512i first = _mm512_loadu_si512(panel + 64 * v);
      const __m512i second = _mm512_loadu_si512(panel + 64 * (kByteVectors + v));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i codes = broadcast(x + r * stride + g * kGroup + 4 * v);
        sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], first, codes);
        sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], second, codes);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const __m512 scale = _mm512_castsi512_ps(broadcast(end + r * stride));
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const __m512 factor = _mm512_mul_ps(scale, load(scales + 16 * c));
      _mm512_store_ps(out + r * kPanel + 16 * c, _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][c]), factor));
    }
  }
}

// Lanes of four codes, stored with 128 added, as what activations are multiplied by: operand i is code i, or the codes
// 2i and 2i + 1 in bfloat16.
inline __m512 code(__m512i codes, int i) {
  const __m512i flipped = _mm512_xor_si512(codes, _mm512_set1_epi32(0x80808080));
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(flipped, 24 - 8 * i), 24));
}

inline __m512 operand(const float*, __m512i codes, int i) { return code(codes, i); }

inline __m512 operand(const bfloat16*, __m512i codes, int i) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(code(codes, 2 * i)), 16);
  const __m512i high = _mm512_castps_si512(code(codes, 2 * i + 1));
  return _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xAAAAAAAA, low, high));
}

inline __m512 multiply_add(__m512 weights, const float* x, __m512 sum) {
  return _mm512_fmadd_ps(weights, _mm512_set1_ps(*x), sum);
}

inline __m512 multiply_add(__m512 weights, const bfloat16* x, __m512 sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)broadcast(x));
}

template <class T>
constexpr int kOperands = sizeof(T);  // in four bytes of weights

// A group's products. `weights` are packed bytes, or what `unpack_panel` has made of them.
template <class T, int R, bool unpacked>
inline void group_w8(const T* x, std::int64_t stride, const std::uint8_t* weights, __m512 (&sum)[R][2]) {
#pragma GCC unroll 1
  for (int v = 0; v < kByteVectors; ++v) {
#pragma GCC unroll 4
    for (int i = 0; i < kOperands<T>; ++i) {
      __m512 w[2];
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        w[c] = unpacked ? _mm512_load_ps(weights + 64 * ((v * kOperands<T> + i) * 2 + c))
                        : operand(x, _mm512_loadu_si512(weights + 64 * (c * kByteVectors + v)), i);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const T* value = x + r * stride + 4 * v + 4 / kOperands<T> * i;
        sum[r][0] = multiply_add(w[0], value, sum[r][0]);
        sum[r][1] = multiply_add(w[1], value, sum[r][1]);
      }
    }
  }
}

template <class T>
void unpack_panel(const std::uint8_t* panel, std::int64_t groups, std::uint8_t* out) {
  for (std::int64_t g = 0; g < groups; ++g, panel += kGroupBytes) {
    prefetch<kGroupBytes>(panel);
#pragma GCC unroll 8
    for (int v = 0; v < kByteVectors; ++v) {
#pragma GCC unroll 4
      for (int i = 0; i < kOperands<T>; ++i) {
        for (int c = 0; c < 2; ++c, out += 64) {
          const __m512i codes = _mm512_loadu_si512(panel + 64 * (c * kByteVectors + v));
          _mm512_store_ps(out, operand(static_cast<const T*>(nullptr), codes, i));
        }
      }
    }
  }
}

template <class T, int R, bool unpacked>
void tile_w8(const T* x, std::int64_t stride, std::int64_t size, const std::uint8_t* weights, const float* scales,
             float* out) {
  constexpr std::int64_t bytes = kGroupBytes * (unpacked ? kOperands<T> : 1);
  __m512 sum[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  std::int64_t i = 0;
  for (; i + kGroup <= size; i += kGroup, weights += bytes) {
    if constexpr (!unpacked) prefetch<bytes>(weights);
    group_w8<T, R, unpacked>(x + i, stride, weights, sum);
  }
  if (i < size) {
    T padded[R * kGroup] = {};
    for (int r = 0; r < R; ++r) std::memcpy(padded + r * kGroup, x + r * stride + i, (size - i) * sizeof(T));
    group_w8<T, R, unpacked>(padded, kGroup, weights, sum);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(out + r * kPanel, _mm512_mul_ps(sum[r][0], load(scales)));
    _mm512_store_ps(out + r * kPanel + 16, _mm512_mul_ps(sum[r][1], load(scales + 16)));
  }
}

// rows, out [rows, columns], x (of quantize_rows), packed, columns, padded size, scales (of whole panels), bias (or 0)
template <class T>
void product_w8a8(const Arg* args, std::int64_t begin, std::int64_t end) {
  static constexpr decltype(&tile_w8a8<1>) tiles[kRows] = {tile_w8a8<1>, tile_w8a8<2>, tile_w8a8<3>, tile_w8a8<4>,
                                                           tile_w8a8<5>, tile_w8a8<6>, tile_w8a8<7>, tile_w8a8<8>};
  const std::int64_t columns = args[4], groups = args[5] / kGroup, stride = args[5] + 8;
  for_pieces(args[0], columns, begin, end, [&](std::int64_t panel, std::int64_t first, std::int64_t last) {
    const std::uint8_t* weights = at<std::uint8_t>(args[3]) + panel * groups * kGroupBytes;
    const float* bias = args[7] ? at<float>(args[7]) + panel * kPanel : nullptr;
    for_tiles(first, last, kRows, [&](std::int64_t row, int count) {
      alignas(64) float sums[kRows * kPanel];
      tiles[count - 1](at<std::int8_t>(args[2]) + row * stride, stride, groups, weights,
                       at<float>(args[6]) + panel * kPanel, sums);
      for (int r = 0; r < count; ++r) {
        store_panel(at<T>(args[1]) + (row + r) * columns, columns, panel, sums + r * kPanel, bias);
      }
    });
  });
}

// rows, out [rows, columns], x, x_stride, packed, columns, size, scales (of whole panels), bias (or 0)
template <class T, class Out>
void product_w8(const Arg* args, std::int64_t begin, std::int64_t end) {
  using Tile = decltype(&tile_w8<T, 1, false>);
  static constexpr Tile direct[kRows] = {tile_w8<T, 1, false>, tile_w8<T, 2, false>, tile_w8<T, 3, false>,
                                         tile_w8<T, 4, false>, tile_w8<T, 5, false>, tile_w8<T, 6, false>,
                                         tile_w8<T, 7, false>, tile_w8<T, 8, false>};
  // With more than one tile none has fewer than four rows.
  static constexpr Tile shared[kRows] = {nullptr,             nullptr,             nullptr,
                                         tile_w8<T, 4, true>, tile_w8<T, 5, true>, tile_w8<T, 6, true>,
                                         tile_w8<T, 7, true>, tile_w8<T, 8, true>};
  const std::int64_t columns = args[5], size = args[6], groups = ceil_div(size, kGroup);
  for_pieces(args[0], columns, begin, end, [&](std::int64_t panel, std::int64_t first, std::int64_t last) {
    const std::uint8_t* weights = at<std::uint8_t>(args[4]) + panel * groups * kGroupBytes;
    const float* bias = args[8] ? at<float>(args[8]) + panel * kPanel : nullptr;
    const bool unpack = last - first > kRows;
    if (unpack) {
      auto* unpacked = static_cast<std::uint8_t*>(scratch(groups * kGroupBytes * kOperands<T>));
      unpack_panel<T>(weights, groups, unpacked);
      weights = unpacked;
    }
    for_tiles(first, last, kRows, [&](std::int64_t row, int count) {
      alignas(64) float sums[kRows * kPanel];
      (unpack ? shared : direct)[count - 1](at<T>(args[2]) + row * args[3], args[3], size, weights,
                                            at<float>(args[7]) + panel * kPanel, sums);
      for (int r = 0; r < count; ++r) {
        store_panel(at<Out>(args[1]) + (row + r) * columns, columns, panel, sums + r * kPanel, bias);
      }
    });
  });
}

template <int index>
std::int64_t pieces(const Arg* args) {
  return num_pieces(args[0], args[index]);
}

const Register kernels[] = {
    Register({"product_w8a8_float32", 8, pieces<4>, product_w8a8<float>}),
    Register({"product_w8a8_bfloat16", 8, pieces<4>, product_w8a8<bfloat16>}),
    Register({"product_w8_float32_float32", 9, pieces<5>, product_w8<float, float>}),
    Register({"product_w8_bfloat16_bfloat16", 9, pieces<5>, product_w8<bfloat16, bfloat16>}),
    Register({"product_w8_bfloat16_float32", 9, pieces<5>, product_w8<bfloat16, float>}),
};

}  // namespace
}  // namespace wk
