// Attention over the paged cache for any mix of rows. Nothing is gathered: tiles of keys are read where they lie, once for
// all query heads that share them. Keys are taken in tiles of 64 and those in splits of 512, at fixed positions; a split is
// one online softmax, and splits are merged in order. So the bits of a token's result depend on its query and the keys that
// it sees, not on the rest of the batch, chunks, blocks or threads. The work is found from the tables when the call runs.
#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "attention_tile.h"
#include "program.h"

namespace wk::attention {
namespace {

constexpr std::int64_t kSplit = 512;
constexpr std::int64_t kUnitRows = 48;   // that share a packed tile: query tokens times heads of a group
constexpr std::int64_t kCounters = 256;  // int32 at the front of the workspace, 0 between calls

std::int64_t rounded(std::int64_t n) { return (n + 15) / 16 * 16; }

// A recorded call has all rows of the tables; what lies behind the last one of this step is left over from others.
std::int64_t rows_with_tokens(const std::int32_t* starts, std::int64_t table_rows, std::int64_t tokens) {
  std::int64_t rows = 0;
  while (rows < table_rows && starts[rows] < tokens) ++rows;
  return rows;
}

// rows, out, query, query stride, key cache, value cache, block stride of both, block table, its stride, query_start_loc,
// seq_lens, number of table rows, heads, kv heads, dim, block size, scale, sliding window or 0, workspace
// (zeros before the first call; 64 bytes more than its size), its size in float32
struct Problem {
  explicit Problem(const Arg* a)
      : tokens(a[0]), out(a[1]), query(a[2]), query_stride(a[3]), keys(a[4]), values(a[5]), block_stride(a[6]),
        table(at<std::int32_t>(a[7])), table_stride(a[8]), starts(at<std::int32_t>(a[9])),
        seq_lens(at<std::int32_t>(a[10])), table_rows(rows_with_tokens(at<std::int32_t>(a[9]), a[11], a[0])), heads(a[12]), kv_heads(a[13]), dim(a[14]),
        block_size(a[15]), scale(real(a[16])), window(a[17]), workspace(at<float>((a[18] + 63) / 64 * 64)), workspace_size(a[19]),
        group(heads / kv_heads), unit_tokens(std::max<std::int64_t>(1, kUnitRows / group)) {}

  const std::int64_t tokens;
  const Arg out, query;
  const std::int64_t query_stride;
  const Arg keys, values;
  const std::int64_t block_stride;
  const std::int32_t* const table;
  const std::int64_t table_stride;
  const std::int32_t* const starts;
  const std::int32_t* const seq_lens;
  const std::int64_t table_rows, heads, kv_heads, dim, block_size;
  const double scale;
  const std::int64_t window;
  float* const workspace;
  const std::int64_t workspace_size;
  const std::int64_t group;
  const std::int64_t unit_tokens;  // query tokens of a row that are computed together

  std::int64_t first_seen(std::int64_t position) const {
    return window ? std::max<std::int64_t>(0, position - window + 1) : 0;
  }

  // float32 that a split of a row of `count` tokens leaves for merging.
  std::int64_t partial_size(std::int64_t count) const { return 2 * rounded(count * group) + count * group * dim; }
};

// A row of the tables and its pieces: (unit, kv head), or (split, kv head) for a row of one unit over many keys.
struct Row {
  std::int64_t index, first_token, num_tokens, seq_len;
  std::int64_t units, splits;  // one of them is 1
  std::int64_t partials;       // where its splits leave what they found, when there are several: float32 from the
  std::int64_t counters;       // workspace's begin, as are the counters
};

// Walks over the rows that have tokens, and hands out the workspace; whether that lasts has no influence on results.
class Walk {
 public:
  explicit Walk(const Problem& problem)
      : problem_(problem),
        last_(problem.starts[problem.table_rows]) {}

  bool next(Row& row) {
    const std::int32_t* starts = problem_.starts;
    while (index_ < problem_.table_rows && starts[index_] != last_) {
      const std::int64_t r = index_++;
      const std::int64_t count = starts[r + 1] - starts[r];
      if (count == 0) continue;
      row = {r, starts[r], count, problem_.seq_lens[r], 1, 1, partials_, counters_};
      if (count > problem_.unit_tokens) {
        row.units = (count + problem_.unit_tokens - 1) / problem_.unit_tokens;
      } else if (row.seq_len > kSplit) {
        const std::int64_t first = problem_.first_seen(row.seq_len - count) / kSplit;
        const std::int64_t splits = (row.seq_len - 1) / kSplit - first + 1;
        const std::int64_t needed = splits * problem_.kv_heads * problem_.partial_size(count);
        if (splits > 1 && partials_ + needed <= problem_.workspace_size && counters_ + problem_.kv_heads <= kCounters) {
          row.splits = splits;
          partials_ += needed;
          counters_ += problem_.kv_heads;
        }
      }
      return true;
    }
    return false;
  }

 private:
  const Problem& problem_;
  const std::int64_t last_;
  std::int64_t index_ = 0, partials_ = kCounters, counters_ = 0;
};

std::int64_t pieces(const Arg* args) {
  const Problem problem(args);
  Walk walk(problem);
  Row row;
  std::int64_t count = problem.starts[problem.table_rows] < problem.tokens;  // tokens of no row
  while (walk.next(row)) count += row.units * row.splits * problem.kv_heads;
  return count;
}

// What rows of queries found in a split: out [rows][dim], the maximum of each row's scores and the sum of its weights.
struct Partial {
  float *out, *maximum, *sum;
};

template <class T, int... I>
constexpr auto attend_table(std::integer_sequence<int, I...>) {
  return std::array{&attend<T, I / kMaxVectors + 1, I % kMaxVectors + 1>...};
}

// A thread's memory, and the work of one piece in it.
template <class T>
class Worker {
 public:
  explicit Worker(const Problem& problem) : problem_(problem) {
    const std::int64_t dim = problem.dim, rows = rounded(problem.group * problem.unit_tokens);
    const std::int64_t tile = kTile / kStep<T> * dim;
    char* memory = static_cast<char*>(
        scratch(4 * (2 * tile + rows * dim / kStep<T> + 2 * rows * dim + rows * (16 + 4) + dim) + 16 * rows));
    const auto take = [&memory](auto*& pointer, std::int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory);
      memory += count * sizeof *pointer;
    };
    take(tile_.keys, tile);
    take(tile_.values, tile);
    take(query_, rows * dim / kStep<T>);
    for (Partial* partial : {&found_, &merged_}) {
      take(partial->out, rows * dim);
      take(partial->maximum, rows);
      take(partial->sum, rows);
    }
    take(sums_, rows * 16);
    take(nothing_, dim);
    take(first_, rows);
    take(end_, rows);
    std::fill_n(nothing_, dim, T{});
  }

  // Query tokens [begin, end) of a row, heads of one group.
  void unit(const Row& row, std::int64_t begin, std::int64_t end, std::int64_t head) {
    take_queries(row, begin, end, head);
    clear(merged_);
    const std::int64_t last = end_[rows_ - 1];
    for (std::int64_t split = first_[0] / kSplit; split * kSplit < last; ++split) {
      find(split, found_);
      merge(found_);
    }
    finish(row.first_token + begin, head);
  }

  // One split of a row; the thread that is last merges all of them.
  void split(const Row& row, std::int64_t number, std::int64_t head) {
    take_queries(row, 0, row.num_tokens, head);
    const std::int64_t first = first_[0] / kSplit;
    const auto partial = [&](std::int64_t n) {
      float* memory = problem_.workspace + row.partials + (head * row.splits + n) * problem_.partial_size(row.num_tokens);
      const std::int64_t rows = rounded(rows_);
      return Partial{memory + 2 * rows, memory, memory + rows};
    };
    find(first + number, partial(number));
    std::atomic_ref<std::int32_t> done(reinterpret_cast<std::int32_t*>(problem_.workspace)[row.counters + head]);
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < row.splits) return;
    done.store(0, std::memory_order_relaxed);
    clear(merged_);
    for (std::int64_t n = 0; n < row.splits; ++n) merge(partial(n));
    finish(row.first_token, head);
  }

 private:
  void take_queries(const Row& row, std::int64_t begin, std::int64_t end, std::int64_t head) {
    const std::int64_t group = problem_.group, size = group * problem_.dim;
    const T* query = at<T>(problem_.query) + (row.first_token + begin) * problem_.query_stride + head * size;
    for (std::int64_t token = begin; token < end; ++token, query += problem_.query_stride) {
      std::memcpy(query_ + (token - begin) * size / kStep<T>, query, size * sizeof(T));
      const std::int64_t position = row.seq_len - row.num_tokens + token;
      std::fill_n(first_ + (token - begin) * group, group, problem_.first_seen(position));
      std::fill_n(end_ + (token - begin) * group, group, position + 1);
    }
    rows_ = (end - begin) * group;
    table_ = problem_.table + row.index * problem_.table_stride;
    head_ = head;
  }

  void clear(const Partial& partial) {
    std::fill_n(partial.out, rows_ * problem_.dim, 0.0f);
    std::fill_n(partial.maximum, rows_, kNone);
    std::fill_n(partial.sum, rows_, 0.0f);
  }

  // What all rows find among the keys of a split.
  void find(std::int64_t split, const Partial& to) {
    static constexpr auto functions = attend_table<T>(std::make_integer_sequence<int, kMaxRows * kMaxVectors>());
    clear(to);
    std::fill_n(sums_, rows_ * 16, 0.0f);
    const Rows rows{problem_.dim, static_cast<float>(problem_.scale * 1.4426950408889634), query_, first_, end_,
                    to.out, to.maximum, sums_};
    const std::int64_t first = std::max(split * kSplit, first_[0]), end = std::min((split + 1) * kSplit, end_[rows_ - 1]);
    const std::int64_t blocks = (rows_ + kMaxRows - 1) / kMaxRows, block = (rows_ + blocks - 1) / blocks;
    tile_.start = first / kTile * kTile;
    const Memory* memory = &memory_[0];
    look_up(first, end, tile_.start, memory_[0]);
    for (; tile_.start < end; tile_.start += kTile) {
      Memory& next = memory_[memory == &memory_[0]];
      look_up(first, end, tile_.start + kTile, next);
      const int vectors = static_cast<int>((std::min(end - tile_.start, kTile) + 15) / 16);
      pack_keys(memory->keys, next.keys, vectors, problem_.dim, tile_.keys);
      pack_values(memory->values, next.values, vectors, problem_.dim, tile_.values);
      memory = &next;
      for (std::int64_t row = 0; row < rows_; row += block) {
        const std::int64_t count = std::min(block, rows_ - row);
        const std::int64_t seen = std::min(end_[row + count - 1] - tile_.start, kTile);
        if (seen <= 0 || first_[row] >= tile_.start + kTile) continue;  // it would change nothing
        functions[(count - 1) * kMaxVectors + (seen + 15) / 16 - 1](rows, row, tile_);
      }
    }
    for (std::int64_t row = 0; row < rows_; ++row) to.sum[row] = _mm512_reduce_add_ps(_mm512_load_ps(sums_ + row * 16));
  }

  struct Memory {
    Places<T> keys, values;
  };

  // Where a tile lies. Keys outside [first, end) are nobody's: they may be anything, and are taken as 0.
  void look_up(std::int64_t first, std::int64_t end, std::int64_t start, Memory& memory) const {
    const std::int64_t low = std::max(first - start, std::int64_t{0}), high = std::min(end - start, kTile);
    if (low > 0 || high < kTile) {
      std::fill_n(memory.keys, kTile, nothing_);
      std::fill_n(memory.values, kTile, nothing_);
    }
    const std::int64_t stride = problem_.kv_heads * problem_.dim;
    std::int64_t block = (start + low) / problem_.block_size, inside = (start + low) % problem_.block_size;
    for (std::int64_t k = low; k < high; ++block, inside = 0) {
      std::int64_t offset = table_[block] * problem_.block_stride + inside * stride + head_ * problem_.dim;
      for (const std::int64_t stop = std::min(high, k + problem_.block_size - inside); k < stop; ++k, offset += stride) {
        memory.keys[k] = at<T>(problem_.keys) + offset;
        memory.values[k] = at<T>(problem_.values) + offset;
      }
    }
  }

  void merge(const Partial& more) {
    for (std::int64_t row = 0; row < rows_; ++row) {
      const __m512 old = _mm512_set1_ps(merged_.maximum[row]), other = _mm512_set1_ps(more.maximum[row]);
      const __m512 maximum = _mm512_max_ps(old, other);
      const __m512 a = exp2<float>(_mm512_sub_ps(old, maximum)), b = exp2<float>(_mm512_sub_ps(other, maximum));
      float* out = merged_.out + row * problem_.dim;
      for (std::int64_t d = 0; d < problem_.dim; d += 16) {
        const __m512 added = _mm512_mul_ps(_mm512_loadu_ps(more.out + row * problem_.dim + d), b);
        _mm512_store_ps(out + d, _mm512_fmadd_ps(_mm512_load_ps(out + d), a, added));
      }
      merged_.sum[row] = merged_.sum[row] * _mm512_cvtss_f32(a) + more.sum[row] * _mm512_cvtss_f32(b);
      merged_.maximum[row] = _mm512_cvtss_f32(maximum);
    }
  }

  void finish(std::int64_t token, std::int64_t head) {
    const std::int64_t group = problem_.group, dim = problem_.dim;
    for (std::int64_t row = 0; row < rows_; ++row) {
      T* out = at<T>(problem_.out) + ((token + row / group) * problem_.heads + head * group + row % group) * dim;
      const float sum = merged_.sum[row];
      const __m512 factor = _mm512_set1_ps(sum == 0.0f ? 0.0f : 1.0f / sum);  // 0: it sees no key
      for (std::int64_t d = 0; d < dim; d += 16) {
        store(out + d, _mm512_mul_ps(_mm512_load_ps(merged_.out + row * dim + d), factor));
      }
    }
  }

  const Problem& problem_;
  Tile tile_{};
  Memory memory_[2];
  std::uint32_t* query_;
  Partial found_, merged_;
  float* sums_;
  T* nothing_;
  std::int64_t *first_, *end_;  // of each row
  std::int64_t rows_ = 0;
  const std::int32_t* table_ = nullptr;
  std::int64_t head_ = 0;
};

template <class T>
void run(const Arg* args, std::int64_t begin, std::int64_t end) {
  const Problem problem(args);
  Worker<T> worker(problem);
  Walk walk(problem);
  Row row;
  std::int64_t base = 0;
  while (base < end && walk.next(row)) {
    const std::int64_t count = row.units * row.splits * problem.kv_heads;
    for (std::int64_t piece = std::max(begin, base); piece < std::min(end, base + count); ++piece) {
      const std::int64_t number = (piece - base) / problem.kv_heads, head = (piece - base) % problem.kv_heads;
      if (row.splits > 1) {
        worker.split(row, number, head);
      } else {  // the last unit sees most: first, so that the threads end together
        const std::int64_t first = (row.units - 1 - number) * problem.unit_tokens;
        worker.unit(row, first, std::min(first + problem.unit_tokens, row.num_tokens), head);
      }
    }
    base += count;
  }
  if (base < end) {
    const std::int64_t size = problem.heads * problem.dim, used = problem.starts[problem.table_rows];
    std::fill(at<T>(problem.out) + used * size, at<T>(problem.out) + problem.tokens * size, T{});
  }
}

const Register kernels[] = {
    Register({"paged_attention_float32", 20, pieces, run<float>}),
    Register({"paged_attention_bfloat16", 20, pieces, run<bfloat16>}),
};

}  // namespace
}  // namespace wk::attention
