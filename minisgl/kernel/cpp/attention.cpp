// Attention of few query tokens per row over KV pages on a CPU, and the QK-norm, RoPE and KV store before it.
//
// plugins/attention/paged.py has attention in plain torch, minisgl/kernel/rope.py the store; both describe the
// arguments. Three ideas from the literature:
// - Pages are read in place (PagedAttention, arXiv:2309.06180). Each key and value is read from memory once, for all
//   query heads that share it and for all query tokens of its row.
// - The softmax is computed in one pass: a running maximum and a running sum, both corrected when the maximum grows
//   (online softmax, arXiv:1805.02867; FlashAttention, arXiv:2205.14135).
// - A long row is split into parts that different threads compute, and the parts are merged at the end
//   (Flash-Decoding, Dao et al., 2023).
// The borders of tiles and splits are at fixed positions of a row. So the result of a query does not depend on the other
// rows, on the number of threads, or on how many query tokens its row has.
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "threads.h"
#include "values.h"
#include "vector.h"

namespace {

using namespace minisgl;

constexpr int kTile = kLanes;  // positions between two corrections of the running softmax
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kSplit = 512;  // positions of one work item; a multiple of kTile
constexpr int64_t kWorkPerThread = 1 << 15;  // multiply-adds that are worth waking another thread

struct Problem {
  const void *q, *keys, *values;  // q [tokens, q_heads, dim]; keys and values [locations, kv_heads, dim]
  void* out;                      // like q
  const int32_t *page_table, *req_pool_indices, *seq_lens, *cu_seqlens_q;
  int64_t q_stride, out_stride, table_stride;  // in elements, between tokens or between rows of the page table
  int page_size, q_heads, kv_heads, dim, window;
  float scale, soft_cap;

  int Group() const { return q_heads / kv_heads; }
  int NumQueries(int row) const { return cu_seqlens_q[row + 1] - cu_seqlens_q[row]; }
  // The positions that query token `token` of a row attends to are [First, Last).
  int Last(int row, int token) const { return seq_lens[row] - NumQueries(row) + token + 1; }
  int First(int row, int token) const { return window < 0 ? 0 : std::max(0, Last(row, token) - window); }
};

// One KV head of one split of one row. Its partial results begin at `partial`: for each query token and query head the
// maximum of the scores, the sum of the weights, and the weighted sum of the values.
struct Item {
  int row, kv_head, begin, end;  // positions [begin, end)
  int64_t partial;
  int pair;  // number of the item's (row, KV head) pair: the last of its items to finish merges the splits
};

// One KV head of the positions of a tile: a pointer to each key and each value.
template <typename T>
struct Tile {
  const T *keys[kTile], *values[kTile];
};

// Finds a tile in the pool, and requests its keys and values from memory.
template <typename T>
void Locate(const Problem& p, const Item& item, int tile, Tile<T>* found) {
  const int32_t* pages = p.page_table + p.req_pool_indices[item.row] * p.table_stride;
  for (int position = std::max(tile, item.begin); position < std::min(tile + kTile, item.end); ++position) {
    const int64_t location =
        static_cast<int64_t>(pages[position / p.page_size]) * p.page_size + position % p.page_size;
    const int64_t at = (location * p.kv_heads + item.kv_head) * p.dim;
    const T* key = found->keys[position - tile] = static_cast<const T*>(p.keys) + at;
    const T* value = found->values[position - tile] = static_cast<const T*>(p.values) + at;
    for (int d = 0; d < p.dim; d += 64 / sizeof(T)) __builtin_prefetch(key + d), __builtin_prefetch(value + d);
  }
}

// Returns the positions [first, last) of a tile as floats, and `zeros` in place of the others. bfloat16 is converted into
// `buffer`; floats are used in place.
template <typename T>
Tile<float> Widen(const Tile<T>& tile, int first, int last, int dim, const float* zeros, float* buffer) {
  Tile<float> wide;
  for (int t = 0; t < kTile; ++t) {
    const bool inside = first <= t && t < last;
    if constexpr (std::is_same_v<T, float>) {
      wide.keys[t] = inside ? tile.keys[t] : zeros;
      wide.values[t] = inside ? tile.values[t] : zeros;
    } else {
      float *key = buffer + 2 * t * dim, *value = key + dim;
      for (int d = 0; inside && d < dim; d += kLanes) {
        Store(Load(tile.keys[t] + d), key + d), Store(Load(tile.values[t] + d), value + d);
      }
      wide.keys[t] = inside ? key : zeros;
      wide.values[t] = inside ? value : zeros;
    }
  }
  return wide;
}

// Adds the positions [first, last) of a tile to the partial result of one query. `q` is the query, scaled. All positions
// of the tile are computed, because loops of fixed length are faster; the others get the weight 0.
template <int kDim>
void AddTile(const Problem& p, const Tile<float>& tile, int first, int last, const float* q, float* partial) {
  const int dim = kDim ? kDim : p.dim;
  Vec products[kTile];
  for (int t = 0; t < kTile; ++t) {
    products[t] = Load(q) * Load(tile.keys[t]);
    for (int d = kLanes; d < dim; d += kLanes) products[t] += Load(q + d) * Load(tile.keys[t] + d);
  }
  Vec scores = Sums(products);
  if (p.soft_cap > 0) {
    for (int t = 0; t < kTile; ++t) scores[t] = p.soft_cap * std::tanh(scores[t] / p.soft_cap);
  }
  scores = kLane >= first & kLane < last ? scores : Broadcast(-kInfinity);
  const float maximum = std::max(partial[0], Max(scores));
  const Vec weights = Exp(scores - maximum);
  // The earlier sums were computed with a smaller maximum: scale them down.
  const float correction = Exp(partial[0] - maximum);
  partial[0] = maximum;
  partial[1] = partial[1] * correction + Sum(weights);
  for (int d = 0; d < dim; d += kLanes) {
    Vec sum = Load(partial + 2 + d) * correction;
    for (int t = 0; t < kTile; ++t) sum += weights[t] * Load(tile.values[t] + d);
    Store(sum, partial + 2 + d);
  }
}

// Attention of one item. kDim is the head dimension if it is known at compile time, else 0.
template <typename T, int kDim>
void Attend(const Problem& p, const Item& item, float* partials) {
  const int dim = kDim ? kDim : p.dim, group = p.Group(), queries = p.NumQueries(item.row) * group;
  std::vector<float> scaled(static_cast<size_t>(queries) * dim);
  for (int i = 0; i < queries; ++i) {
    const T* q = static_cast<const T*>(p.q) + (p.cu_seqlens_q[item.row] + i / group) * p.q_stride +
                 static_cast<int64_t>(item.kv_head * group + i % group) * dim;
    for (int d = 0; d < dim; d += kLanes) Store(Load(q + d) * p.scale, &scaled[i * dim + d]);
    float* const partial = partials + item.partial + static_cast<int64_t>(i) * (dim + 2);
    std::fill(partial, partial + dim + 2, 0.0f);
    partial[0] = -kInfinity;
  }
  const std::vector<float> zeros(dim);
  std::vector<float> buffer(std::is_same_v<T, float> ? 0 : 2 * kTile * dim);
  Tile<T> tiles[2];  // the current tile, and the next one, which is on its way from memory
  const int begin = item.begin / kTile * kTile;
  Locate(p, item, begin, &tiles[0]);
  for (int at = begin, now = 0; at < item.end; at += kTile, now = 1 - now) {
    Locate(p, item, at + kTile, &tiles[1 - now]);
    const int from = std::max(at, item.begin), to = std::min(at + kTile, item.end);
    const Tile<float> tile = Widen(tiles[now], from - at, to - at, dim, zeros.data(), buffer.data());
    for (int i = 0; i < queries; ++i) {
      const int first = std::max(from, p.First(item.row, i / group)), last = std::min(to, p.Last(item.row, i / group));
      if (first >= last) continue;
      float* const partial = partials + item.partial + static_cast<int64_t>(i) * (dim + 2);
      AddTile<kDim>(p, tile, first - at, last - at, &scaled[i * dim], partial);
    }
  }
}

// Merges the splits of one (row, KV head) pair, in the order of positions, and writes the result. `first` is the pair's
// first item; its other splits follow it. The sums of the first split are overwritten.
template <typename T>
void Merge(const Problem& p, const Item* first, int splits, float* partials) {
  const int dim = p.dim, group = p.Group();
  for (int i = 0; i < p.NumQueries(first->row) * group; ++i) {
    const auto partial = [&](int s) { return partials + first[s].partial + static_cast<int64_t>(i) * (dim + 2); };
    float* const total = partial(0);
    for (int s = 1; s < splits; ++s) {
      const float* const other = partial(s);
      if (other[1] == 0) continue;  // no position of this split is visible to the query
      const float maximum = std::max(total[0], other[0]);
      const float a = total[1] == 0 ? 0 : Exp(total[0] - maximum), b = Exp(other[0] - maximum);
      for (int d = 1; d < dim + 2; ++d) total[d] = total[d] * a + other[d] * b;
      total[0] = maximum;
    }
    T* out = static_cast<T*>(p.out) + (p.cu_seqlens_q[first->row] + i / group) * p.out_stride +
             static_cast<int64_t>(first->kv_head * group + i % group) * dim;
    // A padding row of length 0 attends to nothing; its result is 0.
    const float factor = total[1] == 0 ? 0 : 1 / total[1];
    for (int d = 0; d < dim; ++d) FromFloat(total[2 + d] * factor, out + d);
  }
}

// Lists the items, split after split of each (row, KV head) pair, and the number of the first item of each pair.
// Returns the number of floats for the partial results.
int64_t ListItems(const Problem& p, int rows, std::vector<Item>* items, std::vector<int>* pairs) {
  int64_t size = 0;
  for (int row = 0; row < rows; ++row) {
    const int tokens = p.NumQueries(row), end = p.seq_lens[row], begin = std::min(p.First(row, 0), end);
    for (int head = 0; head < p.kv_heads; ++head) {
      const int pair = static_cast<int>(pairs->size());
      pairs->push_back(static_cast<int>(items->size()));
      for (int split = begin / kSplit * kSplit; split == begin / kSplit * kSplit || split < end; split += kSplit) {
        items->push_back({row, head, std::max(split, begin), std::min(split + kSplit, end), size, pair});
        size += static_cast<int64_t>(tokens) * p.Group() * (p.dim + 2);
      }
    }
  }
  pairs->push_back(static_cast<int>(items->size()));
  return size;
}

template <typename T>
void Run(const Problem& p, int rows, int64_t threads) {
  std::vector<Item> items;
  std::vector<int> pairs;
  const int64_t size = ListItems(p, rows, &items, &pairs);
  const std::unique_ptr<float[]> partials(new float[size]);
  const std::unique_ptr<std::atomic<int>[]> finished(new std::atomic<int>[pairs.size()]());
  int64_t work = 0;
  for (const Item& item : items) work += 2 * (item.end - item.begin) * p.NumQueries(item.row) * p.Group() * p.dim;
  ParallelFor(items.size(), std::min(threads, 1 + work / kWorkPerThread), [&](int64_t i) {
    const Item& item = items[i];
    switch (p.dim) {
      case 64: Attend<T, 64>(p, item, partials.get()); break;
      case 128: Attend<T, 128>(p, item, partials.get()); break;
      default: Attend<T, 0>(p, item, partials.get());
    }
    // The thread that finishes a pair's last split merges them.
    const int first = pairs[item.pair], splits = pairs[item.pair + 1] - first;
    if (finished[item.pair].fetch_add(1, std::memory_order_acq_rel) + 1 == splits) {
      Merge<T>(p, &items[first], splits, partials.get());
    }
  });
}

void PagedAttention(TensorView q, TensorView out, TensorView keys, TensorView values, TensorView page_table,
                    TensorView req_pool_indices, TensorView seq_lens, TensorView cu_seqlens_q, double scale,
                    int64_t window, double soft_cap, int64_t threads) {
  Check(q, "q", 3, 1), Check(out, "out", 3, 1), Check(keys, "keys", 4), Check(values, "values", 4);
  Check(page_table, "page_table", 2, 1), Check(req_pool_indices, "req_pool_indices", 1);
  Check(seq_lens, "seq_lens", 1), Check(cu_seqlens_q, "cu_seqlens_q", 1);
  const Problem p{q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
                  Int32(page_table, "page_table"), Int32(req_pool_indices, "req_pool_indices"),
                  Int32(seq_lens, "seq_lens"), Int32(cu_seqlens_q, "cu_seqlens_q"),
                  q.stride(0), out.stride(0), page_table.stride(0),
                  static_cast<int>(keys.size(1)), static_cast<int>(q.size(1)), static_cast<int>(keys.size(2)),
                  static_cast<int>(q.size(2)), static_cast<int>(window),
                  static_cast<float>(scale), static_cast<float>(soft_cap)};
  if (p.dim % kLanes != 0) TVM_FFI_THROW(ValueError) << "head_dim must be a multiple of " << kLanes;
  SameType(q, out, "out"), SameType(q, keys, "keys"), SameType(q, values, "values");
  WithElementType(q, "q", [&](auto element) { Run<decltype(element)>(p, seq_lens.size(0), threads); });
}

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

// minisgl/kernel/rope.py describes the arguments. The weights are empty tensors if the model has no QK-norm.
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

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attention, PagedAttention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_rope_store, NormRopeStore);
