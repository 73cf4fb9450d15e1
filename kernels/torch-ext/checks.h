// Argument checks of the bindings. Every failure is an exception that names op and argument, raised before anything
// is launched; torch turns it into a Python RuntimeError.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "../csrc/types.h"
#include "library.h"
#include "stream.h"

namespace skv {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kAny = -1;  // in a shape: any size

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    default: return "another dtype";
  }
}

/// The checks of one call. `anchor` is the argument that decides the device.
class Checks {
 public:
  Checks(const char* op, const Tensor& anchor, const char* anchor_name) : op_(op) {
    require(anchor.is_cuda(), anchor_name, "must be on a CUDA device");
    device_ = anchor.get_device_index();
  }

  int32_t device() const { return device_; }

  template <typename... Parts>
  void require(bool condition, const char* argument, const Parts&... parts) const {
    if (condition) return;
    std::ostringstream message;
    message << "hf_sparsekv_kernels." << op_ << ": argument `" << argument << "` ";
    (message << ... << parts);
    throw std::runtime_error(message.str());
  }

  /// Device, dtype and shape (kAny matches every size).
  void tensor(const Tensor& t, const char* name, ScalarType dtype, std::initializer_list<int64_t> shape) const {
    on_device(t, name);
    require(t.scalar_type() == dtype, name, "must be ", dtype_name(dtype), ", got ", dtype_name(t.scalar_type()));
    has_shape(t, name, shape);
  }

  /// bfloat16 or float16 keys, values, queries: shape, contiguous last dim, 16-byte aligned rows.
  void rows(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) const {
    on_device(t, name);
    const ScalarType dtype = t.scalar_type();
    require(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, name,
            "must be bfloat16 or float16, got ", dtype_name(dtype));
    has_shape(t, name, shape);
    last_contiguous(t, name);
    aligned16(t, name);
  }

  /// Rows that are only copied: float32 as well, D * item size a multiple of 16 bytes.
  void copied_rows(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) const {
    on_device(t, name);
    const ScalarType dtype = t.scalar_type();
    require(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float, name,
            "must be bfloat16, float16 or float32, got ", dtype_name(dtype));
    has_shape(t, name, shape);
    last_contiguous(t, name);
    aligned16(t, name);
    require(t.size(t.dim() - 1) * static_cast<int64_t>(t.element_size()) % 16 == 0, name,
            "must have rows of a multiple of 16 bytes, its last dimension is ", t.size(t.dim() - 1));
  }

  void same_dtype(const Tensor& t, const char* name, const Tensor& other, const char* other_name) const {
    require(t.scalar_type() == other.scalar_type(), name, "must have the dtype of `", other_name, "` (",
            dtype_name(other.scalar_type()), "), got ", dtype_name(t.scalar_type()));
  }

  void last_contiguous(const Tensor& t, const char* name) const {
    const int64_t last = t.dim() - 1;
    require(t.size(last) <= 1 || t.stride(last) == 1, name, "must be contiguous in its last dimension, its stride is ",
            t.stride(last));
  }

  void contiguous(const Tensor& t, const char* name) const {
    require(t.is_contiguous(), name, "must be contiguous");
  }

  /// So that every row can be moved 16 bytes at a time.
  void aligned16(const Tensor& t, const char* name) const {
    require(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0, name, "must start at a 16-byte boundary");
    const int64_t item = static_cast<int64_t>(t.element_size());
    for (int64_t dim = 0; dim + 1 < t.dim(); ++dim) {
      require(t.size(dim) <= 1 || t.stride(dim) * item % 16 == 0, name,
              "must have rows at 16-byte boundaries, the stride of dimension ", dim, " is ", t.stride(dim),
              " elements");
    }
  }

  /// A pool [P, K, S, D] and its optional int32 table [B, M]; without one, P is B.
  void pool(const Tensor& pool, const char* name, const std::optional<Tensor>& table, const char* table_name,
            int64_t batch, int64_t kv_heads, int64_t dim) const {
    rows(pool, name, {kAny, kv_heads, kAny, dim});
    paging(pool, name, table, table_name, batch);
  }

  /// The table [B, M] of a pool, or as many pages as requests without one.
  void paging(const Tensor& pool, const char* name, const std::optional<Tensor>& table, const char* table_name,
              int64_t batch) const {
    if (table.has_value()) {
      tensor(*table, table_name, ScalarType::Int, {batch, kAny});
      last_contiguous(*table, table_name);
    } else {
      require(pool.size(0) == batch, name, "must have one page per request without a block table: expected ", batch,
              ", got ", pool.size(0));
    }
  }

 private:
  void on_device(const Tensor& t, const char* name) const {
    require(t.is_cuda() && t.get_device_index() == device_, name, "must be on CUDA device ", device_);
  }

  void has_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) const {
    bool equal = t.dim() == static_cast<int64_t>(shape.size());
    int64_t dim = 0;
    for (int64_t size : shape) {
      equal = equal && (size == kAny || t.size(dim) == size);
      ++dim;
    }
    if (equal) return;
    std::ostringstream expected;
    std::ostringstream actual;
    for (int64_t size : shape) (size == kAny ? expected << "any" : expected << size) << ' ';
    for (int64_t d = 0; d < t.dim(); ++d) actual << t.size(d) << ' ';
    require(false, name, "has the wrong shape: expected [ ", expected.str(), "], got [ ", actual.str(), "]");
  }

  const char* op_;
  int32_t device_ = 0;
};

/// The kernels' view of a checked pool.
inline PoolView<void> pool_view(const Tensor& pool, const std::optional<Tensor>& table) {
  PoolView<void> view{};
  view.data = pool.data_ptr();
  view.stride_page = pool.stride(0);
  view.stride_head = pool.stride(1);
  view.stride_slot = pool.stride(2);
  view.table = table.has_value() ? static_cast<const int32_t*>(table->data_ptr()) : nullptr;
  view.stride_table = table.has_value() ? table->stride(0) : 0;
  view.page_size = static_cast<int32_t>(pool.size(2));
  return view;
}

/// The same in units of 16 bytes, for kernels that only copy rows, whatever their dtype.
inline PoolView<void> chunk_view(const Tensor& pool, const std::optional<Tensor>& table) {
  PoolView<void> view = pool_view(pool, table);
  const int64_t per_chunk = 16 / static_cast<int64_t>(pool.element_size());
  view.stride_page /= per_chunk;
  view.stride_head /= per_chunk;
  view.stride_slot /= per_chunk;
  return view;
}

/// dtype of a tensor that passed `Checks::rows`.
inline DType row_dtype(const Tensor& t) {
  return t.scalar_type() == ScalarType::BFloat16 ? DType::kBFloat16 : DType::kHalf;
}

}  // namespace skv
