// Root mean square norm, alone or with the addition of a residual: float32 sums, one rounding of the result.
#include "program.h"
#include "vectors.h"

namespace wk {
namespace {

__m512 factor(__m512 squares, std::int64_t size, double eps) {
  return _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + float(eps)));
}

template <class T, class W>
void scale(T* out, const T* x, __m512 factor, const W* weight, std::int64_t size) {
  for (std::int64_t i = 0; i < size; i += 16) {
    const __mmask16 mask = tail(size - i);
    store(out + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i, mask), factor), load(weight + i, mask)), mask);
  }
}

// rows, out, x, x_stride, weight, groups, size, eps: each row has `groups` vectors, one after the other
template <class T, class W>
void rms_norm(const Arg* args, std::int64_t begin, std::int64_t end) {
  const std::int64_t groups = args[5], size = args[6];
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t group = 0; group < groups; ++group) {
      const T* x = at<T>(args[2]) + row * args[3] + group * size;
      __m512 squares = _mm512_setzero_ps();
      for (std::int64_t i = 0; i < size; i += 16) {
        const __m512 value = load(x + i, tail(size - i));
        squares = _mm512_fmadd_ps(value, value, squares);
      }
      T* out = at<T>(args[1]) + (row * groups + group) * size;
      scale(out, x, factor(squares, size, real(args[7])), at<W>(args[4]), size);
    }
  }
}

// rows, out, x, residual (in place), weight, size, eps; all contiguous
template <class T, class W>
void fused_add_rms_norm(const Arg* args, std::int64_t begin, std::int64_t end) {
  const std::int64_t size = args[5];
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = at<T>(args[2]) + row * size;
    T* residual = at<T>(args[3]) + row * size;
    __m512 squares = _mm512_setzero_ps();
    for (std::int64_t i = 0; i < size; i += 16) {
      const __mmask16 mask = tail(size - i);
      store(residual + i, _mm512_add_ps(load(x + i, mask), load(residual + i, mask)), mask);
      const __m512 value = load(residual + i, mask);  // as rounded, which is what the next layer adds to
      squares = _mm512_fmadd_ps(value, value, squares);
    }
    scale(at<T>(args[1]) + row * size, residual, factor(squares, size, real(args[6])), at<W>(args[4]), size);
  }
}

std::int64_t rows(const Arg* args) { return args[0]; }

const Register kernels[] = {
    // by the types of activations and of weights
    Register({"rms_norm_float32_float32", 8, rows, rms_norm<float, float>, true}),
    Register({"rms_norm_bfloat16_bfloat16", 8, rows, rms_norm<bfloat16, bfloat16>, true}),
    Register({"rms_norm_bfloat16_float32", 8, rows, rms_norm<bfloat16, float>, true}),
    Register({"fused_add_rms_norm_float32_float32", 7, rows, fused_add_rms_norm<float, float>, true}),
    Register({"fused_add_rms_norm_bfloat16_bfloat16", 7, rows, fused_add_rms_norm<bfloat16, bfloat16>, true}),
    Register({"fused_add_rms_norm_bfloat16_float32", 7, rows, fused_add_rms_norm<bfloat16, float>, true}),
};

}  // namespace
}  // namespace wk
