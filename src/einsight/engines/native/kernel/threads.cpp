// PyTorch's operations run on the threads of an OpenMP runtime, which wait for more work by spinning. Threads of
// our own would share the cores with them; so where that runtime is libgomp and loaded, we borrow its threads, by
// the entry point that compiled `#pragma omp parallel` calls. This also leaves fork() as safe as PyTorch makes it
// (its data loaders' children use one thread). Elsewhere std::thread: 30 us to start, nothing to keep or to fork.
#include "threads.h"

#include <dlfcn.h>

#include <thread>
#include <vector>

namespace einsight {

using GompParallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

static GompParallel find_gomp() {
#ifdef RTLD_NOLOAD
  if (void *library = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD))
    return reinterpret_cast<GompParallel>(dlsym(library, "GOMP_parallel"));
#endif
  return nullptr;
}

void parallel(int threads, void (*work)(void *), void *data) {
  if (threads <= 1) return work(data);
  static const GompParallel gomp = find_gomp();
  if (gomp) return gomp(work, data, threads, 0);
  std::vector<std::thread> others;
  for (int n = 1; n < threads; n++) others.emplace_back(work, data);
  work(data);
  for (auto &thread : others) thread.join();
}

}  // namespace einsight
