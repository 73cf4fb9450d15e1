// Types that params structs are made of, shared by host and device; includable from plain C++ (the bindings).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace skv {

enum class DType : int32_t { kBFloat16, kHalf };

/// Keys or values as [P, K, S, D], last dim contiguous, rows 16-byte aligned; strides in elements.
/// Slot j of request b, head h is page `table[b, j / page_size]`, offset j % page_size; without a table, P == B
/// and the slot is pool[b, h, j]. Only slots below the request's length have a table entry worth reading.
/// Params hold `PoolView<void>`; the launcher that picks the dtype takes `.as<T>()`.
template <typename T>
struct PoolView {
  T* data;               // [P, K, S, D]
  int64_t stride_page;
  int64_t stride_head;
  int64_t stride_slot;
  const int32_t* table;  // [B, M] or null
  int64_t stride_table;
  int32_t page_size;     // S; at least every length when there is no table

  template <typename U>
  __host__ __device__ PoolView<U> as() const {
    return {static_cast<U*>(data), stride_page, stride_head, stride_slot, table, stride_table, page_size};
  }

  /// First element of one slot's row.
  __device__ __forceinline__ T* row(int64_t request, int64_t head, int32_t slot) const {
    int64_t page = request;
    int32_t offset = slot;
    if (table != nullptr) {
      const int32_t entry = slot / page_size;
      page = table[request * stride_table + entry];
      offset = slot - entry * page_size;
    }
    return data + page * stride_page + head * stride_head + offset * stride_slot;
  }
};

}  // namespace skv
