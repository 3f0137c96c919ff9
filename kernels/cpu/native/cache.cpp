// New keys and values into the paged cache.
#include "program.h"
#include "vectors.h"

namespace wk {
namespace {

// rows, key, key stride, value, value stride, key cache, value cache, block stride of both, block size, elements of a
// token, slots, bytes of a slot (4 or 8). Slot -1 is not written.
template <class T>
void reshape_and_cache(const Arg* args, std::int64_t begin, std::int64_t end) {
  const std::int64_t block_stride = args[7], block_size = args[8], size = args[9];
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t slot = args[11] == 4 ? at<std::int32_t>(args[10])[row] : at<std::int64_t>(args[10])[row];
    if (slot < 0) continue;
    const std::int64_t place = slot / block_size * block_stride + slot % block_size * size;
    std::memcpy(at<T>(args[5]) + place, at<T>(args[1]) + row * args[2], size * sizeof(T));
    std::memcpy(at<T>(args[6]) + place, at<T>(args[3]) + row * args[4], size * sizeof(T));
  }
}

std::int64_t rows(const Arg* args) { return args[0]; }

const Register kernels[] = {
    Register({"reshape_and_cache_float32", 12, rows, reshape_and_cache<float>, true}),
    Register({"reshape_and_cache_bfloat16", 12, rows, reshape_and_cache<bfloat16>, true}),
};

}  // namespace
}  // namespace wk
