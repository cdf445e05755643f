// What a kernel's entry function is given, and where its threadgroup arrays lie. Shared by kernel and worker.
#pragma once

namespace metal_host {
struct Attributes {  // the thread attributes that MLX declares, by Metal's names
  uint dispatch_quadgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup;
  uint quadgroup_index_in_threadgroup, quadgroups_per_threadgroup;
  uint simdgroup_index_in_threadgroup, simdgroups_per_threadgroup;
  uint thread_execution_width, thread_index_in_quadgroup, thread_index_in_simdgroup, thread_index_in_threadgroup;
  uint threads_per_simdgroup;
  uint3 dispatch_threads_per_threadgroup, grid_origin, grid_size, thread_position_in_grid, thread_position_in_threadgroup;
  uint3 threadgroup_position_in_grid, threadgroups_per_grid, threads_per_grid, threads_per_threadgroup;
};
typedef void (*Entry)(void* const* buffers, const Attributes& thread_attributes);

extern "C" void* metal_host_shared(const char* name, uint line, size_t bytes);

// `threadgroup float tile[32];` becomes `auto& tile = metal_host::shared<float [32]>("tile", __LINE__);`
template <class T> inline T& shared(const char* name, uint line) {
  return *static_cast<T*>(metal_host_shared(name, line, sizeof(T)));
}
}  // namespace metal_host
