// Products of int8 activations with 4- and 8-bit weights that have a scale for each group of 32 inputs. Sums within a
// group are exact integers; groups are added in float32 in their order, for any number of rows.
#include "quantized.h"

namespace wk {
namespace {

constexpr int kRows = 6;  // of a tile: its sums, 2 x 6 x 2 vectors, just fit the registers

template <int kVectors_, bool kMinima_>
struct Format {
  static constexpr int kVectors = kVectors_;
  static constexpr bool kMinima = kMinima_;  // weights are code * scale + minimum, otherwise (code - offset) * scale
};

// Sums of kRows rows with the 32 columns of a panel.
template <class F, int R>
void tile(const QuantizedGroup* x, std::int64_t groups, const std::uint8_t* panel, std::int64_t scale_bytes,
          float* out) {
  const std::int64_t bytes = group_bytes(F::kVectors, scale_bytes, F::kMinima);
  const __m512i nibble = _mm512_set1_epi8(0x0F);
  __m512 total[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm512_setzero_ps();
  for (std::int64_t g = 0; g < groups; ++g, ++x, panel += bytes) {
    __m512i sum[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      sum[r][0] = sum[r][1] = F::kMinima ? _mm512_setzero_si512() : _mm512_set1_epi32(x[r * groups].initial);
    }
    prefetch<2 * F::kVectors * 64 + kPanel * (F::kMinima ? 4 : 2)>(panel);
#pragma GCC unroll 8
    for (int v = 0; v < F::kVectors; ++v) {
      const __m512i first = _mm512_loadu_si512(panel + 64 * v);
      const __m512i second = _mm512_loadu_si512(panel + 64 * (F::kVectors + v));
      if constexpr (F::kVectors == kNibbleVectors) {
        const __m512i low[2] = {_mm512_and_si512(first, nibble), _mm512_and_si512(second, nibble)};
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const __m512i codes = broadcast(x[r * groups].codes + 4 * v);
          sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], low[0], codes);
          sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], low[1], codes);
        }
        const __m512i high[2] = {_mm512_and_si512(_mm512_srli_epi16(first, 4), nibble),
                                 _mm512_and_si512(_mm512_srli_epi16(second, 4), nibble)};
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const __m512i codes = broadcast(x[r * groups].codes + 16 + 4 * v);
          sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], high[0], codes);
          sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], high[1], codes);
        }
      } else {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const __m512i codes = broadcast(x[r * groups].codes + 4 * v);
          sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], first, codes);
          sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], second, codes);
        }
      }
    }
    const std::uint8_t* scales = panel + 2 * F::kVectors * 64;
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const __m512 scale = load_scales(scales + 16 * c * scale_bytes, scale_bytes);
      const __m512 minimum = F::kMinima ? load_scales(scales + 16 * (2 + c) * scale_bytes, scale_bytes) : scale;
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(x[r * groups].scale));
        total[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][c]), factor, total[r][c]);
        if constexpr (F::kMinima) {
          total[r][c] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x[r * groups].sum), total[r][c]);
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(out + r * kPanel, total[r][0]);
    _mm512_store_ps(out + r * kPanel + 16, total[r][1]);
  }
}

using Tile = void (*)(const QuantizedGroup*, std::int64_t, const std::uint8_t*, std::int64_t, float*);

// rows, out [rows, columns], x (QuantizedGroup), packed, columns, groups, scale_bytes, bias (float32, or 0)
template <class F, class T>
void product(const Arg* args, std::int64_t begin, std::int64_t end) {
  static constexpr Tile tiles[kRows] = {tile<F, 1>, tile<F, 2>, tile<F, 3>, tile<F, 4>, tile<F, 5>, tile<F, 6>};
  const std::int64_t columns = args[4], groups = args[5], scale_bytes = args[6];
  const std::int64_t panel_bytes = groups * group_bytes(F::kVectors, scale_bytes, F::kMinima);
  for_pieces(args[0], columns, begin, end, [&](std::int64_t panel, std::int64_t first, std::int64_t last) {
    const std::uint8_t* weight = at<std::uint8_t>(args[3]) + panel * panel_bytes;
    const float* bias = args[7] ? at<float>(args[7]) + panel * kPanel : nullptr;
    for_tiles(first, last, kRows, [&](std::int64_t row, int count) {
      alignas(64) float sums[kRows * kPanel];
      tiles[count - 1](at<QuantizedGroup>(args[2]) + row * groups, groups, weight, scale_bytes, sums);
      for (int r = 0; r < count; ++r) {
        store_panel(at<T>(args[1]) + (row + r) * columns, columns, panel, sums + r * kPanel, bias);
      }
    });
  });
}

std::int64_t pieces(const Arg* args) { return num_pieces(args[0], args[4]); }

using Q4WithMinima = Format<kNibbleVectors, true>;
using Q4 = Format<kNibbleVectors, false>;
using Q8 = Format<kByteVectors, false>;

const Register kernels[] = {
    Register({"product_q4_minima_float32", 8, pieces, product<Q4WithMinima, float>}),
    Register({"product_q4_minima_bfloat16", 8, pieces, product<Q4WithMinima, bfloat16>}),
    Register({"product_q4_float32", 8, pieces, product<Q4, float>}),
    Register({"product_q4_bfloat16", 8, pieces, product<Q4, bfloat16>}),
    Register({"product_q8_float32", 8, pieces, product<Q8, float>}),
    Register({"product_q8_bfloat16", 8, pieces, product<Q8, bfloat16>}),
};

}  // namespace
}  // namespace wk
