// Choosing a token from logits, without a copy of the vocabulary: the largest, or the inverse CDF of the softmax.
#include "program.h"
#include "vectors.h"

#include <algorithm>
#include <limits>

namespace wk {
namespace {

constexpr std::int64_t kBlock = 128;  // tokens whose weights are summed in float32, as in the reference

std::int64_t rows(const Arg* args) { return args[0]; }

// Largest logit; NaN if there is one.
float largest(const float* logits, std::int64_t size) {
  __m512 most[4];
  __mmask16 nan = 0;
  for (auto& part : most) part = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  std::int64_t i = 0;
  for (; i + 64 <= size; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const __m512 x = _mm512_loadu_ps(logits + i + 16 * j);
      nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      most[j] = _mm512_max_ps(most[j], x);
    }
  }
  for (; i < size; i += 16) {
    const __mmask16 mask = tail(size - i);
    const __m512 x = load(logits + i, mask);
    nan |= _mm512_mask_cmp_ps_mask(mask, x, x, _CMP_UNORD_Q);
    most[0] = _mm512_mask_max_ps(most[0], mask, most[0], x);
  }
  if (nan) return std::numeric_limits<float>::quiet_NaN();
  return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])));
}

// rows, out int64, logits float32, stride, size
void greedy_tokens(const Arg* args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const float* logits = at<float>(args[2]) + row * args[3];
    const float most = largest(logits, args[4]);
    std::int64_t token = -1;
    if (std::isfinite(most)) {
      const __m512 wanted = _mm512_set1_ps(most);
      for (std::int64_t i = 0; token < 0; i += 16) {
        const __mmask16 mask = tail(args[4] - i);
        const __mmask16 equal = _mm512_mask_cmp_ps_mask(mask, load(logits + i, mask), wanted, _CMP_EQ_OQ);
        if (equal) token = i + __builtin_ctz(equal);
      }
    }
    at<std::int64_t>(args[1])[row] = token;
  }
}

// Sum of e^(logit - most) over a block, and the weights themselves where `weights` is given.
float block_sum(const float* logits, std::int64_t size, __m512 most, float* weights) {
  __m512 sum = _mm512_setzero_ps();
  for (std::int64_t i = 0; i < size; i += 16) {
    const __mmask16 mask = tail(size - i);
    const __m512 weight = _mm512_maskz_mov_ps(mask, exp(_mm512_sub_ps(load(logits + i, mask), most)));
    if (weights != nullptr) _mm512_storeu_ps(weights + i, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  return _mm512_reduce_add_ps(sum);
}

// rows, out int64, logits float32, stride, size, uniform float64 [rows]
void sample_tokens(const Arg* args, std::int64_t begin, std::int64_t end) {
  const std::int64_t size = args[4], blocks = (size + kBlock - 1) / kBlock;
  double* ends = static_cast<double*>(scratch(blocks * sizeof(double)));  // the CDF at the end of each block
  for (std::int64_t row = begin; row < end; ++row) {
    const float* logits = at<float>(args[2]) + row * args[3];
    const float top = largest(logits, size);
    std::int64_t token = -1;
    if (std::isfinite(top)) {
      const __m512 most = _mm512_set1_ps(top);
      double total = 0;
      for (std::int64_t b = 0; b < blocks; ++b) {
        total += block_sum(logits + b * kBlock, std::min(kBlock, size - b * kBlock), most, nullptr);
        ends[b] = total;
      }
      const double target = at<double>(args[5])[row] * total;
      // Where the CDF first exceeds the target, but no further than where it ends to rise.
      const std::int64_t block = std::min(std::upper_bound(ends, ends + blocks, target) - ends,
                                          std::lower_bound(ends, ends + blocks, total) - ends);
      alignas(64) float weights[kBlock];
      const std::int64_t count = std::min(kBlock, size - block * kBlock);
      block_sum(logits + block * kBlock, count, most, weights);
      double mass = block == 0 ? 0.0 : ends[block - 1];
      for (std::int64_t i = 0; i < count; ++i) {
        mass += weights[i];
        if (weights[i] > 0) token = block * kBlock + i;  // never one without probability
        if (mass > target && weights[i] > 0) break;
      }
    }
    at<std::int64_t>(args[1])[row] = token;
  }
}

const Register kernels[] = {
    Register({"greedy_tokens", 5, rows, greedy_tokens, true}),
    Register({"sample_tokens", 6, rows, sample_tokens, true}),
};

}  // namespace
}  // namespace wk
