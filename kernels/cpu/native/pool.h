// Threads that share the pieces of calls. Nobody waits for a thread that has nothing in hand: where the processor is
// busy elsewhere, those that run do the work of those that do not.
#pragma once

#include <cstdint>

#include "program.h"

namespace wk {

struct Call {
  Kernel kernel;
  const Arg* args;
  bool waits;  // for the calls before; false when it goes on, row by row, with what the one before has left
};

// Carry out calls [first, last) in order, with up to `threads` threads, the calling one among them.
void run(const Call* first, const Call* last, int threads);

}  // namespace wk
