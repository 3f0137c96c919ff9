// What a native kernel is: how much work a call has, and doing a part of it. Threads share the work of one call, and
// wait for each other between two calls, so a kernel knows nothing of threads.
#pragma once

#include <cstdint>
#include <cstring>

namespace wk {

using Arg = std::int64_t;  // an integer, an address, or the bits of a double

template <class T>
inline T* at(Arg address) {
  return reinterpret_cast<T*>(address);
}

inline double real(Arg bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Kernel {
  const char* name;
  int num_args;  // args[0] is always the number of rows (tokens); addresses, sizes, strides and numbers follow
  // Pieces of work that may be done in any order and at the same time; must depend on the arguments alone.
  std::int64_t (*pieces)(const Arg* args);
  // Do pieces [begin, end). What a piece computes must not depend on begin and end: results never depend on threads.
  void (*run)(const Arg* args, std::int64_t begin, std::int64_t end);
  // Piece i reads and writes row i of its tensors only: calls of such kernels in a row need no waiting in between.
  bool rowwise = false;
};

struct Register {  // a static one in each source file makes a kernel known by name
  explicit Register(const Kernel& kernel);
};

// Memory of the calling thread, 64-byte aligned, valid until its next call of this function. Never shrinks.
void* scratch(std::size_t bytes);

}  // namespace wk
