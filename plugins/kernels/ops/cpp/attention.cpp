// Attention of few query tokens per row over KV pages on a CPU, and the QK-norm, RoPE and KV store before it.
//
// plugins/attention/paged.py has attention in plain torch, minisgl/attention/__init__.py the store; both describe the
// arguments. Three ideas from the literature:
// - Pages are read in place (PagedAttention, arXiv:2309.06180). Each key and value is read from memory once, for all
//   query heads that share it and for all query tokens of its row.
// - The softmax is computed in one pass: a running maximum and a running sum, both corrected when the maximum grows
//   (online softmax, arXiv:1805.02867; FlashAttention, arXiv:2205.14135).
// - A long row is split into parts that different threads compute, and the parts are merged at the end
//   (Flash-Decoding, Dao et al., 2023).
// - The query heads that share a KV head, and query tokens of the same row, are computed together, four at a time: each
//   load of a key or value serves all of them (grouped-query attention, arXiv:2305.13245).
// The borders of tiles and splits are at fixed positions of a row. So the result of a query does not depend on the other
// rows, on the number of threads, or on how many query tokens its row has.
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "operations.h"
#include "threads.h"
#include "values.h"
#include "vector.h"

namespace {

using namespace minisgl;

constexpr int kTile = kLanes;  // positions between two corrections of the running softmax
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kSplit = 512;  // positions between two merges; a multiple of kTile
constexpr int kTokens = 16;  // query tokens of one work item
// With more queries than this, a tile is first copied. Otherwise it would be converted to float again and again, and its
// rows, whose addresses differ by a power of two, would displace each other from the cache.
constexpr int kQueriesInPlace = 8;
constexpr int64_t kWorkPerThread = 1 << 15;  // multiply-adds that are worth waking another thread
constexpr int kItemsPerThread = 4;  // more than one, because items differ in cost

// Positions, and vectors of a value, whose sums for four queries are computed at the same time: the sums take half of the
// registers.
constexpr int kPositions = kRegisters / 8, kChunk = kRegisters / 8;

struct Problem {
  const void *q, *keys, *values;  // q [tokens, q_heads, dim]; keys and values [locations, kv_heads, dim]
  void* out;                      // like q
  const int32_t *page_table, *req_pool_indices, *seq_lens, *cu_seqlens_q;
  int64_t q_stride, out_stride, table_stride;  // in elements, between tokens or between rows of the page table
  int page_size, q_heads, kv_heads, dim, window;
  float scale, soft_cap;
  const float* sinks;  // [q_heads] the score of each head's sink; nullptr: the layer has none

  int Group() const { return q_heads / kv_heads; }
  int NumQueries(int row) const { return cu_seqlens_q[row + 1] - cu_seqlens_q[row]; }
  // The positions that query token `token` of a row attends to are [First, Last).
  int Last(int row, int token) const { return seq_lens[row] - NumQueries(row) + token + 1; }
  int First(int row, int token) const { return window < 0 ? 0 : std::max(0, Last(row, token) - window); }
};

// The work of one call of Attend: some query tokens and some KV heads of one row, for the splits that begin in
// [begin, end). Its partial results begin at `partial`: for each KV head, query token and query head the maximum of the
// scores, the sum of the weights, and the weighted sum of the values.
struct Item {
  int row, head, num_heads;    // the first KV head, and their number
  int token, num_tokens;       // the first query token of the row, and their number
  int begin, end;              // positions [begin, end)
  int64_t partial;
  int group;  // number of the group of items that differ in their positions only: the last to finish merges the group
};

// The positions of a tile: pointers to the first KV head's key and value at each position.
template <typename T>
struct Tile {
  const T *keys[kTile], *values[kTile];
};

// Finds the positions [first, last) of the tile at `tile` in the pool. The others point to `zeros`, because memory that
// no token was written to may contain NaN.
template <typename T>
void Locate(const Problem& p, const Item& item, int tile, const T* zeros, Tile<T>* found) {
  const int32_t* const pages = p.page_table + p.req_pool_indices[item.row] * p.table_stride;
  for (int t = 0; t < kTile; ++t) {
    const int position = tile + t;
    found->keys[t] = found->values[t] = zeros;
    if (position < item.begin || position >= item.end) continue;
    const int64_t location =
        static_cast<int64_t>(pages[position / p.page_size]) * p.page_size + position % p.page_size;
    const int64_t at = (location * p.kv_heads + item.head) * p.dim;
    found->keys[t] = static_cast<const T*>(p.keys) + at;
    found->values[t] = static_cast<const T*>(p.values) + at;
  }
}

template <typename T>
void Prefetch(const T* from, int size) {
  for (int i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

// A query: its vector, scaled; its partial result; and the positions of the current tile that it attends to.
struct Query {
  const float* q;
  float* partial;
  int first, last;
};

// Adds the positions of a tile, KV head number `head` of the item, to the partial results of kQueries queries. All
// positions of the tile are computed, because loops of fixed length are faster; those outside [first, last) get the
// weight 0. Meanwhile the keys and values of `next`, KV head number `next_head`, are requested from memory.
template <typename T, int kDim, int kQueries, typename Next>
void AddTile(const Problem& p, const Tile<T>& tile, int head, const Query* queries, const Tile<Next>* next,
             int next_head) {
  const int dim = kDim ? kDim : p.dim, offset = head * dim, next_offset = next_head * dim;
  Vec products[kQueries][kTile];
  for (int t = 0; t < kTile; t += kPositions) {
    Vec sums[kPositions][kQueries] = {};
    for (int j = 0; next != nullptr && j < kPositions; ++j) Prefetch(next->keys[t + j] + next_offset, dim);
    for (int d = 0; d < dim; d += kLanes) {
      Vec q[kQueries];
#pragma GCC unroll 4
      for (int i = 0; i < kQueries; ++i) q[i] = Load(queries[i].q + d);
#pragma GCC unroll 4
      for (int j = 0; j < kPositions; ++j) {
        const Vec key = Load(tile.keys[t + j] + offset + d);
#pragma GCC unroll 4
        for (int i = 0; i < kQueries; ++i) sums[j][i] += q[i] * key;
      }
    }
    for (int j = 0; j < kPositions; ++j) {
      for (int i = 0; i < kQueries; ++i) products[i][t + j] = sums[j][i];
    }
  }
  float weights[kQueries][kTile], corrections[kQueries];
  for (int i = 0; i < kQueries; ++i) {
    Vec scores = Sums(products[i]);
    if (p.soft_cap > 0) {
      for (int t = 0; t < kTile; ++t) scores[t] = p.soft_cap * std::tanh(scores[t] / p.soft_cap);
    }
    scores = (kLane >= queries[i].first & kLane < queries[i].last) ? scores : Broadcast(-kInfinity);
    float* const partial = queries[i].partial;
    const float before = partial[0], maximum = std::max(before, Max(scores));
    const Vec exponentials = Exp(scores - maximum);
    // The earlier sums were computed with a smaller maximum: scale them down.
    corrections[i] = maximum == before ? 1.0f : Exp(before - maximum);
    partial[0] = maximum;
    partial[1] = partial[1] * corrections[i] + Sum(exponentials);
    Store(exponentials, weights[i]);
  }
  constexpr int kVectors = kDim % (kChunk * kLanes) == 0 && kDim != 0 ? kChunk : 1;
  for (int d = 0; d < dim; d += kVectors * kLanes) {
    Vec sums[kQueries][kVectors] = {};
    for (int t = 0; t < kTile; ++t) {
      if (d == 0 && next != nullptr) Prefetch(next->values[t] + next_offset, dim);
      Vec value[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) value[v] = Load(tile.values[t] + offset + d + v * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < kQueries; ++i) {
        const Vec weight = Broadcast(weights[i][t]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[i][v] += weight * value[v];
      }
    }
    for (int i = 0; i < kQueries; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        float* const total = queries[i].partial + 2 + d + v * kLanes;
        Store(Load(total) * corrections[i] + sums[i][v], total);
      }
    }
  }
}

// Copies KV head number `head` of a tile to `buffer`, as floats: 2 * kTile * dim of them.
template <typename T>
Tile<float> Copy(const Tile<T>& tile, int head, int dim, float* buffer) {
  Tile<float> copy;
  for (int t = 0; t < kTile; ++t) {
    float *key = buffer + 2 * t * dim, *value = key + dim;
    for (int d = 0; d < dim; d += kLanes) {
      Store(Load(tile.keys[t] + head * dim + d), key + d), Store(Load(tile.values[t] + head * dim + d), value + d);
    }
    copy.keys[t] = key, copy.values[t] = value;
  }
  return copy;
}

// Adds a tile to all queries of one KV head of an item. `q` and `partials` are those of the head.
template <typename T, int kDim, typename Next>
void AddTileToHead(const Problem& p, const Item& item, int at, const Tile<T>& tile, int head, const float* q,
                   float* partials, const Tile<Next>& next, int next_head) {
  const int group = p.Group(), from = std::max(at, item.begin), to = std::min(at + kTile, item.end);
  Query queries[4];
  int count = 0;
  const Tile<Next>* prefetch = &next;
  const auto add = [&] {
    if (count == 4) AddTile<T, kDim, 4>(p, tile, head, queries, prefetch, next_head);
    if (count == 2 || count == 3) AddTile<T, kDim, 2>(p, tile, head, queries, prefetch, next_head);
    if (count & 1) AddTile<T, kDim, 1>(p, tile, head, queries + count - 1, count == 1 ? prefetch : nullptr, next_head);
    if (count > 0) prefetch = nullptr;
    count = 0;
  };
  for (int i = 0; i < item.num_tokens * group; ++i) {
    const int token = item.token + i / group;
    const int first = std::max(from, p.First(item.row, token)), last = std::min(to, p.Last(item.row, token));
    if (first >= last) continue;
    queries[count++] = {q + i * p.dim, partials + static_cast<int64_t>(i) * (p.dim + 2), first - at, last - at};
    if (count == 4) add();
  }
  add();
}

// Clears the partial results of `count` queries.
void Clear(int count, int dim, float* partials) {
  std::fill(partials, partials + static_cast<int64_t>(count) * (dim + 2), 0.0f);
  for (int i = 0; i < count; ++i) partials[static_cast<int64_t>(i) * (dim + 2)] = -kInfinity;
}

// Adds the partial results of `count` queries, of later positions, to earlier ones.
void MergeInto(const float* from, int count, int dim, float* to) {
  for (int i = 0; i < count; ++i, from += dim + 2, to += dim + 2) {
    if (from[1] == 0) continue;  // the query attends to none of these positions
    const float maximum = std::max(to[0], from[0]);
    const float a = to[1] == 0 ? 0 : Exp(to[0] - maximum), b = Exp(from[0] - maximum);
    for (int d = 1; d < dim + 2; ++d) to[d] = to[d] * a + from[d] * b;
    to[0] = maximum;
  }
}

// Buffers of a thread, kept from call to call.
template <typename T>
struct Scratch {
  std::vector<float> q, partials, tile;
  std::vector<T> zeros;

  // Returns at least `size` elements.
  template <typename U>
  static U* Grow(std::vector<U>* buffer, size_t size) {
    if (buffer->size() < size) buffer->resize(size);
    return buffer->data();
  }
};

// Attention of one item. kDim is the head dimension if it is known at compile time, else 0.
template <typename T, int kDim>
void Attend(const Problem& p, const Item& item, float* partials) {
  static thread_local Scratch<T> scratch;
  const int dim = p.dim, group = p.Group(), queries = item.num_tokens * group, all = queries * item.num_heads;
  float* const q = scratch.Grow(&scratch.q, static_cast<size_t>(all) * dim);
  const T* const zeros = scratch.Grow(&scratch.zeros, static_cast<size_t>(item.num_heads) * dim);
  for (int h = 0, i = 0; h < item.num_heads; ++h) {
    for (int j = 0; j < queries; ++j, ++i) {
      const T* from = static_cast<const T*>(p.q) +
                      (p.cu_seqlens_q[item.row] + item.token + j / group) * p.q_stride +
                      static_cast<int64_t>((item.head + h) * group + j % group) * dim;
      for (int d = 0; d < dim; d += kLanes) Store(Load(from + d) * p.scale, q + i * dim + d);
    }
  }
  float* const total = partials + item.partial;
  Clear(all, dim, total);
  Tile<T> tiles[2];  // the current tile, and the next one, which is on its way from memory
  Locate(p, item, item.begin / kTile * kTile, zeros, &tiles[0]);
  for (int split = item.begin / kSplit * kSplit, now = 0; split < item.end; split += kSplit) {
    // The first split is computed in place, later ones are merged with it.
    const bool first = split <= item.begin;
    float* const part = first ? total : scratch.Grow(&scratch.partials, static_cast<size_t>(all) * (dim + 2));
    if (!first) Clear(all, dim, part);
    const int begin = std::max(split, item.begin / kTile * kTile), end = std::min(split + kSplit, item.end);
    for (int at = begin; at < end; at += kTile, now = 1 - now) {
      Locate(p, item, at + kTile, zeros, &tiles[1 - now]);
      for (int h = 0; h < item.num_heads; ++h) {
        const bool last = h + 1 == item.num_heads;
        const Tile<T>& next = tiles[last ? 1 - now : now];
        const int next_head = last ? 0 : h + 1;
        const float* const head_q = q + static_cast<int64_t>(h) * queries * dim;
        float* const head_part = part + static_cast<int64_t>(h) * queries * (dim + 2);
        if (queries > kQueriesInPlace) {
          const Tile<float> copy = Copy(tiles[now], h, dim, scratch.Grow(&scratch.tile, 2 * kTile * dim));
          AddTileToHead<float, kDim>(p, item, at, copy, 0, head_q, head_part, next, next_head);
        } else {
          AddTileToHead<T, kDim>(p, item, at, tiles[now], h, head_q, head_part, next, next_head);
        }
      }
    }
    if (!first) MergeInto(part, all, dim, total);
  }
}

// Merges a group of items in the order of positions, and writes the result. The sums of the first item are overwritten.
template <typename T>
void Merge(const Problem& p, const Item* first, int count, float* partials) {
  const int dim = p.dim, group = p.Group(), queries = first->num_tokens * group;
  const float* total = partials + first->partial;
  for (int s = 1; s < count; ++s) {
    MergeInto(partials + first[s].partial, queries * first->num_heads, dim, partials + first->partial);
  }
  for (int h = 0; h < first->num_heads; ++h) {
    for (int j = 0; j < queries; ++j, total += dim + 2) {
      T* out = static_cast<T*>(p.out) + (p.cu_seqlens_q[first->row] + first->token + j / group) * p.out_stride +
               static_cast<int64_t>((first->head + h) * group + j % group) * dim;
      // A sink is one more summand of the denominator. No value belongs to it.
      const int q_head = (first->head + h) * group + j % group;
      const float sink = p.sinks == nullptr || total[1] == 0 ? 0 : std::exp(p.sinks[q_head] - total[0]);
      // A padding row of length 0 attends to nothing; its result is 0.
      const float factor = total[1] == 0 ? 0 : 1 / (total[1] + sink);
      for (int d = 0; d < dim; d += kLanes) Store(Load(total + 2 + d) * factor, out + d);
    }
  }
}

// Lists the items and the number of the first item of each group. Returns the number of floats for the partial results.
// A row of few query tokens is divided by positions, a row of many by tokens. Both are divided by heads if there are too
// few items for all threads: a core that reads all heads reads memory in the order of addresses.
int64_t ListItems(const Problem& p, int rows, int64_t threads, std::vector<Item>* items, std::vector<int>* groups) {
  int64_t size = 0, parts = 0;
  for (int row = 0; row < rows; ++row) {
    const int tokens = p.NumQueries(row);
    parts += tokens > kTokens ? (tokens + kTokens - 1) / kTokens : 1 + (p.seq_lens[row] - p.First(row, 0)) / kSplit;
  }
  int heads = p.kv_heads;
  while (threads > 1 && heads > 1 && parts * ((p.kv_heads + heads - 1) / heads) < threads * kItemsPerThread) {
    heads = (heads + 1) / 2;
  }
  for (int row = 0; row < rows; ++row) {
    const int all_tokens = p.NumQueries(row), length = p.seq_lens[row];
    for (int token = 0; token < all_tokens; token += kTokens) {
      const int tokens = std::min(kTokens, all_tokens - token);
      const int end = std::min(length, p.Last(row, token + tokens - 1)), begin = std::min(p.First(row, token), end);
      for (int head = 0; head < p.kv_heads; head += heads) {
        const int num_heads = std::min(heads, p.kv_heads - head), group = static_cast<int>(groups->size());
        groups->push_back(static_cast<int>(items->size()));
        int from = begin;
        do {
          const int to = all_tokens > kTokens ? end : std::min(end, (from / kSplit + 1) * kSplit);
          items->push_back({row, head, num_heads, token, tokens, from, to, size, group});
          size += static_cast<int64_t>(tokens) * p.Group() * num_heads * (p.dim + 2);
          from = to;
        } while (from < end);
      }
    }
  }
  groups->push_back(static_cast<int>(items->size()));
  return size;
}

template <typename T>
void Run(const Problem& p, int rows, int64_t threads) {
  std::vector<Item> items;
  std::vector<int> groups;
  const int64_t size = ListItems(p, rows, threads, &items, &groups);
  const std::unique_ptr<float[]> partials(new float[size]);
  const std::unique_ptr<std::atomic<int>[]> finished(new std::atomic<int>[groups.size()]());
  int64_t work = 0;
  for (const Item& item : items) {
    work += int64_t{2} * (item.end - item.begin) * item.num_tokens * item.num_heads * p.Group() * p.dim;
  }
  ParallelFor(items.size(), std::min(threads, 1 + work / kWorkPerThread), [&](int64_t i) {
    const Item& item = items[i];
    switch (p.dim) {
      case 64: Attend<T, 64>(p, item, partials.get()); break;
      case 128: Attend<T, 128>(p, item, partials.get()); break;
      default: Attend<T, 0>(p, item, partials.get());
    }
    // The thread that finishes a group's last item merges them.
    const int first = groups[item.group], count = groups[item.group + 1] - first;
    if (finished[item.group].fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      Merge<T>(p, &items[first], count, partials.get());
    }
  });
}

}  // namespace

namespace minisgl {

void PagedAttention(TensorView q, TensorView out, TensorView keys, TensorView values, TensorView page_table,
                    TensorView req_pool_indices, TensorView seq_lens, TensorView cu_seqlens_q, double scale,
                    int64_t window, double soft_cap, TensorView sinks, int64_t threads) {
  Check(q, "q", 3, 1), Check(out, "out", 3, 1), Check(keys, "keys", 4), Check(values, "values", 4);
  Check(page_table, "page_table", 2, 1), Check(req_pool_indices, "req_pool_indices", 1);
  Check(seq_lens, "seq_lens", 1), Check(cu_seqlens_q, "cu_seqlens_q", 1), Check(sinks, "sinks", 1);
  if (!IsFloat32(sinks) || (sinks.size(0) != 0 && sinks.size(0) != q.size(1))) {
    TVM_FFI_THROW(ValueError) << "sinks must be float32, one for each query head or none";
  }
  const Problem p{q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
                  Int32(page_table, "page_table"), Int32(req_pool_indices, "req_pool_indices"),
                  Int32(seq_lens, "seq_lens"), Int32(cu_seqlens_q, "cu_seqlens_q"),
                  q.stride(0), out.stride(0), page_table.stride(0),
                  static_cast<int>(keys.size(1)), static_cast<int>(q.size(1)), static_cast<int>(keys.size(2)),
                  static_cast<int>(q.size(2)), static_cast<int>(window),
                  static_cast<float>(scale), static_cast<float>(soft_cap),
                  sinks.size(0) == 0 ? nullptr : Data<float>(sinks)};
  if (p.dim % kMultiple != 0) TVM_FFI_THROW(ValueError) << "head_dim must be a multiple of " << kMultiple;
  SameType(q, out, "out"), SameType(q, keys, "keys"), SameType(q, values, "values");
  WithElementType(q, "q", [&](auto element) { Run<decltype(element)>(p, seq_lens.size(0), threads); });
}

}  // namespace minisgl

namespace {

// RMSNorm of one head (if there is a weight), then RoPE: dimension i is rotated together with dimension i + dim / 2.
template <typename T>
void NormRope(const T* from, const T* weight, float eps, const float* cos_sin, int dim, T* to) {
  const int half = dim / 2;
  float scale = 1;
  if (weight != nullptr) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int d = 0; d < dim; ++d) squares += ToFloat(from[d]) * ToFloat(from[d]);
    scale = 1 / std::sqrt(squares / dim + eps);
  }
  for (int d = 0; d < half; ++d) {
    float a = ToFloat(from[d]) * scale, b = ToFloat(from[d + half]) * scale;
    if (weight != nullptr) a *= ToFloat(weight[d]), b *= ToFloat(weight[d + half]);
    FromFloat(a * cos_sin[d] - b * cos_sin[d + half], to + d);
    FromFloat(b * cos_sin[d] + a * cos_sin[d + half], to + d + half);
  }
}

}  // namespace

namespace minisgl {

// minisgl/attention/__init__.py describes the arguments. The weights are empty tensors if the model has no QK-norm.
void NormRopeStore(TensorView qkv, TensorView q, TensorView keys, TensorView values, TensorView q_weight,
                   TensorView k_weight, TensorView cos_sin, TensorView out_cache_loc, double eps, int64_t threads) {
  Check(qkv, "qkv", 2, 1), Check(q, "q", 3), Check(keys, "keys", 4), Check(values, "values", 4);
  Check(q_weight, "q_weight", 1), Check(k_weight, "k_weight", 1), Check(cos_sin, "cos_sin", 2, 1);
  Check(out_cache_loc, "out_cache_loc", 1);
  SameType(qkv, q, "q"), SameType(qkv, keys, "keys"), SameType(qkv, values, "values");
  SameType(qkv, q_weight, "q_weight"), SameType(qkv, k_weight, "k_weight");
  if (!IsFloat32(cos_sin)) TVM_FFI_THROW(ValueError) << "cos_sin must be float32";
  if (out_cache_loc.dtype().code != kDLInt || out_cache_loc.dtype().bits != 64) {
    TVM_FFI_THROW(ValueError) << "out_cache_loc must be int64";
  }
  const int q_heads = q.size(1), kv_heads = keys.size(2), dim = q.size(2);
  WithElementType(qkv, "qkv", [&](auto element) {
    using T = decltype(element);
    const bool norm = q_weight.size(0) > 0;
    const T *q_norm = norm ? Data<T>(q_weight) : nullptr, *k_norm = norm ? Data<T>(k_weight) : nullptr;
    const auto token = [&](int64_t i) {
      const T* from = Data<T>(qkv) + i * qkv.stride(0);
      const float* angles = Data<float>(cos_sin) + i * cos_sin.stride(0);
      const int64_t location = Data<int64_t>(out_cache_loc)[i] * kv_heads * dim;
      for (int h = 0; h < q_heads; ++h, from += dim) {
        NormRope(from, q_norm, static_cast<float>(eps), angles, dim, Data<T>(q) + (i * q_heads + h) * dim);
      }
      for (int h = 0; h < kv_heads; ++h, from += dim) {
        NormRope(from, k_norm, static_cast<float>(eps), angles, dim, Data<T>(keys) + location + h * dim);
      }
      std::copy(from, from + kv_heads * dim, Data<T>(values) + location);
    };
    const int64_t work = qkv.size(0) * qkv.size(1);
    ParallelFor(qkv.size(0), std::min(threads, 1 + work / kWorkPerThread), token);
  });
}

}  // namespace minisgl

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attention, PagedAttention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_rope_store, NormRopeStore);
