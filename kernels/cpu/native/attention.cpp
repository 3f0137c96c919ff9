// Attention over the paged cache for any mix of rows. Nothing is gathered: tiles of keys are read where they lie, once
// for all query heads that share them. Keys are taken in tiles of 64 and those in splits of 512, at fixed positions; a
// split is one online softmax, and splits are merged in order. So the bits of a token's result depend on its query and
// the keys that it sees, not on the rest of the batch, chunks, blocks or threads.
#include <array>
#include <atomic>
#include <utility>

#include "attention_pack.h"
#include "attention_plan.h"

namespace wk::attention {
namespace {

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
    const std::int64_t dim = problem.dim, rows = rounded(std::max(kUnitRows, problem.group));
    const std::int64_t tile = kTile / kStep<T> * dim, token = problem.kv_heads * dim;
    char* memory = static_cast<char*>(
        scratch(4 * (2 * tile + rows * dim / kStep<T> + 2 * rows * dim + rows * (16 + 4) + token) + 16 * rows));
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
    take(nothing_, token);
    take(first_, rows);
    take(end_, rows);
    std::fill_n(nothing_, token, T{});
  }

  // `after`, if there is one, is probably the next piece of this thread.
  void run(const Piece& piece, const Piece* after) {
    take_queries(piece);
    const std::int64_t first_split = first_[0] / kSplit;
    const std::int64_t splits = (end_[rows_ - 1] + kSplit - 1) / kSplit - first_split;
    if (piece.row.splits > 1) {
      find(piece, first_split + piece.split, after, partial(piece, piece.split));
      std::atomic_ref<std::int32_t> done(
          reinterpret_cast<std::int32_t*>(problem_.workspace)[piece.row.counters + piece.head]);
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < splits) return;
      done.store(0, std::memory_order_relaxed);  // the last one merges
    }
    clear(merged_);
    for (std::int64_t split = 0; split < splits; ++split) {
      if (piece.row.splits > 1) {
        merge(partial(piece, split));
      } else {
        find(piece, first_split + split, after, found_);
        merge(found_);
      }
    }
    finish(piece);
  }

 private:
  Partial partial(const Piece& piece, std::int64_t split) const {
    const std::int64_t size = problem_.partial_size(piece.row.num_tokens), rows = rounded(rows_);
    const std::int64_t place = piece.head * piece.row.splits + split * piece.heads;
    float* memory = problem_.workspace + piece.row.partials + place * size;
    return {memory + 2 * rows, memory, memory + rows};
  }

  // Query rows are in order of heads, tokens, heads of a group.
  void take_queries(const Piece& piece) {
    const std::int64_t group = problem_.group, size = group * problem_.dim;
    rows_ = 0;
    for (std::int64_t head = piece.head; head < piece.head + piece.heads; ++head) {
      const std::int64_t first = piece.row.first_token + piece.begin;
      const T* query = at<T>(problem_.query) + first * problem_.query_stride + head * size;
      for (std::int64_t token = piece.begin; token < piece.end; ++token, query += problem_.query_stride) {
        std::memcpy(query_ + rows_ * problem_.dim / kStep<T>, query, size * sizeof(T));
        const std::int64_t position = piece.row.seq_len - piece.row.num_tokens + token;
        std::fill_n(first_ + rows_, group, problem_.first_seen(position));
        std::fill_n(end_ + rows_, group, position + 1);
        rows_ += group;
      }
    }
  }

  void clear(const Partial& partial) {
    std::fill_n(partial.out, rows_ * problem_.dim, 0.0f);
    std::fill_n(partial.maximum, rows_, kNone);
    std::fill_n(partial.sum, rows_, 0.0f);
  }

  // What all rows find among the keys of a split.
  void find(const Piece& piece, std::int64_t split, const Piece* after, const Partial& to) {
    static constexpr auto functions = attend_table<T>(std::make_integer_sequence<int, kMaxRows * kMaxVectors>());
    clear(to);
    std::fill_n(sums_, rows_ * 16, 0.0f);
    const Rows rows{problem_.dim, static_cast<float>(problem_.scale * 1.4426950408889634), query_, first_, end_,
                    to.out, to.maximum, sums_};
    const std::int64_t first = first_[0], stop = end_[rows_ - 1];
    const std::int64_t end = std::min((split + 1) * kSplit, stop);
    const std::int64_t known = piece.row.splits > 1 ? end : stop;  // how far this piece goes
    const std::int64_t rows_per_head = rows_ / piece.heads;
    const std::int64_t blocks = (rows_per_head + kMaxRows - 1) / kMaxRows;
    const std::int64_t block = (rows_per_head + blocks - 1) / blocks;
    tile_.start = std::max(split * kSplit, first / kTile * kTile);
    Places<T> *places = &places_[0], *later = &places_[1];
    look_up(piece, first, known, tile_.start, *places);
    const std::int64_t bytes = piece.heads * problem_.dim * sizeof(T);
    if (split == first / kSplit || piece.row.splits > 1) Ahead<T>(*places, bytes).wait();
    for (; tile_.start < end; tile_.start += kTile) {
      if (tile_.start + kTile < known || after == nullptr) {
        look_up(piece, first, known, tile_.start + kTile, *later);
      } else {
        look_up_first(*after, *later);
      }
      Ahead<T> ahead(*later, bytes);
      const int vectors = static_cast<int>((std::min(end - tile_.start, kTile) + 15) / 16);
      for (std::int64_t head = 0; head < piece.heads; ++head) {
        pack_keys(*places, ahead, vectors, head * problem_.dim, problem_.dim, tile_.keys);
        pack_values(*places, ahead, vectors, head * problem_.dim, problem_.dim, tile_.values);
        for (std::int64_t row = head * rows_per_head; row < (head + 1) * rows_per_head; row += block) {
          const std::int64_t last = std::min(row + block, (head + 1) * rows_per_head) - 1;
          const std::int64_t seen = std::min(end_[last] - tile_.start, kTile);
          if (seen <= 0 || first_[row] >= tile_.start + kTile) continue;  // it would change nothing
          functions[(last - row) * kMaxVectors + (seen + 15) / 16 - 1](rows, row, tile_);
        }
      }
      std::swap(places, later);
    }
    for (std::int64_t row = 0; row < rows_; ++row) {
      to.sum[row] = _mm512_reduce_add_ps(_mm512_load_ps(sums_ + row * 16));
    }
  }

  // Where a tile lies. Keys outside [first, end) are nobody's: they may be anything, and are taken as 0.
  void look_up(const Piece& piece, std::int64_t first, std::int64_t end, std::int64_t start, Places<T>& places) const {
    const std::int64_t low = std::max(first - start, std::int64_t{0}), high = std::min(end - start, kTile);
    if (low > 0 || high < kTile) {
      std::fill_n(places.keys, kTile, nothing_);
      std::fill_n(places.values, kTile, nothing_);
    }
    const std::int32_t* table = problem_.table + piece.row.index * problem_.table_stride;
    const std::int64_t stride = problem_.kv_heads * problem_.dim;
    std::int64_t block = (start + low) / problem_.block_size, inside = (start + low) % problem_.block_size;
    for (std::int64_t k = low; k < high; ++block, inside = 0) {
      std::int64_t offset = table[block] * problem_.block_stride + inside * stride + piece.head * problem_.dim;
      const std::int64_t stop = std::min(high, k + problem_.block_size - inside);
      for (; k < stop; ++k, offset += stride) {
        places.keys[k] = at<T>(problem_.keys) + offset;
        places.values[k] = at<T>(problem_.values) + offset;
      }
    }
  }

  // The tile that a piece begins with.
  void look_up_first(const Piece& piece, Places<T>& places) const {
    const std::int64_t before = piece.row.seq_len - piece.row.num_tokens;
    const std::int64_t first = problem_.first_seen(before + piece.begin);
    const std::int64_t start = piece.split > 0 ? (first / kSplit + piece.split) * kSplit : first / kTile * kTile;
    look_up(piece, first, before + piece.end, start, places);
  }

  void merge(const Partial& more) {
    for (std::int64_t row = 0; row < rows_; ++row) {
      const __m512 old = _mm512_set1_ps(merged_.maximum[row]), other = _mm512_set1_ps(more.maximum[row]);
      const __m512 maximum = _mm512_max_ps(old, other);
      const __m512 a = exp2<float>(_mm512_sub_ps(old, maximum)), b = exp2<float>(_mm512_sub_ps(other, maximum));
      float* out = merged_.out + row * problem_.dim;
      for (std::int64_t d = 0; d < problem_.dim; d += 16) {
        const __m512 added = _mm512_mul_ps(_mm512_load_ps(more.out + row * problem_.dim + d), b);
        _mm512_store_ps(out + d, _mm512_fmadd_ps(_mm512_load_ps(out + d), a, added));
      }
      merged_.sum[row] = merged_.sum[row] * _mm512_cvtss_f32(a) + more.sum[row] * _mm512_cvtss_f32(b);
      merged_.maximum[row] = _mm512_cvtss_f32(maximum);
    }
  }

  void finish(const Piece& piece) {
    const std::int64_t group = problem_.group, dim = problem_.dim, tokens = piece.end - piece.begin;
    for (std::int64_t row = 0; row < rows_; ++row) {
      const std::int64_t token = piece.row.first_token + piece.begin + row / group % tokens;
      const std::int64_t head = (piece.head + row / (group * tokens)) * group + row % group;
      T* out = at<T>(problem_.out) + (token * problem_.heads + head) * dim;
      const float sum = merged_.sum[row];
      const __m512 factor = _mm512_set1_ps(sum == 0.0f ? 0.0f : 1.0f / sum);  // 0: it sees no key
      for (std::int64_t d = 0; d < dim; d += 16) {
        store(out + d, _mm512_mul_ps(_mm512_load_ps(merged_.out + row * dim + d), factor));
      }
    }
  }

  const Problem& problem_;
  Tile tile_{};
  Places<T> places_[2];
  std::uint32_t* query_;
  Partial found_, merged_;
  float* sums_;
  T* nothing_;
  std::int64_t *first_, *end_;  // of each query row
  std::int64_t rows_ = 0;
};

template <class T>
void run(const Arg* args, std::int64_t begin, std::int64_t end) {
  const Problem problem(args);
  Worker<T> worker(problem);
  Pieces pieces(problem, begin);
  Piece piece, after;
  std::int64_t done = begin;
  for (bool more = pieces.next(piece); done < end && more; ++done, piece = after) {
    more = pieces.next(after);
    worker.run(piece, more ? &after : nullptr);
  }
  if (done < end) {
    const std::int64_t size = problem.heads * problem.dim, used = problem.starts[problem.table_rows];
    std::fill(at<T>(problem.out) + used * size, at<T>(problem.out) + problem.tokens * size, T{});
  }
}

std::int64_t pieces(const Arg* args) {
  const Problem problem(args);
  Walk walk(problem);
  Row row;
  std::int64_t count = problem.starts[problem.table_rows] < problem.tokens;  // tokens of no row
  while (walk.next(row)) count += row.units * row.splits * row.heads;
  return count;
}

const Register kernels[] = {
    Register({"paged_attention_float32", 20, pieces, run<float>}),
    Register({"paged_attention_bfloat16", 20, pieces, run<bfloat16>}),
};

}  // namespace
}  // namespace wk::attention
