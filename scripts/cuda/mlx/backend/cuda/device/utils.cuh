// Stands in for MLX's header of this name, which its CPU wheel does not ship: what a custom kernel's signature needs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/limits>

#define MAX_NDIM 10
#define WARP_SIZE 32

namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, MAX_NDIM>;
using Strides = cuda::std::array<int64_t, MAX_NDIM>;
}  // namespace mlx::core::cu
