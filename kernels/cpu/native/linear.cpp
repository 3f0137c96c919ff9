// Products with dense weights, and rows of them. A weight [outputs, inputs] lies in panels of 32 outputs: [panel][step]
// [output][4 bytes], where a step is one float32 or a pair of bfloat16 of each row; zeros fill up panels and pairs.
// Each element of a result is one float32 sum over the steps in their order: its bits do not depend on the other rows.
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "program.h"
#include "vectors.h"

namespace wk {
namespace {

constexpr std::int64_t kPanel = 32;   // outputs: two vectors of sums
constexpr std::int64_t kTile = 14;    // rows that share what is loaded of a panel: 28 sums in 32 registers
constexpr std::int64_t kBlock = 128;  // rows, at most, that stay in the L2 cache while the panels go by
constexpr std::int64_t kAhead = 12288;  // bytes of a weight that are on their way where one tile is all

template <class T>
constexpr std::int64_t kPerStep = 4 / sizeof(T);

struct Linear {
  explicit Linear(const Arg* args)
      : rows(args[0]),
        out(args[1]),
        x(args[2]),
        x_stride(args[3]),
        packed(args[4]),
        bias(args[5]),
        inputs(args[6]),
        outputs(args[7]),
        panels((outputs + kPanel - 1) / kPanel),
        blocks((rows + kBlock - 1) / kBlock) {}

  std::int64_t rows;
  Arg out, x;
  std::int64_t x_stride;
  Arg packed, bias;
  std::int64_t inputs, outputs, panels, blocks;
};

template <class T>
std::int64_t num_steps(std::int64_t inputs) {
  return (inputs + kPerStep<T> - 1) / kPerStep<T>;
}

template <class T>
__m512 multiply_add(__m512 x, __m512 weight, __m512 sum) {
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_fmadd_ps(x, weight, sum);
  } else {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weight);
  }
}

// One step of R rows, which lie offset[i] bytes behind `lower` and `upper`; bytes: those of the step that are inputs.
template <class T, int R, int bytes>
inline void step(__m512 (&sums)[R][2], const char* lower, const char* upper, const std::int64_t* offset,
                 const float* weight) {
  constexpr int half = (R + 1) / 2;
  const __m512 left = _mm512_loadu_ps(weight), right = _mm512_loadu_ps(weight + 16);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    std::int32_t value = 0;
    std::memcpy(&value, r < half ? lower + offset[r] : upper + offset[r - half], bytes);
    const __m512 x = _mm512_castsi512_ps(_mm512_set1_epi32(value));
    sums[r][0] = multiply_add<T>(x, left, sums[r][0]);
    sums[r][1] = multiply_add<T>(x, right, sums[r][1]);
  }
}

// R rows from `row` on, times a panel. Meanwhile it fetches what comes later: two lines from `ahead` on at each step.
template <class T, class Out, int R>
void tile(const Linear& job, std::int64_t row, std::int64_t panel, const char* ahead, std::int64_t ahead_step) {
  const std::int64_t stride = job.x_stride * sizeof(T);
  const char* lower = at<const char>(job.x) + row * stride;
  const char* upper = lower + (R + 1) / 2 * stride;
  asm("" : "+r"(upper));  // a second pointer to the same offsets, for which there are registers enough
  const std::int64_t offset[] = {0, stride, 2 * stride, 3 * stride, 4 * stride, 5 * stride, 6 * stride};

  __m512 sums[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  const float* weight = at<const float>(job.packed) + panel * num_steps<T>(job.inputs) * kPanel;
  const float* const end = weight + job.inputs / kPerStep<T> * kPanel;
  for (; weight != end; weight += kPanel, lower += 4, upper += 4, ahead += ahead_step) {
    _mm_prefetch(ahead, _MM_HINT_T0);
    _mm_prefetch(ahead + 64, _MM_HINT_T0);
    step<T, R, 4>(sums, lower, upper, offset, weight);
  }
  if (job.inputs % kPerStep<T> != 0) step<T, R, sizeof(T)>(sums, lower, upper, offset, weight);

#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const std::int64_t column = panel * kPanel + half * 16;
    if (column >= job.outputs) break;
    const __mmask16 mask = tail(job.outputs - column);
    Out* out = at<Out>(job.out) + row * job.outputs + column;
    const __m512 bias = job.bias != 0 ? load(at<const T>(job.bias) + column, mask) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(out + r * job.outputs, _mm512_add_ps(sums[r][half], bias), mask);
  }
}

template <class T, class Out, int... R>
constexpr auto tiles_of(std::integer_sequence<int, R...>) {
  return std::array{tile<T, Out, R + 1>...};
}

// A piece is a block of rows times a panel.
std::int64_t pieces(const Arg* args) {
  const Linear job(args);
  return job.panels * job.blocks;
}

// rows, out, x, x_stride, packed, bias (or 0), inputs, outputs; out contiguous, the stride in elements
template <class T, class Out>
void linear(const Arg* args, std::int64_t begin, std::int64_t end) {
  static constexpr auto tiles = tiles_of<T, Out>(std::make_integer_sequence<int, kTile>());
  const Linear job(args);
  const std::int64_t panel_bytes = num_steps<T>(job.inputs) * kPanel * 4;
  for (std::int64_t piece = begin; piece < end; ++piece) {
    const std::int64_t block = piece / job.panels, panel = piece % job.panels;
    const std::int64_t first = job.rows * block / job.blocks;
    const std::int64_t size = job.rows * (block + 1) / job.blocks - first;
    const std::int64_t count = (size + kTile - 1) / kTile;
    const char* const weight = at<const char>(job.packed) + panel * panel_bytes;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = first + size * i / count, next_row = first + size * (i + 1) / count;
      const auto run = tiles[next_row - row - 1];
      if (count == 1) {
        run(job, row, panel, weight + kAhead, 128);
      } else {  // the first two tiles fetch half of the next panel each
        run(job, row, panel, weight + panel_bytes + i % 2 * panel_bytes / 2, i < 2 ? 64 : 0);
      }
    }
  }
}

// rows, out, ids, bytes of an id, packed, inputs, outputs; a wrong id reads the row that is next to it
template <class T>
void linear_rows(const Arg* args, std::int64_t begin, std::int64_t end) {
  const std::int64_t inputs = args[5], outputs = args[6], whole = inputs / kPerStep<T>;
  for (std::int64_t row = begin; row < end; ++row) {
    std::int64_t id = args[3] == 8 ? at<const std::int64_t>(args[2])[row] : at<const std::int32_t>(args[2])[row];
    id = std::clamp<std::int64_t>(id, 0, outputs - 1);
    const float* from = at<const float>(args[4]) + id / kPanel * num_steps<T>(inputs) * kPanel + id % kPanel;
    char* to = at<char>(args[1]) + row * inputs * sizeof(T);
    for (std::int64_t i = 0; i < whole; ++i) std::memcpy(to + 4 * i, from + i * kPanel, 4);
    std::memcpy(to + 4 * whole, from + whole * kPanel, inputs % kPerStep<T> * sizeof(T));
  }
}

std::int64_t rows(const Arg* args) { return args[0]; }

const Register kernels[] = {
    Register({"linear_float32", 8, pieces, linear<float, float>}),
    Register({"linear_bfloat16", 8, pieces, linear<bfloat16, bfloat16>}),
    Register({"linear_logits_bfloat16", 8, pieces, linear<bfloat16, float>}),
    Register({"linear_rows_float32", 7, rows, linear_rows<float>, true}),
    Register({"linear_rows_bfloat16", 7, rows, linear_rows<bfloat16>, true}),
};

}  // namespace
}  // namespace wk
