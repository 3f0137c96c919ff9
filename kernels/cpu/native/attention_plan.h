// How a call of attention is cut into pieces, from what the tables say when it runs.
#pragma once

#include <algorithm>

#include "program.h"

namespace wk::attention {

constexpr std::int64_t kSplit = 512;
constexpr std::int64_t kUnitRows = 96;   // that share a packed tile: query tokens times heads of a group
constexpr std::int64_t kCounters = 256;  // int32 at the front of the workspace, 0 between calls

inline std::int64_t rounded(std::int64_t n) { return (n + 15) / 16 * 16; }

// A recorded call has all rows of the tables: behind the last one of this step is what other steps have left there.
inline std::int64_t rows_with_tokens(const std::int32_t* starts, std::int64_t table_rows, std::int64_t tokens) {
  std::int64_t rows = 0;
  while (rows < table_rows && starts[rows] < tokens) ++rows;
  return rows;
}

// The arguments: rows, out, query, query stride, key cache, value cache, block stride of both, block table, its stride,
// query_start_loc, seq_lens, number of table rows, heads, kv heads, dim, block size, scale, sliding window or 0,
// workspace (zeros before the first call; 64 bytes more than its size), its size in float32.
struct Problem {
  explicit Problem(const Arg* a)
      : tokens(a[0]), out(a[1]), query(a[2]), query_stride(a[3]), keys(a[4]), values(a[5]), block_stride(a[6]),
        table(at<std::int32_t>(a[7])), table_stride(a[8]), starts(at<std::int32_t>(a[9])),
        seq_lens(at<std::int32_t>(a[10])), table_rows(rows_with_tokens(starts, a[11], tokens)), heads(a[12]),
        kv_heads(a[13]), dim(a[14]), block_size(a[15]), scale(real(a[16])), window(a[17]),
        workspace(at<float>((a[18] + 63) / 64 * 64)), workspace_size(a[19]), group(heads / kv_heads),
        unit_tokens(std::max<std::int64_t>(1, kUnitRows / group)) {}

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

// A row of the tables, and how it is cut: into units of query tokens or, when it is one unit over many keys, into
// splits of keys; and by kv heads, unless the row is a small part of the whole: then a piece reads the memory of all
// heads at once. How it is cut has no influence on results.
struct Row {
  std::int64_t index, first_token, num_tokens, seq_len;
  std::int64_t units = 1, splits = 1, heads = 1;  // one of the first two is 1
  std::int64_t partials = 0, counters = 0;        // of its splits: where, in 32 bits from the workspace's begin
};

// Walks over the rows that have tokens, and hands out the workspace; who gets none is not cut into splits.
class Walk {
 public:
  explicit Walk(const Problem& problem) : problem_(problem), last_(problem.starts[problem.table_rows]) {}

  bool next(Row& row) {
    const std::int32_t* starts = problem_.starts;
    while (index_ < problem_.table_rows && starts[index_] != last_) {
      const std::int64_t index = index_++;
      const std::int64_t count = starts[index + 1] - starts[index];
      if (count == 0) continue;
      row = {index, starts[index], count, problem_.seq_lens[index]};
      if (count > problem_.unit_tokens) {
        row.units = (count + problem_.unit_tokens - 1) / problem_.unit_tokens;
      } else if (row.seq_len > kSplit) {
        cut(row);
      }
      const std::int64_t together = count * problem_.heads;  // query rows of all heads
      row.heads = together <= kUnitRows && 8 * count <= problem_.tokens * row.splits ? 1 : problem_.kv_heads;
      return true;
    }
    return false;
  }

 private:
  void cut(Row& row) {
    const std::int64_t splits =
        (row.seq_len - 1) / kSplit - problem_.first_seen(row.seq_len - row.num_tokens) / kSplit + 1;
    const std::int64_t needed = splits * problem_.kv_heads * problem_.partial_size(row.num_tokens);
    if (partials_ + needed > problem_.workspace_size || counters_ + problem_.kv_heads > kCounters) return;
    row.splits = splits;
    row.partials = partials_;
    row.counters = counters_;
    partials_ += needed;
    counters_ += problem_.kv_heads;
  }

  const Problem& problem_;
  const std::int64_t last_;
  std::int64_t index_ = 0, partials_ = kCounters, counters_ = 0;
};

// Query tokens [begin, end) of a row, heads of some groups, all keys or one split of them.
struct Piece {
  Row row;
  std::int64_t begin, end, head, heads, split;
};

class Pieces {
 public:
  Pieces(const Problem& problem, std::int64_t begin) : problem_(problem), walk_(problem), next_(begin) {}

  bool next(Piece& piece) {
    while (next_ >= base_ + count_) {
      base_ += count_;
      count_ = 0;
      if (!walk_.next(row_)) return false;
      count_ = row_.units * row_.splits * row_.heads;
    }
    const std::int64_t number = (next_ - base_) / row_.heads, heads = problem_.kv_heads / row_.heads;
    piece = {row_, 0, row_.num_tokens, (next_ - base_) % row_.heads * heads, heads, 0};
    if (row_.splits > 1) {
      piece.split = number;
    } else {  // the last unit sees most: first, so that the threads end together
      piece.begin = (row_.units - 1 - number) * problem_.unit_tokens;
      piece.end = std::min(piece.begin + problem_.unit_tokens, row_.num_tokens);
    }
    ++next_;
    return true;
  }

 private:
  const Problem& problem_;
  Walk walk_;
  Row row_{};
  std::int64_t base_ = 0, count_ = 0;  // pieces before the row, and of the row
  std::int64_t next_;
};

}  // namespace wk::attention
