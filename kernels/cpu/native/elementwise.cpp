// What lies between the products: gated activation, sums, copies, and the angles of the rotary embedding.
#include "program.h"
#include "vectors.h"

namespace wk {
namespace {

std::int64_t rows(const Arg* args) { return args[0]; }

// rows, out, x, x_stride, size: out [rows, size] = silu(x[:, :size]) * x[:, size : 2 size]
template <class T>
void silu_and_mul(const Arg* args, std::int64_t begin, std::int64_t end) {
  const std::int64_t size = args[4];
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 sign = _mm512_set1_ps(-0.0f);
  for (std::int64_t row = begin; row < end; ++row) {
    const T* gate = at<T>(args[2]) + row * args[3];
    const T* up = gate + size;
    T* out = at<T>(args[1]) + row * size;
    for (std::int64_t i = 0; i < size; i += 16) {
      const __mmask16 mask = tail(size - i);
      const __m512 x = load(gate + i, mask);
      const __m512 small = exp(_mm512_or_ps(x, sign));  // e^-|x| cannot overflow
      const __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ);
      const __m512 sigmoid = _mm512_div_ps(_mm512_mask_blend_ps(positive, small, one), _mm512_add_ps(one, small));
      store(out + i, _mm512_mul_ps(_mm512_mul_ps(x, sigmoid), load(up + i, mask)), mask);
    }
  }
}

// rows, out, a, b, size; all contiguous
template <class T>
void add(const Arg* args, std::int64_t begin, std::int64_t end) {
  const std::int64_t size = args[4] * (end - begin);
  const T* a = at<T>(args[2]) + args[4] * begin;
  const T* b = at<T>(args[3]) + args[4] * begin;
  T* out = at<T>(args[1]) + args[4] * begin;
  for (std::int64_t i = 0; i < size; i += 16) {
    const __mmask16 mask = tail(size - i);
    store(out + i, _mm512_add_ps(load(a + i, mask), load(b + i, mask)), mask);
  }
}

// rows, out, x, bytes of a row; contiguous
void copy(const Arg* args, std::int64_t begin, std::int64_t end) {
  std::memcpy(at<char>(args[1]) + args[3] * begin, at<char>(args[2]) + args[3] * begin, args[3] * (end - begin));
}

// rows, cos, sin [rows, half], positions int64, inv_freq float32 [half], half, scaling
template <class T>
void rotary_cos_sin(const Arg* args, std::int64_t begin, std::int64_t end) {
  const std::int64_t half = args[5];
  const float scaling = float(real(args[6]));
  const float* inv_freq = at<float>(args[4]);
  alignas(64) float cosines[16], sines[16];
  for (std::int64_t row = begin; row < end; ++row) {
    const float position = float(at<std::int64_t>(args[3])[row]);
    for (std::int64_t i = 0; i < half; i += 16) {
      for (std::int64_t j = 0; j < 16 && i + j < half; ++j) {
        const float angle = position * inv_freq[i + j];
        cosines[j] = std::cos(angle) * scaling;
        sines[j] = std::sin(angle) * scaling;
      }
      const __mmask16 mask = tail(half - i);
      store(at<T>(args[1]) + row * half + i, _mm512_load_ps(cosines), mask);
      store(at<T>(args[2]) + row * half + i, _mm512_load_ps(sines), mask);
    }
  }
}

const Register kernels[] = {
    Register({"silu_and_mul_float32", 5, rows, silu_and_mul<float>, true}),
    Register({"silu_and_mul_bfloat16", 5, rows, silu_and_mul<bfloat16>, true}),
    Register({"add_float32", 5, rows, add<float>, true}),
    Register({"add_bfloat16", 5, rows, add<bfloat16>, true}),
    Register({"copy", 4, rows, copy, true}),
    Register({"rotary_cos_sin_float32", 7, rows, rotary_cos_sin<float>, true}),
    Register({"rotary_cos_sin_bfloat16", 7, rows, rotary_cos_sin<bfloat16>, true}),
};

}  // namespace
}  // namespace wk
