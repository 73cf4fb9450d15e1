// Registers ops against torch's stable ABI, in the namespace `hf_sparsekv_kernels` (or the one a builder passes as
// TORCH_EXTENSION_NAME). One binding file per op:
//
//   SKV_SCHEMAS(m) { m.def("op(Tensor(a!) out, Tensor x) -> ()"); }
//   SKV_CUDA_OPS(m) { m.impl("op", TORCH_BOX(&op)); }
//
// Arguments arrive as `Tensor`, `std::optional<Tensor>`, `int64_t`, `double`, `bool`.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#ifndef TORCH_EXTENSION_NAME
#define TORCH_EXTENSION_NAME hf_sparsekv_kernels
#endif

// The extra layer lets the namespace expand before the torch macros paste it into names.
#define SKV_FRAGMENT_IN(ns, m) STABLE_TORCH_LIBRARY_FRAGMENT(ns, m)
#define SKV_IMPL_IN(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)

#define SKV_SCHEMAS(m) SKV_FRAGMENT_IN(TORCH_EXTENSION_NAME, m)
#define SKV_CUDA_OPS(m) SKV_IMPL_IN(TORCH_EXTENSION_NAME, CUDA, m)
