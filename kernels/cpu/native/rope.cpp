// Rotary position embedding in place, the two halves of the rotated dimensions paired. In float32, rounded once.
#include <initializer_list>

#include "program.h"
#include "vectors.h"

namespace wk {
namespace {

// rows, query, its stride, heads, key, its stride, heads, dim, cos, its stride, sin, its stride, pairs of a head
template <class T>
void rotary_embedding(const Arg* args, std::int64_t begin, std::int64_t end) {
  const std::int64_t dim = args[7], half = args[12];
  for (std::int64_t row = begin; row < end; ++row) {
    const T* cosines = at<T>(args[8]) + row * args[9];
    const T* sines = at<T>(args[10]) + row * args[11];
    for (const Arg* heads : {args + 1, args + 4}) {  // address, stride, number
      T* x = at<T>(heads[0]) + row * heads[1];
      for (std::int64_t head = 0; head < heads[2]; ++head, x += dim) {
        for (std::int64_t i = 0; i < half; i += 16) {
          const __mmask16 mask = tail(half - i);
          const __m512 cos = load(cosines + i, mask), sin = load(sines + i, mask);
          const __m512 first = load(x + i, mask), second = load(x + half + i, mask);
          store(x + i, _mm512_sub_ps(_mm512_mul_ps(first, cos), _mm512_mul_ps(second, sin)), mask);
          store(x + half + i, _mm512_add_ps(_mm512_mul_ps(second, cos), _mm512_mul_ps(first, sin)), mask);
        }
      }
    }
  }
}

std::int64_t rows(const Arg* args) { return args[0]; }

const Register kernels[] = {
    Register({"rotary_embedding_float32", 13, rows, rotary_embedding<float>, true}),
    Register({"rotary_embedding_bfloat16", 13, rows, rotary_embedding<bfloat16>, true}),
};

}  // namespace
}  // namespace wk
