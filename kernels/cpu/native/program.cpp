// The table of kernels, and what Python calls: one kernel at once, or a recorded sequence of them.
#include "program.h"

#include <cstdlib>
#include <new>
#include <vector>

#include "pool.h"

namespace wk {
namespace {

std::vector<Kernel>& table() {
  static std::vector<Kernel> kernels;
  return kernels;
}

struct Program {
  std::vector<Call> calls;
  std::vector<std::vector<Arg>> args;
};

}  // namespace

Register::Register(const Kernel& kernel) { table().push_back(kernel); }

void* scratch(std::size_t bytes) {
  struct Block {
    void* memory = nullptr;
    std::size_t size = 0;
    ~Block() { std::free(memory); }
  };
  static thread_local Block block;
  if (block.size < bytes) {
    std::free(block.memory);
    block.size = (bytes + 4095) / 4096 * 4096;
    block.memory = std::aligned_alloc(64, block.size);
    if (block.memory == nullptr) throw std::bad_alloc();
  }
  return block.memory;
}

}  // namespace wk

extern "C" {

// The number of a kernel, -1 if there is none of that name.
int wk_find(const char* name) {
  const auto& kernels = wk::table();
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    if (std::strcmp(kernels[i].name, name) == 0) return static_cast<int>(i);
  }
  return -1;
}

int wk_num_args(int kernel) { return wk::table()[kernel].num_args; }

int wk_is_rowwise(int kernel) { return wk::table()[kernel].rowwise; }

void wk_call(int kernel, const wk::Arg* args, int threads) {
  const wk::Call call{wk::table()[kernel], args, true};
  wk::run(&call, &call + 1, call.kernel.pieces(args) > 1 ? threads : 1);
}

void* wk_program_new() { return new wk::Program; }

void wk_program_add(void* handle, int kernel, const wk::Arg* args, int waits) {
  auto& program = *static_cast<wk::Program*>(handle);
  const wk::Kernel& found = wk::table()[kernel];
  program.args.emplace_back(args, args + found.num_args);
  program.calls.push_back({found, program.args.back().data(), waits != 0});
}

void wk_program_run(void* handle, wk::Arg rows, int threads) {
  auto& program = *static_cast<wk::Program*>(handle);
  for (auto& args : program.args) args[0] = rows;
  wk::run(program.calls.data(), program.calls.data() + program.calls.size(), threads);
}

void wk_program_free(void* handle) { delete static_cast<wk::Program*>(handle); }
}
