// The operations of a decoder layer, each in the file that implements it.
#pragma once

#include "values.h"

namespace minisgl {

void AddRmsNorm(TensorView x, TensorView residual, TensorView weight, TensorView out, double eps, int64_t threads);
void Add(TensorView x, TensorView y, int64_t threads);
void SiluAndMul(TensorView x, TensorView out, int64_t threads);
void NormRopeStore(TensorView qkv, TensorView q, TensorView keys, TensorView values, TensorView q_weight,
                   TensorView k_weight, TensorView cos_sin, TensorView out_cache_loc, double eps, int64_t threads);
void PagedAttention(TensorView q, TensorView out, TensorView keys, TensorView values, TensorView page_table,
                    TensorView req_pool_indices, TensorView seq_lens, TensorView cu_seqlens_q, double scale,
                    int64_t window, double soft_cap, TensorView sinks, int64_t threads);
void GroupedLinear(TensorView x, TensorView panels, TensorView bias, TensorView out, int64_t bits, int64_t group,
                   bool mins, int64_t threads);
void Linear(TensorView x, TensorView weight, TensorView bias, TensorView out, int64_t few, int64_t threads);
void PackedLinear(TensorView x, TensorView panels, TensorView bias, TensorView out, int64_t threads);

}  // namespace minisgl
