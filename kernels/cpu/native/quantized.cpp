// Quantising activations to int8, packing weights, and reading rows of packed weights.
#include "quantized.h"

#include <bit>
#include <limits>

namespace wk {
namespace {

// The largest magnitude as bits: as integers they are ordered like the numbers, and NaN is above infinity, so that what
// is not finite becomes a scale that is not finite and is seen in the result.
inline __m512i magnitude(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF)); }

inline float inverse_scale(float maximum) { return maximum > 0x1p-120f ? 127.0f / maximum : 0.0f; }

inline __m512i quantize(__m512 x, __m512 inverse) { return _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)); }

inline void store_codes(std::int8_t* out, __m512i codes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtsepi32_epi8(codes));
}

// rows, out (QuantizedGroup), x, x_stride, size (a multiple of 32), offset of the weights' codes, 0 if they have minima
template <class T>
void quantize_groups(const Arg* args, std::int64_t begin, std::int64_t end) {
  const std::int64_t groups = args[4] / kGroup;
  const std::int32_t offset = static_cast<std::int32_t>(args[5]);
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = at<T>(args[2]) + row * args[3];
    QuantizedGroup* out = at<QuantizedGroup>(args[1]) + row * groups;
    for (std::int64_t g = 0; g < groups; ++g, x += kGroup, ++out) {
      const __m512 first = load(x), second = load(x + 16);
      const float maximum =
          std::bit_cast<float>(_mm512_reduce_max_epi32(_mm512_max_epi32(magnitude(first), magnitude(second))));
      const __m512 inverse = _mm512_set1_ps(inverse_scale(maximum));
      const __m512i low = quantize(first, inverse), high = quantize(second, inverse);
      store_codes(out->codes, low);
      store_codes(out->codes + 16, high);
      const std::int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
      out->scale = maximum / 127.0f;
      if (offset == 0) {
        out->sum = out->scale * sum;
      } else {
        out->initial = -offset * sum;
      }
    }
  }
}

// rows, out (padded codes, then the scale as float, then -128 * sum of codes as int32), x, x_stride, size, padded
template <class T>
void quantize_rows(const Arg* args, std::int64_t begin, std::int64_t end) {
  const std::int64_t size = args[4], padded = args[5];
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = at<T>(args[2]) + row * args[3];
    std::int8_t* out = at<std::int8_t>(args[1]) + row * (padded + 8);
    __m512i largest = _mm512_setzero_si512(), sums = _mm512_setzero_si512();
    for (std::int64_t i = 0; i < size; i += 16) {
      largest = _mm512_max_epi32(largest, magnitude(load(x + i, tail(size - i))));
    }
    const float maximum = std::bit_cast<float>(_mm512_reduce_max_epi32(largest));
    const __m512 inverse = _mm512_set1_ps(inverse_scale(maximum));
    for (std::int64_t i = 0; i < padded; i += 16) {
      const __m512i codes = quantize(load(x + i, i < size ? tail(size - i) : __mmask16(0)), inverse);
      store_codes(out + i, codes);
      sums = _mm512_add_epi32(sums, codes);
    }
    const float scale = maximum / 127.0f;
    const std::int32_t initial = -128 * _mm512_reduce_add_epi32(sums);
    std::memcpy(out + padded, &scale, 4);
    std::memcpy(out + padded + 4, &initial, 4);
  }
}

void store_scale(std::uint8_t* out, int lane, std::int64_t bytes, float value) {
  if (bytes == 2) {
    const std::uint16_t half = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(out + 2 * lane, &half, 2);
  } else {
    std::memcpy(out + 4 * lane, &value, 4);
  }
}

// panels, out, codes, vectors, flip (xor of each byte), columns, groups, scale_bytes (0: scales are
// kept elsewhere), scales, minima (or 0)
void pack_panels(const Arg* args, std::int64_t begin, std::int64_t end) {
  const int vectors = static_cast<int>(args[3]);
  const std::uint32_t flip = static_cast<std::uint32_t>(args[4]) * 0x01010101u;
  const std::int64_t columns = args[5], groups = args[6], scale_bytes = args[7];
  const std::int64_t bytes = group_bytes(vectors, scale_bytes, args[9] != 0);
  for (std::int64_t panel = begin; panel < end; ++panel) {
    std::uint8_t* out = at<std::uint8_t>(args[1]) + panel * groups * bytes;
    std::memset(out, 0, groups * bytes);
    const int lanes = static_cast<int>(std::min<std::int64_t>(kPanel, columns - panel * kPanel));
    for (int lane = 0; lane < lanes; ++lane) {
      const std::int64_t column = panel * kPanel + lane;
      const std::uint8_t* codes = at<std::uint8_t>(args[2]) + column * groups * vectors * 4;
      for (std::int64_t g = 0; g < groups; ++g) {
        std::uint8_t* group = out + g * bytes;
        for (int v = 0; v < vectors; ++v) {
          std::uint32_t word;
          std::memcpy(&word, codes + (g * vectors + v) * 4, 4);
          word ^= flip;
          std::memcpy(group + (lane / 16 * vectors + v) * 64 + lane % 16 * 4, &word, 4);
        }
        if (scale_bytes == 0) continue;
        group += 2 * vectors * 64;
        store_scale(group, lane, scale_bytes, at<float>(args[8])[column * groups + g]);
        if (args[9] != 0) {
          store_scale(group + kPanel * scale_bytes, lane, scale_bytes, at<float>(args[9])[column * groups + g]);
        }
      }
    }
  }
}

float load_scale(const std::uint8_t* scales, int lane, std::int64_t bytes) {
  if (bytes == 4) {
    float value;
    std::memcpy(&value, scales + 4 * lane, 4);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, scales + 2 * lane, 2);
  return _cvtsh_ss(half);
}

// rows, out [rows, size], ids, id_bytes, packed, vectors, offset (subtracted from codes), columns, size, scale_bytes
// (0: scales belong to columns), scales of columns, whether there are minima
template <class T>
void unpack_rows(const Arg* args, std::int64_t begin, std::int64_t end) {
  const int vectors = static_cast<int>(args[5]);
  const __m512 offset = _mm512_set1_ps(static_cast<float>(args[6]));
  const std::int64_t columns = args[7], size = args[8], scale_bytes = args[9], groups = ceil_div(size, kGroup);
  const bool minima = args[11] != 0;
  const std::int64_t bytes = group_bytes(vectors, scale_bytes, minima);
  for (std::int64_t row = begin; row < end; ++row) {
    T* out = at<T>(args[1]) + row * size;
    const std::int64_t id = args[3] == 8 ? at<std::int64_t>(args[2])[row] : at<std::int32_t>(args[2])[row];
    const bool known = id >= 0 && id < columns;
    const int lane = known ? static_cast<int>(id % kPanel) : 0;
    const std::uint8_t* panel = at<std::uint8_t>(args[4]) + (known ? id / kPanel : 0) * groups * bytes;
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::uint8_t* group = panel + g * bytes;
      alignas(16) std::uint32_t codes[kGroup / 4];
      for (int v = 0; v < kByteVectors; ++v) {
        std::uint32_t word;
        std::memcpy(&word, group + (lane / 16 * vectors + v % vectors) * 64 + lane % 16 * 4, 4);
        codes[v] = vectors == kByteVectors ? word : word >> v / vectors * 4 & 0x0F0F0F0Fu;
      }
      const std::uint8_t* scales = group + 2 * vectors * 64;
      float scale = scale_bytes ? load_scale(scales, lane, scale_bytes) : at<float>(args[10])[known ? id : 0];
      if (!known) scale = std::numeric_limits<float>::quiet_NaN();  // an id out of range is seen, not read
      const float minimum = minima ? load_scale(scales + kPanel * scale_bytes, lane, scale_bytes) : 0.0f;
      for (int i = 0; i < kGroup && g * kGroup + i < size; i += 16) {
        const __m512i bytes16 = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(codes + i / 4)));
        const __m512 code = _mm512_sub_ps(_mm512_cvtepi32_ps(bytes16), offset);
        store(out + g * kGroup + i, _mm512_fmadd_ps(code, _mm512_set1_ps(scale), _mm512_set1_ps(minimum)),
              tail(size - g * kGroup - i));
      }
    }
  }
}

std::int64_t rows(const Arg* args) { return args[0]; }

const Register kernels[] = {
    Register({"quantize_groups_float32", 6, rows, quantize_groups<float>, true}),
    Register({"quantize_groups_bfloat16", 6, rows, quantize_groups<bfloat16>, true}),
    Register({"quantize_rows_float32", 6, rows, quantize_rows<float>, true}),
    Register({"quantize_rows_bfloat16", 6, rows, quantize_rows<bfloat16>, true}),
    Register({"pack_panels", 10, rows, pack_panels}),
    Register({"unpack_rows_float32", 12, rows, unpack_rows<float>, true}),
    Register({"unpack_rows_bfloat16", 12, rows, unpack_rows<bfloat16>, true}),
};

}  // namespace
}  // namespace wk
