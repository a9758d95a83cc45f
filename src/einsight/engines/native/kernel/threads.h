// Runs a function on several threads at once.
#pragma once

namespace einsight {

// Calls work(data) on up to `threads` threads, the calling one among them, and returns when all are done.
void parallel(int threads, void (*work)(void *), void *data);

}  // namespace einsight
