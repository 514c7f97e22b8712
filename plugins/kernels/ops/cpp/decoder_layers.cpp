// All decoder layers of a step in one call: the operations of `operations.h`, one after another, with one team of threads.
//
// For a few rows, each operation takes some microseconds. As calls from Python, the calls themselves and the waking of
// threads take about as long again. `minisgl/models/decoder.py: DecoderLayer` shows what is computed.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <memory>
#include <utility>
#include <vector>

#include "operations.h"
#include "threads.h"

namespace {

using namespace minisgl;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Tensor;

// A contiguous tensor in the memory of this call, with the element type of another tensor.
class Local {
 public:
  Local(const TensorView& like, std::vector<int64_t> shape) : shape_(std::move(shape)), strides_(shape_.size()) {
    int64_t size = 1;
    for (size_t i = shape_.size(); i-- > 0; size *= shape_[i]) strides_[i] = size;
    memory_.reset(new char[size * like.dtype().bits / 8]);
    tensor_ = DLTensor{memory_.get(), {kDLCPU, 0}, static_cast<int32_t>(shape_.size()), like.dtype(),
                       shape_.data(), strides_.data(), 0};
  }
  operator TensorView() const { return TensorView(&tensor_); }

 private:
  std::vector<int64_t> shape_, strides_;
  std::unique_ptr<char[]> memory_;
  DLTensor tensor_;
};

// The columns [begin, end) of x [rows, columns].
class Columns {
 public:
  Columns(const TensorView& x, int64_t begin, int64_t end)
      : shape_{x.size(0), end - begin}, strides_{x.stride(0), 1},
        tensor_{static_cast<char*>(x.data_ptr()) + begin * x.dtype().bits / 8, {kDLCPU, 0}, 2, x.dtype(), shape_,
                strides_, 0} {}
  Columns(const Columns&) = delete;
  operator TensorView() const { return TensorView(&tensor_); }

 private:
  int64_t shape_[2], strides_[2];
  DLTensor tensor_;
};

// What a layer consists of, in the order of the arguments of MakeDecoderLayers.
enum Tensors { kInputNorm, kPostNorm, kQNorm, kKNorm, kSinks, kKeys, kValues, kTensors };
enum Numbers { kInputEps, kPostEps, kQKEps, kScale, kSoftCap, kWindow, kNumbers };
enum Products { kQkv, kOut, kGateUp, kDown, kProducts };

// Returns a function (x, out, threads): x · weightᵀ + bias with matrices of integers, whose outputs are side by side.
// `forms` has bits, group, mins and outputs of each matrix.
Function GroupedProduct(Array<Tensor> panels, Array<Array<int64_t>> forms, Tensor bias) {
  return Function::FromTyped([=](TensorView x, TensorView out, int64_t threads) {
    int64_t begin = 0;
    for (size_t i = 0; i < panels.size(); ++i) {
      const Array<int64_t> form = forms[i];
      const int64_t end = begin + form[3];
      const Columns part(out, begin, end);
      const TensorView all(bias);
      const int64_t elements = all.size(0) == 0 ? 0 : end - begin;
      int64_t shape[1] = {elements}, strides[1] = {1};
      const DLTensor part_bias{static_cast<char*>(all.data_ptr()) + (elements ? begin : 0) * all.dtype().bits / 8,
                               {kDLCPU, 0}, 1, all.dtype(), shape, strides, 0};
      const Tensor matrix = panels[i];
      GroupedLinear(x, TensorView(matrix), TensorView(&part_bias), part, form[0], form[1], form[2] != 0, threads);
      begin = end;
    }
  });
}

// The same with numbers of 16 or 32 bits. `panels` are the packed weight, for at least `packed_rows` rows, or empty.
Function PlainProduct(Tensor weight, Tensor panels, Tensor bias, int64_t packed_rows, int64_t few) {
  return Function::FromTyped([=](TensorView x, TensorView out, int64_t threads) {
    if (TensorView(panels).size(0) > 0 && x.size(0) >= packed_rows) {
      PackedLinear(x, TensorView(panels), TensorView(bias), out, threads);
    } else {
      Linear(x, TensorView(weight), TensorView(bias), out, few, threads);
    }
  });
}

// The sum of two products, one for each half of the inputs, rounded to the element type each.
Function HalvesProduct(Function first, Function second) {
  return Function::FromTyped([=](TensorView x, TensorView out, int64_t threads) {
    const int64_t half = x.size(1) / 2;
    const Columns before(x, 0, half), after(x, half, 2 * half);
    const Local other(out, {out.size(0), out.size(1)});
    first(TensorView(before), out, threads);
    second(TensorView(after), TensorView(other), threads);
    Add(out, other, threads);
  });
}

// Returns a function that computes all layers of x [tokens, hidden], the embedded tokens. It writes the last layer's
// partial sum to `out` and the residual stream to x. The other arguments are those of NormRopeStore and PagedAttention.
// `inner` is the number of columns between the MLP's products.
Function MakeDecoderLayers(Array<Tensor> tensors, Array<double> numbers, Array<Function> products, int64_t q_heads,
                           int64_t inner) {
  const size_t layers = tensors.size() / kTensors;
  if (tensors.size() != layers * kTensors || numbers.size() != layers * kNumbers ||
      products.size() != layers * kProducts || layers == 0) {
    TVM_FFI_THROW(ValueError) << "the arguments do not describe the same number of layers";
  }
  const auto run = [=](TensorView x, TensorView out, TensorView cos_sin, TensorView out_cache_loc,
                       TensorView page_table, TensorView req_pool_indices, TensorView seq_lens, TensorView cu_seqlens_q,
                       int64_t threads) {
    const Tensor keys = tensors[kKeys];
    const TensorView pool(keys);
    const int64_t rows = x.size(0), hidden = x.size(1), kv_heads = pool.size(2), dim = pool.size(3);
    const Local normed(x, {rows, hidden}), qkv(x, {rows, (q_heads + 2 * kv_heads) * dim}), q(x, {rows, q_heads, dim}),
        heads(x, {rows, q_heads * dim}), projected(x, {rows, hidden}), gate_up(x, {rows, 2 * inner}),
        gated(x, {rows, inner}), none(x, {0, hidden});
    int64_t heads_shape[3] = {rows, q_heads, dim}, heads_strides[3] = {q_heads * dim, dim, 1};
    const DLTensor by_head{TensorView(heads).data_ptr(), {kDLCPU, 0}, 3, x.dtype(), heads_shape, heads_strides, 0};
    // The residual stream, and the partial sum that the next norm adds to it, take turns in two tensors.
    TensorView residual = x, sum = x;
    for (size_t i = 0; i < layers; ++i) {
      const auto tensor = [&](Tensors which) {
        const Tensor found = tensors[i * kTensors + which];
        return TensorView(found);
      };
      const auto number = [&](Numbers which) { return numbers[i * kNumbers + which]; };
      const auto multiply = [&](Products which, const TensorView& from, const TensorView& to) {
        products[i * kProducts + which](from, to, threads);
      };
      // `sum` and `residual` become the residual stream, which is in `residual` afterwards.
      const auto norm = [&](Tensors weight, Numbers eps, const TensorView& add) {
        AddRmsNorm(residual, add, tensor(weight), normed, number(eps), threads);
      };
      norm(kInputNorm, kInputEps, i == 0 ? TensorView(none) : sum);
      multiply(kQkv, normed, qkv);
      NormRopeStore(qkv, q, tensor(kKeys), tensor(kValues), tensor(kQNorm), tensor(kKNorm), cos_sin, out_cache_loc,
                    number(kQKEps), threads);
      PagedAttention(q, TensorView(&by_head), tensor(kKeys), tensor(kValues), page_table, req_pool_indices, seq_lens,
                     cu_seqlens_q, number(kScale), static_cast<int64_t>(number(kWindow)), number(kSoftCap),
                     tensor(kSinks), threads);
      multiply(kOut, heads, projected);
      norm(kPostNorm, kPostEps, projected);
      multiply(kGateUp, normed, gate_up);
      SiluAndMul(gate_up, gated, threads);
      multiply(kDown, gated, out);
      sum = out;
    }
  };
  return Function::FromTyped([=](TensorView x, TensorView out, TensorView cos_sin, TensorView out_cache_loc,
                                 TensorView page_table, TensorView req_pool_indices, TensorView seq_lens,
                                 TensorView cu_seqlens_q, int64_t threads) {
    WithTeam(threads, [&] {
      run(x, out, cos_sin, out_cache_loc, page_table, req_pool_indices, seq_lens, cu_seqlens_q, threads);
    });
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_product, GroupedProduct);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plain_product, PlainProduct);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(halves_product, HalvesProduct);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decoder_layers, MakeDecoderLayers);
