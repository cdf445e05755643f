// One GPU thread: a stack of its own, left and entered again where it waits.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define METAL_HOST_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#endif

namespace metal_host {

constexpr size_t STACK_BYTES = 256 * 1024;
constexpr size_t STACK_GUARD = 4096;
constexpr uint32_t MAX_THREADS = 1024;

enum class State : uint8_t { READY, AT_BARRIER, AT_SIMD, ENDED };

struct Fiber {
  State state;
  int line;               // of the last synchronization reached; 0: none yet
  const char* operation;  // its name
  uint32_t simd_operations;
#ifdef __x86_64__
  void* stack_pointer;
#else
  ucontext_t context;
#endif
  void* fake_stack;
};

inline Fiber fibers[MAX_THREADS + 1];  // one more, so that every thread has a next
inline Fiber scheduler_fiber;
inline uint8_t* stacks;  // MAX_THREADS of STACK_GUARD + STACK_BYTES
inline void (*thread_main)();
#ifdef METAL_HOST_ASAN
inline const void* main_stack;
inline size_t main_stack_bytes;
#endif

inline uint8_t* stack_of(uint32_t thread) { return stacks + thread * (STACK_BYTES + STACK_GUARD) + STACK_GUARD; }
inline bool on_a_stack(uintptr_t address) {
  return address - uintptr_t(stacks) < MAX_THREADS * (STACK_BYTES + STACK_GUARD);
}

inline void allocate_stacks() {
  size_t bytes = MAX_THREADS * (STACK_BYTES + STACK_GUARD);
  stacks = (uint8_t*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) abort();
  for (uint32_t t = 0; t < MAX_THREADS; t++) mprotect(stack_of(t) - STACK_GUARD, STACK_GUARD, PROT_NONE);
}

#ifdef __x86_64__
// Saves what a called function must keep, changes the stack, takes the same from the other stack.
extern "C" void metal_host_switch(void** save, void* load);
asm(R"(
.text
.globl metal_host_switch
.type metal_host_switch, @function
metal_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size metal_host_switch, .-metal_host_switch
)");
#endif

// `from` stays where it is until somebody switches to it; an `ending` one never runs again.
inline void switch_fiber(Fiber& from, Fiber& to, bool ending = false) {
#ifdef METAL_HOST_ASAN
  bool to_scheduler = &to == &scheduler_fiber;
  const void* bottom = to_scheduler ? main_stack : stack_of(uint32_t(&to - fibers));
  size_t bytes = to_scheduler ? main_stack_bytes : STACK_BYTES;
  __sanitizer_start_switch_fiber(ending ? nullptr : &from.fake_stack, bottom, bytes);
#endif
#ifdef __x86_64__
  metal_host_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#ifdef METAL_HOST_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
  (void)ending;
}

inline void fiber_start() {
#ifdef METAL_HOST_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_bytes);
#endif
  thread_main();
  __builtin_trap();
}

inline void prepare_fiber(uint32_t thread) {
  Fiber& f = fibers[thread];
  memset(&f, 0, sizeof f);
#ifdef METAL_HOST_ASAN
  // The last thread here left without a return from its outermost functions, whose frames lie at the top.
  __asan_unpoison_memory_region(stack_of(thread) + STACK_BYTES - 4096, 4096);
#endif
#ifdef __x86_64__
  uintptr_t top = uintptr_t(stack_of(thread) + STACK_BYTES) & ~uintptr_t(15);
  void** frame = (void**)(top - 16);  // fiber_start sees a 16-byte aligned stack with a return address on it
  *frame = (void*)fiber_start;
  f.stack_pointer = frame - 6;
  memset(f.stack_pointer, 0, 6 * sizeof(void*));
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = stack_of(thread);
  f.context.uc_stack.ss_size = STACK_BYTES;
  makecontext(&f.context, fiber_start, 0);
#endif
}

}  // namespace metal_host
